//! What comes out of the transport, as Python classes.

use pyo3::prelude::*;

/// A message of torch's protocol that has come: `(index of the task, batch or index)`, or any object.
#[pyclass(frozen, get_all, module = "ringloader._native")]
pub(crate) struct Received {
    message: Py<PyAny>,
}

impl Received {
    pub(crate) fn new(message: Bound<'_, PyAny>) -> Self {
        Self { message: message.unbind() }
    }
}

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
#[derive(IntoPyObject)]
pub(crate) enum Event {
    Received(Received),
    WorkerEnded(WorkerEnded),
}
