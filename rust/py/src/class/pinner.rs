//! Pins batches, as Python classes.

use std::sync::OnceLock;

use pyo3::prelude::*;
use ringloader_core::transport::copier::{Copier, CopyJob};

use super::arrival::{Arrival, Content};
use crate::batch::pin::{PinnedBatch, pin};
use crate::gil::without_interpreter;

/// Copies batches to torch's pinned memory; large tensors on a thread of its own, which begins with the first of them.
#[pyclass(frozen, module = "ringloader._native")]
pub(crate) struct Pinner(OnceLock<Copier>);

/// A batch in pinned memory, whose large tensors may still be on their way.
#[pyclass(frozen, module = "ringloader._native")]
pub(crate) struct Pinned {
    // INVARIANT: dropped before the batch, to whose memory it writes.
    job: Option<CopyJob>,
    batch: Py<PyAny>,
}

#[pymethods]
impl Pinner {
    #[new]
    fn new() -> Self {
        Self(OnceLock::new())
    }

    /// Begins to pin. Its slot goes back once it is copied. None, and nothing happens, for a batch that is more than
    /// tensors, each with memory of its own, in lists, tuples and dicts.
    fn pin(&self, py: Python<'_>, arrival: &Arrival) -> PyResult<Option<Pinned>> {
        let mut content = arrival.content();
        let delivery = match std::mem::replace(&mut *content, Content::Gone) {
            Content::Delivery(delivery) => delivery,
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
        Ok(Some(Pinned { job, batch: batch.unbind() }))
    }
}

#[pymethods]
impl Pinned {
    /// The batch, once all of it is there.
    fn result(&self, py: Python<'_>) -> Py<PyAny> {
        if let Some(job) = &self.job
            && !job.is_over()
        {
            without_interpreter(py, || job.finish());
        }
        self.batch.clone_ref(py)
    }
}
