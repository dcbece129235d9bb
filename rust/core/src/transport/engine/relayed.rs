//! Workers that are elsewhere, and whose rings a relay of this process serves.

use std::os::fd::{AsFd, OwnedFd};

use super::Engine;
use crate::error::Result;

impl Engine {
    /// Watches a worker that is elsewhere, and whose rings a relay of this process serves: it has ended once `ended` is
    /// readable. By then no code writes to its slots.
    ///
    /// # Errors
    /// [`Error::Os`](crate::Error::Os) when the system refuses.
    pub fn watch_relayed(&self, worker: u32, ended: OwnedFd) -> Result<()> {
        self.worker_ends.lock()[worker as usize] = None;
        let mut state = self.state.lock();
        self.poller.add(worker, ended.as_fd())?;
        let channel = &mut state.channels[worker as usize];
        channel.pidfd = Some(ended);
        channel.is_relayed = true;
        Ok(())
    }

    /// Returns true if a relay of this process serves the rings of `worker`.
    #[must_use]
    pub fn is_relayed(&self, worker: u32) -> bool {
        self.state.lock().channels[worker as usize].is_relayed
    }
}
