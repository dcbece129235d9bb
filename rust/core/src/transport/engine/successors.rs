//! The successor of a worker of an engine.

use super::Engine;
use crate::error::{Error, Result};
use crate::os::fd_passing;
use crate::pool::Leases;
use crate::sync::Arc;
use crate::transport::worker_handle::holds_overwritten;

impl Engine {
    /// Makes the rings of `worker`, whose process has ended or never ran, ready for a successor. Returns the slots
    /// that are still held, for [`Port::attach`](crate::transport::port::Port::attach). To be called after
    /// [`take_ended`](crate::transport::Transport::take_ended) has named the worker and [`try_next`](crate::transport::Transport::try_next) has
    /// given all that it had committed; then start the successor, [`watch_worker`](Self::watch_worker)
    /// it, and send again every task whose result has not come.
    ///
    /// Tasks that were sent and not taken are dropped: the one that the worker had taken and not
    /// answered comes before them, is no longer in the ring, and results must ascend. The rings
    /// go on at their positions instead of being reset, so that neither end ever sees a position go
    /// back: for the moment the parent is both ends of the task ring.
    ///
    /// # Errors
    /// [`Error::Config`] when the worker is not known to have ended, when it is not [deserted](Self::is_deserted), when
    /// results of it are still in the ring, which would take their slots for free, or after [`close`](Self::close);
    /// [`Error::Corrupt`] from a ring; [`Error::Os`] when there are too many open files.
    pub fn succeed(&self, worker: u32) -> Result<Vec<u64>> {
        let mut state = self.state.lock();
        let refuse = |why| Err(Error::Config(format!("worker {worker} cannot be succeeded: {why}")));
        if state.closed {
            return refuse("the engine is closed");
        }
        let view = self.control.worker(worker);
        let channel = &mut state.channels[worker as usize];
        if channel.pidfd.is_some() {
            return refuse("it has not ended yet; wait until take_ended() names it");
        }
        if channel.results.peek(view.results)?.is_some() {
            return refuse("it has committed results that were not taken; call try_next() first");
        }
        // Of a worker that never ran, no process has the memory.
        let has_run = self.worker_ends.lock()[worker as usize].take().is_none();
        if has_run && !channel.is_deserted()? {
            return refuse("a process that it forked still has its memory");
        }
        if !self.handles[worker as usize].leases.is_borne_out(view.slots) {
            return Err(holds_overwritten(worker));
        }
        // Descriptors that the worker sent for batches that it did not commit go with its socket pair: its successor
        // numbers from the start.
        let (socket, theirs) = fd_passing::pair()?;
        channel.drop_tasks(view.tasks)?;
        channel.socket = Some(socket);
        self.worker_ends.lock()[worker as usize] = Some(Arc::new(theirs));
        state.ended.retain(|&ended| ended != worker);
        Ok(Leases::busy(view.slots))
    }
}
