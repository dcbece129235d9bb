//! The moments of the batches that a worker makes, as Python classes.

use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use pyo3::{PyTraverseError, PyVisit};
use ringloader_core::os::clock::{monotonic, thread_cpu};
use ringloader_core::timing::{Stamps, WorkerClock as Core};

/// Notes the moments of one batch after another, in the thread that makes them.
#[pyclass(frozen, module = "ringloader._native")]
pub(crate) struct WorkerClock(Mutex<Core>);

#[pymethods]
impl WorkerClock {
    #[new]
    fn new() -> Self {
        Self(Mutex::default())
    }

    /// The worker waits for its next task from now on.
    fn begin(&self) {
        self.core().begin(monotonic(), thread_cpu);
    }
}

impl WorkerClock {
    fn core(&self) -> MutexGuard<'_, Core> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn note_task(&self) {
        self.core().note_task(monotonic());
    }

    pub(crate) fn note_made(&self) {
        self.core().note_made(monotonic());
    }

    pub(crate) fn note_room(&self, time: u64) {
        self.core().note_room(time);
    }

    pub(crate) fn sent(&self) -> Stamps {
        self.core().sent(monotonic(), thread_cpu)
    }

    /// A batch is begun without a worker. Returns when.
    pub(crate) fn begin_here(&self) -> u64 {
        let now = monotonic();
        self.core().begin_here(now, thread_cpu);
        now
    }

    pub(crate) fn made_here(&self) -> Stamps {
        self.core().made_here(monotonic(), thread_cpu)
    }
}

/// Stands in front of a `collate_fn`, and has a clock note how long it takes.
#[pyclass(frozen, module = "ringloader._native")]
pub(crate) struct TimedCollate {
    clock: Py<WorkerClock>,
    collate: Py<PyAny>,
}

#[pymethods]
impl TimedCollate {
    #[new]
    fn new(clock: Py<WorkerClock>, collate: Py<PyAny>) -> Self {
        Self { clock, collate }
    }

    fn __call__<'py>(&self, batch: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let begun = monotonic();
        let made = self.collate.bind(batch.py()).call1((batch,));
        self.clock.get().core().note_collation(begun, monotonic());
        made
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.clock)?;
        visit.call(&self.collate)
    }
}
