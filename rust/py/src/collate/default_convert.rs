//! torch's `default_convert`, as a Python class: native for what it leaves as it is, and for flat containers of that.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use super::fallback::{Part, are_unchanged};
use super::{exact_items, is_number, is_text};
use crate::objects::entries_of;
use crate::torch::names::Torch;

/// Stands in for `default_convert` in a worker.
///
/// MIRRORS `torch/utils/data/_utils/collate.py::default_convert`.
#[pyclass(frozen, module = "ringloader._native")]
pub(crate) struct Convert {
    function: Py<PyAny>,
    parts: Vec<Part>,
}

#[pymethods]
impl Convert {
    #[new]
    fn new(function: Py<PyAny>, parts: Vec<Part>) -> Self {
        Self { function, parts }
    }

    fn __call__<'py>(&self, data: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let py = data.py();
        if are_unchanged(py, &self.parts)?
            && let Some(made) = converted(Torch::get(py)?, data)?
        {
            return Ok(made);
        }
        self.function.bind(py).call1((data,))
    }
}

/// `None` for what torch must convert: all but leaves, and flat containers of them. Only the worker that sends the result
/// sees it, so a dict of leaves may be the same object.
fn converted<'py>(torch: &Torch, data: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyAny>>> {
    let stays = match data.cast_exact::<PyDict>() {
        Ok(dict) => entries_of(dict).all(|(_, item)| is_leaf(torch, &item)),
        Err(_) => is_leaf(torch, data),
    };
    if stays {
        return Ok(Some(data.clone()));
    }
    // A tuple becomes a list, as with torch.
    let items = exact_items(data).filter(|items| items.iter().all(|item| is_leaf(torch, item)));
    items.map(|items| Ok(PyList::new(data.py(), items)?.into_any())).transpose()
}

/// Returns true if `default_convert` leaves the object as it is.
fn is_leaf(torch: &Torch, object: &Bound<'_, PyAny>) -> bool {
    object.get_type().is(&torch.tensor) || object.is_none() || is_number(object) || is_text(object)
}
