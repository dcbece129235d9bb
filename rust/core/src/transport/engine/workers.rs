//! The worker processes of an engine: their descriptors, their ends, and their successors.

use std::io;
use std::os::fd::AsFd;
use std::time::Instant;

use super::{Engine, EngineState};
use crate::error::{Error, Result};
use crate::os::process::pidfd;
use crate::testing::fault::fault;
use crate::transport::fds::{PortFds, WorkerFds};

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

    /// Returns true if no process is left that may write to the slots of `worker`, whose process has ended. A process
    /// that the worker forked has the worker's end of the socket pair too.
    ///
    /// # Errors
    /// [`Error::Os`] when the system refuses.
    pub fn is_deserted(&self, worker: u32) -> Result<bool> {
        self.state.lock().channels[worker as usize].is_deserted()
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
}
