//! Pins batches, as a Python class.

use std::sync::OnceLock;

use pyo3::prelude::*;
use ringloader_core::transport::copier::Copier;

use super::arrival::{Arrival, Content};
use super::pinned::Pinned;
use crate::batch::pin::{PinnedBatch, pin};

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
        let mut content = arrival.content();
        let delivery = match std::mem::replace(&mut *content, Content::Gone) {
            Content::Delivery(delivery) => delivery,
            Content::Pinned(pinned) => {
                let found = pinned.clone_ref(py);
                *content = Content::Pinned(pinned);
                return Ok(Some(found));
            }
            other => {
                *content = other;
                return Ok(None);
            }
        };
        drop(content);
        let made = pin(py, arrival.engine().templates(), &delivery, || self.0.get_or_init(Copier::new));
        let Ok(Some(PinnedBatch { job, batch })) = made else {
            *arrival.content() = Content::Delivery(delivery);
            return made.map(|_| None);
        };
        let pinned = Py::new(py, Pinned::new(job, batch.unbind()))?;
        *arrival.content() = Content::Pinned(pinned.clone_ref(py));
        Ok(Some(pinned))
    }
}
