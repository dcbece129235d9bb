//! The parent's ends of the two rings of a worker.

use std::collections::VecDeque;
use std::os::fd::OwnedFd;

use crate::error::Result;
use crate::ring::{ByteFifo, Consumer, Producer, Ring};
use crate::transport::layout::Control;
use crate::transport::message::Task;

/// The parent's ends of one worker's two rings.
#[derive(Debug)]
pub(super) struct WorkerChannel {
    pub(super) tasks: Producer,
    pub(super) arena: ByteFifo,
    /// Tasks for which ring or arena had no room: INVARIANT in order, and before any later task.
    pub(super) pending: VecDeque<Task>,
    pub(super) results: Consumer,
    /// Readable once its process has ended. `None` once that was noticed, or before it is known.
    pub(super) pidfd: Option<OwnedFd>,
    /// True if the worker is elsewhere, and a relay in this process serves its rings.
    pub(super) is_relayed: bool,
    /// The parent's end of the socket pair; `None` while the engine is stored.
    pub(super) socket: Option<OwnedFd>,
}

impl WorkerChannel {
    /// Drops the tasks that a worker which has ended has not taken. Positions only grow.
    pub(super) fn drop_tasks(&mut self, ring: Ring<'_>) -> Result<()> {
        self.pending.clear();
        let mut untaken = Consumer::attach(ring)?;
        while untaken.pop(ring)?.is_some() {}
        self.arena.reclaim(self.tasks.head(ring)?);
        Ok(())
    }

    /// Drops what is under way to and from a worker that has ended.
    pub(super) fn forget(&mut self, control: &Control, worker: u32) -> Result<()> {
        let view = control.worker(worker);
        self.drop_tasks(view.tasks)?;
        // Their slots are not held: free for the next worker.
        while self.results.pop(view.results)?.is_some() {}
        let arena = control.arena(worker);
        control.segment().punch(arena.start, arena.end - arena.start)
    }
}
