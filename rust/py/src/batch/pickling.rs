//! Answers the pickler's question for the objects of a batch that must be pickled.

use std::sync::{Mutex, PoisonError};

use pyo3::prelude::*;

use super::leaves::Drafts;
use crate::torch::names::Torch;

/// Answers the pickler's question for each object that it does not write by itself: is it a leaf? It is its
/// `reducer_override`, which numbers, strings and exact containers pass by.
#[pyclass(frozen, module = "ringloader._native")]
#[derive(Default)]
pub(crate) struct Leaves {
    drafts: Mutex<Drafts>,
}

#[pymethods]
impl Leaves {
    /// How the leaf that stands for `object` is pickled; `NotImplemented` where there is none.
    fn __call__(&self, object: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        let py = object.py();
        let torch = Torch::get(py)?;
        // Taken out and put back: what is asked of torch meanwhile may run any code.
        let mut drafts = self.take();
        let number = match drafts.known.get(&(object.as_ptr() as usize)) {
            Some(&number) => Ok(Some(number)),
            None => match drafts.add(torch, object) {
                Ok(Some(number)) => {
                    drafts.known.insert(object.as_ptr() as usize, number);
                    Ok(Some(number))
                }
                // Anybody's code is called for it.
                Ok(None) => drafts.secure(torch, py).map(|()| None),
                other => other,
            },
        };
        *self.drafts.lock().unwrap_or_else(PoisonError::into_inner) = drafts;
        match number? {
            Some(number) => Ok((&torch.leaf, (number,)).into_pyobject(py)?.into_any().unbind()),
            None => Ok(py.NotImplemented()),
        }
    }
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
