//! Pins batches, as a Python class.

use std::sync::OnceLock;

use pyo3::prelude::*;
use ringloader_core::transport::copier::Copier;

use super::arrival::{Arrival, Content};
use super::pinned::Pinned;
use crate::batch::pin::{PinnedBatch, pin};
use crate::caught::caught;

/// Copies batches to torch's pinned memory; large tensors on a thread of its own, which begins with the first of them.
#[pyclass(frozen, module = "ringloader._native")]
pub(crate) struct Pinner(OnceLock<Copier>);

#[pymethods]
impl Pinner {
    #[new]
    fn new() -> Self {
        Self(OnceLock::new())
    }

    /// Begins to pin; the same object each time. Its slot goes back once it is copied. None, and nothing happens, for a
    /// batch that is more than tensors, each with memory of its own, in lists, tuples and dicts.
    fn pin(&self, py: Python<'_>, arrival: &Arrival) -> PyResult<Option<Py<Pinned>>> {
        if let Content::Pinned(pinned) = &*arrival.content() {
            return Ok(Some(pinned.clone_ref(py)));
        }
        let Some(mut lent) = arrival.lend() else { return Ok(None) };
        let delivery = lent.delivery();
        let pinned = caught(py, || {
            let made = pin(py, arrival.engine().templates(), delivery, || self.0.get_or_init(Copier::new))?;
            made.map(|PinnedBatch { job, batch }| Py::new(py, Pinned::new(job, batch.unbind()))).transpose()
        })?;
        if let Some(pinned) = &pinned {
            lent.replace(Content::Pinned(pinned.clone_ref(py)));
        }
        Ok(pinned)
    }
}
