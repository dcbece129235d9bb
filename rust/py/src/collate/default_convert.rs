//! torch's `default_convert`, as a Python class: native for trees of common types.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use super::fallback::{Part, are_unchanged};
use super::{DEEPEST, exact_items, is_number, is_text};
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

/// `None` for what torch must convert. Only the worker that sends the result sees it, so a dict of leaves may be the
/// same object.
fn converted<'py>(torch: &Torch, data: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyAny>>> {
    if let Ok(dict) = data.cast_exact::<PyDict>()
        && entries_of(dict).all(|(_, item)| is_leaf(torch, &item))
    {
        return Ok(Some(data.clone()));
    }
    tree(torch, data, 0)
}

fn tree<'py>(torch: &Torch, data: &Bound<'py, PyAny>, depth: u32) -> PyResult<Option<Bound<'py, PyAny>>> {
    if is_leaf(torch, data) {
        return Ok(Some(data.clone()));
    }
    if depth == DEEPEST {
        return Ok(None);
    }
    if let Ok(dict) = data.cast_exact::<PyDict>() {
        let made = dict.copy()?;
        // All of them first: a key's `__hash__` may be code that changes the dict.
        for (name, item) in entries_of(dict).collect::<Vec<_>>() {
            let Some(item) = tree(torch, &item, depth + 1)? else { return Ok(None) };
            made.set_item(name, item)?;
        }
        return Ok(Some(made.into_any()));
    }
    // A tuple becomes a list, as with torch.
    let Some(items) = exact_items(data) else { return Ok(None) };
    let made = PyList::empty(data.py());
    for item in &items {
        let Some(item) = tree(torch, item, depth + 1)? else { return Ok(None) };
        made.append(item)?;
    }
    Ok(Some(made.into_any()))
}

/// Returns true if `default_convert` leaves the object as it is.
fn is_leaf(torch: &Torch, object: &Bound<'_, PyAny>) -> bool {
    object.get_type().is(&torch.tensor) || object.is_none() || is_number(object) || is_text(object)
}
