//! A batch that is being pinned, as a Python class.

use pyo3::prelude::*;
use ringloader_core::transport::copier::CopyJob;

use crate::gil::without_interpreter;

/// A batch in pinned memory, whose large tensors may still be on their way.
#[pyclass(frozen, module = "ringloader._native")]
pub(crate) struct Pinned {
    // INVARIANT: dropped before the batch, to whose memory it writes.
    job: Option<CopyJob>,
    batch: Py<PyAny>,
}

impl Pinned {
    pub(crate) fn new(job: Option<CopyJob>, batch: Py<PyAny>) -> Self {
        Self { job, batch }
    }
}

#[pymethods]
impl Pinned {
    /// The batch, once all of it is there.
    pub(crate) fn result(&self, py: Python<'_>) -> Py<PyAny> {
        if let Some(job) = &self.job
            && !job.is_over()
        {
            without_interpreter(py, || job.finish());
        }
        self.batch.clone_ref(py)
    }
}
