//! The parent's ends of the two rings of a worker.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};

use crate::error::Result;
use crate::os::fd_passing;
use crate::ring::{ByteFifo, Consumer, Producer, Ring, Words};
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
    /// Returns true if no process is left that may write to the worker's slots. A process that the worker forked has the
    /// worker's end of the socket pair too.
    pub(super) fn is_deserted(&self) -> Result<bool> {
        match &self.socket {
            // Children that this process has forked have the end of a relayed worker too, and never use it.
            Some(ours) if !self.is_relayed => fd_passing::is_deserted(ours.as_fd()),
            _ => Ok(true),
        }
    }

    /// Returns the descriptor of the task that the worker is at, unless that task has its result, and its position.
    /// `None` of a relayed worker: its relay takes tasks before the worker is at them.
    pub(super) fn in_hand(&mut self, ring: Ring<'_>) -> Result<Option<(u64, Words)>> {
        if self.is_relayed { Ok(None) } else { self.tasks.last_taken(ring) }
    }

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
