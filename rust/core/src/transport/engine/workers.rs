//! The worker processes of an engine: their descriptors, their ends, and their successors.

use std::io;
use std::os::fd::AsFd;
use std::time::Instant;

use super::{Engine, EngineState};
use crate::error::{Error, Result};
use crate::os::fd_passing;
use crate::os::process::pidfd;
use crate::pool::Leases;
use crate::sync::Arc;
use crate::testing::fault::fault;
use crate::transport::fds::{PortFds, WorkerFds};
use crate::transport::worker_handle::holds_overwritten;

impl Engine {
    /// Returns the descriptors that `worker` must have to attach, until [`watch_worker`](Self::watch_worker) says that
    /// it has.
    #[must_use]
    pub fn worker_fds(&self, worker: u32) -> WorkerFds<'_> {
        WorkerFds {
            segment: self.memfd.as_fd(),
            worker_eventfd: self.handles[worker as usize].eventfd.as_fd(),
            parent_eventfd: self.poller.eventfd().as_fd(),
            parent_pidfd: self.pidfd.as_fd(),
            socket: self.worker_ends.lock()[worker as usize].clone(),
        }
    }

    /// In the process that was forked as `worker`: what its port keeps. The ends of socket pairs that are others' are
    /// closed first: where the parent could fork, the worker has room then.
    ///
    /// # Errors
    /// As [`WorkerFds::for_port`].
    pub fn inherited_fds(&self, worker: u32) -> io::Result<PortFds> {
        let fds = self.worker_fds(worker);
        if !self.process.is_current() {
            self.worker_ends.lock().fill(None);
            // If the state is locked, a thread that is not here locked it at the fork. Then the sockets stay open.
            if let Some(mut state) = self.state.try_lock() {
                state.channels.iter_mut().for_each(|channel| channel.socket = None);
            }
        }
        fds.for_port()
    }

    /// Watches the process that runs as `worker`, which has its descriptors: its end of the socket pair is its alone.
    ///
    /// # Errors
    /// [`Error::Os`] when the system refuses for another reason than that it has ended already.
    pub fn watch_worker(&self, worker: u32, pid: u32) -> Result<()> {
        self.worker_ends.lock()[worker as usize] = None;
        let mut state = self.state.lock();
        match pidfd(pid) {
            Ok(pidfd) => {
                self.poller.add(worker, pidfd.as_fd())?;
                state.channels[worker as usize].pidfd = Some(pidfd);
            }
            Err(Error::Os { errno, .. }) if errno == rustix::io::Errno::SRCH.raw_os_error() => {
                state.ready.look_at(worker);
                state.ended.push_back(worker);
            }
            Err(other) => return Err(other),
        }
        Ok(())
    }

    /// Stops watching the process that ran as `worker`, which has unmapped the memory and lives on. It counts as ended
    /// for [`store`](Self::store). Call it when all results of the worker that anyone wants were taken.
    pub fn unwatch_worker(&self, worker: u32) {
        if let Some(pidfd) = self.state.lock().channels[worker as usize].pidfd.take() {
            self.poller.remove(pidfd.as_fd());
        }
    }

    /// Returns true if no process is left that may write to the slots of `worker`, whose process has ended. A process
    /// that the worker forked has the worker's end of the socket pair too.
    ///
    /// # Errors
    /// [`Error::Os`] when the system refuses.
    pub fn is_deserted(&self, worker: u32) -> Result<bool> {
        let channel = &self.state.lock().channels[worker as usize];
        match &channel.socket {
            // Children that this process has forked have the worker's end too, and never use it.
            Some(_) if channel.is_relayed => Ok(true),
            Some(ours) => fd_passing::is_deserted(ours.as_fd()),
            None => Ok(true),
        }
    }

    /// Makes the rings of `worker`, whose process has ended or never ran, ready for a successor. Returns the slots
    /// that are still held, for [`Port::take_over`](crate::transport::port::Port::take_over). To be called after
    /// [`take_ended`](Self::take_ended) has named the worker and [`try_next`](Self::try_next) has
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
        if let Some(ours) = &channel.socket
            && has_run
            && !channel.is_relayed
            && !fd_passing::is_deserted(ours.as_fd())?
        {
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

    pub(super) fn record_ended(&self, state: &mut EngineState, ended: Vec<u32>) {
        for worker in ended {
            if let Some(pidfd) = state.channels[worker as usize].pidfd.take() {
                self.poller.remove(pidfd.as_fd());
                // The worker may have committed without saying so.
                if !fault("ended_not_looked_at") {
                    state.ready.look_at(worker);
                }
                state.ended.push_back(worker);
            }
        }
        state.looked = Instant::now();
    }

    /// Returns true once the engine knows that a worker has ended that was watched.
    ///
    /// # Errors
    /// [`Error::Os`] when the system refuses.
    pub fn has_ended(&self, worker: u32) -> Result<bool> {
        let ended = self.poller.ended()?;
        let mut state = self.state.lock();
        self.record_ended(&mut state, ended);
        Ok(state.channels[worker as usize].pidfd.is_none())
    }

    /// A worker whose process has ended since, each once. All it had committed was there before.
    pub fn take_ended(&self) -> Option<u32> {
        self.state.lock().ended.pop_front()
    }
}
