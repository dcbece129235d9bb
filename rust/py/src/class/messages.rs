//! What the parent waits for.

use pyo3::prelude::*;

/// A worker's process has ended.
#[pyclass(frozen, get_all, module = "ringloader._native")]
pub(crate) struct WorkerEnded {
    worker: u32,
}

impl WorkerEnded {
    pub(crate) fn new(worker: u32) -> Self {
        Self { worker }
    }
}

/// What the parent waits for.
///
/// INVARIANT: a message is neither `None` nor a `WorkerEnded`, so it needs no object around it, which would cost every
/// batch. torch's worker loop sends pairs; the engine refuses `None`.
#[derive(IntoPyObject)]
pub(crate) enum Event<'py> {
    Message(Bound<'py, PyAny>),
    WorkerEnded(WorkerEnded),
}
