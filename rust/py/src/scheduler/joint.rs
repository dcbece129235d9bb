//! Tasks that all workers share: over any transport, and the parent's end of the one over shared memory.

use std::time::Duration;

use pyo3::prelude::*;
use ringloader_core::sync::Arc;
use ringloader_core::timing::Stamps;
use ringloader_core::transport::message::TaskIndex;
use ringloader_core::transport::received::Received;
use ringloader_core::transport::run_times::TimedRun;

use super::Scheduling;
use super::parent_end::ParentEnd;
use crate::gil::wait;
use crate::python::Callbacks;
use crate::sampling::source::IndexSource;
use crate::transport::engine::Engine;
use crate::transport::joint_engine::{JointEngine, JointTransport};

impl<E: ParentEnd> Scheduling<E> {
    /// Lets all workers share all tasks, of which `most` may be out. Before the first one.
    pub(super) fn share_tasks(&self, py: Python<'_>, most: u64) -> PyResult<()> {
        self.lock(py)?.core.share_tasks(most);
        Ok(())
    }
}

impl ParentEnd for JointEngine {
    type Core = JointTransport;

    fn of(this: &Py<Self>) -> &Self {
        this.get()
    }

    fn core(&self) -> PyResult<Arc<JointTransport>> {
        self.core()
    }

    fn is_done(&self) -> bool {
        self.engine.get().is_done()
    }

    fn end_wait(&self) -> PyResult<()> {
        ParentEnd::end_wait(self.engine.get())
    }

    fn unpack<'py>(&self, py: Python<'py>, delivery: Received) -> PyResult<Bound<'py, PyAny>> {
        self.engine.get().unpack(py, delivery)
    }

    fn arrival<'py>(
        this: &Py<Self>,
        py: Python<'py>,
        delivery: Received,
        iterable: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        Engine::arrival(&this.get().engine, py, delivery, iterable)
    }

    fn stamps(delivery: &Received) -> Option<(u32, Stamps)> {
        Engine::stamps(delivery)
    }

    fn take_runs(core: &JointTransport, delivery: &Received) -> Vec<TimedRun> {
        core.tasks.take_timed(delivery.seq)
    }

    fn numbers(index: &TaskIndex) -> Option<&[u8]> {
        Engine::numbers(index)
    }

    fn read(
        source: &IndexSource,
        callbacks: &Callbacks<'_, '_>,
        _again: bool,
    ) -> PyResult<Option<TaskIndex>> {
        // Each worker that makes a part of the batch decodes it.
        source.read(callbacks, true)
    }

    fn clone_index(index: &TaskIndex, _py: Python<'_>) -> TaskIndex {
        index.clone()
    }

    fn index<'py>(py: Python<'py>, index: &TaskIndex) -> PyResult<Bound<'py, PyAny>> {
        Engine::index(py, index)
    }

    fn in_hand(core: &JointTransport, worker: u32) -> Option<(u64, TaskIndex)> {
        core.tasks.in_hand(worker)
    }

    fn all_in_hand(core: &JointTransport, _py: Python<'_>) -> Option<Vec<(u32, u64, TaskIndex)>> {
        let of = |worker| core.tasks.in_hand(worker).map(|(seq, index)| (worker, seq, index));
        Some((0..core.tasks.workers()).filter_map(of).collect())
    }

    fn is_elsewhere(_core: &JointTransport, _worker: u32) -> bool {
        false
    }

    fn wait(py: Python<'_>, core: &JointTransport, only: Option<u32>, limit: Duration) -> PyResult<()> {
        wait(py, &core.engine, only, limit)
    }
}
