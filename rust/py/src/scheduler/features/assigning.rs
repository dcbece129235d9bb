//! Which workers get tasks: the one with the fewest, the first ones only, or all of them all tasks.

use pyo3::exceptions::{PyAssertionError, PyValueError};
use pyo3::prelude::*;
use ringloader_core::sync::Arc;
use ringloader_core::transport::engine::Engine as CoreEngine;
use ringloader_core::transport::joint::JointTasks;

use super::ParentEnd;
use crate::scheduler::parent_end::{IndexOf, RingEnd};
use crate::scheduler::{EpochState, Scheduling};
use crate::transport::engine::Engine;
use crate::transport::joint_engine::{JointEngine, JointTransport};

impl<E: ParentEnd> Scheduling<E> {
    /// Does nothing where torch's limit forbids another task, because it has fallen.
    ///
    /// # Errors
    /// torch's, where it has not.
    pub(in super::super) fn pass_limit(state: &EpochState<IndexOf<E>>) -> PyResult<()> {
        if state.core.varies() {
            return Ok(());
        }
        Err(PyAssertionError::new_err("Number of outstanding tasks exceeded maximum allowed tasks"))
    }

    /// Sends each task from now on to the worker with the fewest tasks that it has not answered. Not for
    /// iterable datasets, where each worker has an end of its own.
    pub(in super::super) fn balance(&self, py: Python<'_>) -> PyResult<()> {
        self.lock(py)?.core.balance();
        Ok(())
    }

    /// Sends tasks to the first `workers` workers only from now on, of which `most` may be out.
    pub(in super::super) fn use_first(&self, py: Python<'_>, workers: u32, most: u64) -> PyResult<()> {
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
    pub(in super::super) fn has_begun(&self, py: Python<'_>) -> PyResult<bool> {
        let state = self.lock(py)?;
        Ok(E::core(&self.engine).map_or(true, |engine| state.core.has_begun(&*engine)))
    }

    /// Returns true if a worker that was told to end, and has, owes nothing.
    pub(in super::super) fn retire(&self, py: Python<'_>, worker: u32) -> PyResult<bool> {
        let mut state = self.lock(py)?;
        Ok(E::core(&self.engine).map_or(true, |engine| state.core.retire(&*engine, worker)))
    }

    /// A process runs as `worker`, which had none, or whose process was to end and owed nothing.
    pub(in super::super) fn begin_worker(&self, py: Python<'_>, worker: u32) -> PyResult<()> {
        self.lock(py)?.core.begin_worker(worker);
        Ok(())
    }

    /// Returns how many tasks each worker has that it has not answered; nothing once the workers were ended.
    pub(in super::super) fn unanswered(&self, py: Python<'_>) -> PyResult<Vec<u64>> {
        let state = self.lock(py)?;
        let Ok(engine) = E::core(&self.engine) else { return Ok(Vec::new()) };
        Ok(state.core.unanswered(&*engine).into())
    }

    /// Lets all workers share all tasks, of which `most` may be out. Before the first one.
    pub(in super::super) fn share_tasks(&self, py: Python<'_>, most: u64) -> PyResult<()> {
        self.lock(py)?.core.share_tasks(most);
        Ok(())
    }
}

impl RingEnd for JointEngine {
    type Core = JointTransport;
    // Each worker that makes a part of the batch decodes it.
    const DECODES_AGAIN: bool = true;

    fn engine(this: &Py<Self>) -> &Py<Engine> {
        &this.get().engine
    }

    fn rings(core: &JointTransport) -> &CoreEngine {
        &core.engine
    }

    fn core(&self) -> PyResult<Arc<JointTransport>> {
        self.core()
    }

    fn joint(core: &JointTransport) -> Option<&JointTasks> {
        Some(&core.tasks)
    }
}
