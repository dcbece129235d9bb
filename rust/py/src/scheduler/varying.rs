//! A number of workers that changes: which of them get tasks, and how many these have.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use super::Scheduling;
use super::parent_end::ParentEnd;

impl<E: ParentEnd> Scheduling<E> {
    /// Sends each task from now on to the worker with the fewest tasks that it has not answered. Not for
    /// iterable datasets, where each worker has an end of its own.
    pub(super) fn balance(&self, py: Python<'_>) -> PyResult<()> {
        self.lock(py)?.core.balance();
        Ok(())
    }

    /// Sends tasks to the first `workers` workers only from now on, of which `most` may be out.
    pub(super) fn use_first(&self, py: Python<'_>, workers: u32, most: u64) -> PyResult<()> {
        let mut state = self.lock(py)?;
        if workers == 0 || workers > self.workers {
            return Err(PyValueError::new_err(format!("{workers} is not from 1 to {}", self.workers)));
        }
        if let Ok(engine) = E::core(&self.engine) {
            state.core.use_first(&*engine, workers, most);
        }
        Ok(())
    }

    /// Returns true if the worker that began last has made something since; nothing is awaited of it once the workers
    /// were ended.
    pub(super) fn has_begun(&self, py: Python<'_>) -> PyResult<bool> {
        let state = self.lock(py)?;
        Ok(E::core(&self.engine).map_or(true, |engine| state.core.has_begun(&*engine)))
    }

    /// Returns true if a worker that was told to end, and has, owes nothing.
    pub(super) fn retire(&self, py: Python<'_>, worker: u32) -> PyResult<bool> {
        let mut state = self.lock(py)?;
        Ok(E::core(&self.engine).map_or(true, |engine| state.core.retire(&*engine, worker)))
    }

    /// A process runs as `worker`, which had none, or whose process was to end and owed nothing.
    pub(super) fn begin_worker(&self, py: Python<'_>, worker: u32) -> PyResult<()> {
        self.lock(py)?.core.begin_worker(worker);
        Ok(())
    }

    /// Returns how many tasks each worker has that it has not answered; nothing once the workers were ended.
    pub(super) fn unanswered(&self, py: Python<'_>) -> PyResult<Vec<u64>> {
        let state = self.lock(py)?;
        let Ok(engine) = E::core(&self.engine) else { return Ok(Vec::new()) };
        Ok(state.core.unanswered(&*engine).into())
    }
}
