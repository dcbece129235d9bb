//! Tasks that all workers share: over any transport, and the parent's end of the one over shared memory.

use pyo3::prelude::*;
use ringloader_core::sync::Arc;
use ringloader_core::transport::engine::Engine as CoreEngine;
use ringloader_core::transport::message::TaskIndex;
use ringloader_core::transport::run_times::TimedRun;

use super::Scheduling;
use super::parent_end::{ParentEnd, RingEnd};
use crate::transport::engine::Engine;
use crate::transport::joint_engine::{JointEngine, JointTransport};

impl<E: ParentEnd> Scheduling<E> {
    /// Lets all workers share all tasks, of which `most` may be out. Before the first one.
    pub(super) fn share_tasks(&self, py: Python<'_>, most: u64) -> PyResult<()> {
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

    fn take_runs(core: &JointTransport, seq: u64) -> Vec<TimedRun> {
        core.tasks.take_timed(seq)
    }

    fn in_hand(core: &JointTransport, worker: u32) -> Option<(u64, TaskIndex)> {
        core.tasks.in_hand(worker)
    }

    fn all_in_hand(core: &JointTransport) -> Option<Vec<(u32, u64, TaskIndex)>> {
        let of = |worker| core.tasks.in_hand(worker).map(|(seq, index)| (worker, seq, index));
        Some((0..core.tasks.workers()).filter_map(of).collect())
    }
}
