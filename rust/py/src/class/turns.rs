//! The batches of each worker that the caller has got, as a Python class.

use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use ringloader_core::plan::Turns as Core;

/// Counts the batches of each worker that are passed.
#[pyclass(frozen, module = "ringloader._native")]
pub(crate) struct Turns(Mutex<Core>);

#[pymethods]
impl Turns {
    /// An epoch of so many workers, whose first task goes to worker `first`.
    #[new]
    #[pyo3(signature = (workers, first=0))]
    fn new(workers: u32, first: u32) -> PyResult<Self> {
        if first >= workers {
            return Err(PyValueError::new_err(format!("worker {first} is none of {workers}")));
        }
        Ok(Self(Mutex::new(Core::new(workers, first))))
    }

    /// Notes that a caller without workers asks for a batch, and gets it unless the call raises.
    fn take(&self) {
        let mut core = self.core();
        core.begin_call();
        core.got(0);
    }

    /// Notes that a call raised, after calls that returned so many batches. Returns the worker of the batch that the
    /// caller therefore has not got, if there is one.
    fn raised(&self, returned: u64) -> Option<u32> {
        self.core().raised(returned)
    }

    /// Returns the number of batches of each worker that are passed, and the worker whose batch is next in turn, for a
    /// caller to whom calls have returned so many batches; by default, all that it got.
    #[pyo3(signature = (returned=u64::MAX))]
    fn position(&self, returned: u64) -> (Vec<u64>, u32) {
        self.core().position(returned)
    }

    /// Returns how many tasks a worker had answered when it was lost, and how many of its batches are passed.
    fn when_lost(&self, worker: u32) -> (u64, u64) {
        self.core().when_lost(worker)
    }
}

impl Turns {
    fn core(&self) -> MutexGuard<'_, Core> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn begin(&self) {
        self.core().begin_call();
    }

    pub(crate) fn got(&self, worker: u32) {
        self.core().got(worker);
    }

    pub(crate) fn sent(&self, worker: u32) {
        self.core().sent(worker);
    }

    pub(crate) fn lost(&self, worker: u32, awaited: u64) {
        self.core().lost(worker, awaited);
    }

    pub(crate) fn first(&self) -> u32 {
        self.core().first()
    }
}
