//! Answers the pickler's question for each object of a batch that must be pickled.

use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple};

use super::leaves::Drafts;
use crate::torch::names::Torch;

/// Answers the pickler's question for each object: is it a leaf?
#[pyclass(frozen, module = "ringloader._native")]
#[derive(Default)]
pub(crate) struct Leaves {
    drafts: Mutex<Drafts>,
}

#[pymethods]
impl Leaves {
    /// The number of the leaf that stands for `object`; `None` if it must be pickled.
    fn __call__(&self, object: &Bound<'_, PyAny>) -> PyResult<Option<u32>> {
        let torch = Torch::get(object.py())?;
        // Taken out and put back: what is asked of torch meanwhile may run any code.
        let mut drafts = self.take();
        let number = match drafts.known.get(&(object.as_ptr() as usize)) {
            Some(&number) => Ok(Some(number)),
            None => match drafts.add(torch, object) {
                Ok(Some(number)) => {
                    drafts.known.insert(object.as_ptr() as usize, number);
                    Ok(Some(number))
                }
                Ok(None) if !is_inert(object) => drafts.secure(torch, object.py()).map(|()| None),
                other => other,
            },
        };
        *self.drafts.lock().unwrap_or_else(PoisonError::into_inner) = drafts;
        number
    }
}

/// Returns true if the pickler itself writes the object, without anybody else's code.
fn is_inert(object: &Bound<'_, PyAny>) -> bool {
    object.is_none()
        || object.is_exact_instance_of::<PyString>()
        || object.is_exact_instance_of::<PyInt>()
        || object.is_exact_instance_of::<PyFloat>()
        || object.is_exact_instance_of::<PyBool>()
        || object.is_exact_instance_of::<PyBytes>()
        || object.is_exact_instance_of::<PyDict>()
        || object.is_exact_instance_of::<PyList>()
        || object.is_exact_instance_of::<PyTuple>()
}

impl Leaves {
    /// Leaves that come back as they are, if `exact`.
    pub(super) fn new(exact: bool) -> Self {
        Self { drafts: Mutex::new(Drafts::new(exact)) }
    }

    pub(super) fn take(&self) -> Drafts {
        std::mem::take(&mut self.drafts.lock().unwrap_or_else(PoisonError::into_inner))
    }
}
