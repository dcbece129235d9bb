//! Batches that all workers make together: their windows, and the wake-up of all workers.

use std::sync::OnceLock;

use super::Engine;
use crate::error::{Error, Result};
use crate::os::eventfd::EventFd;
use crate::sync::Arc;
use crate::sync::doorbell::take_some;
use crate::transport::joint::windows::{HeldJointWindow, JointWindows};
use crate::transport::message::ResultDescriptor;
use crate::transport::received::Backing;

/// The windows of batches that all workers make, if they do.
#[derive(Debug, Default)]
pub(super) struct JointBatches(OnceLock<Arc<JointWindows>>);

impl JointBatches {
    /// Takes the batch of a descriptor out of its window, and copies its table to `meta`.
    pub(super) fn open(
        &self,
        window: u32,
        descriptor: &ResultDescriptor,
        meta: &mut Vec<u8>,
    ) -> Result<Backing> {
        let Some(windows) = self.0.get() else {
            return Err(Error::Corrupt(format!("a batch in window {window}, and there is none")));
        };
        let ResultDescriptor { used, meta_offset, meta_len, .. } = *descriptor;
        windows.copy_out(window, used, meta_offset, meta_len, meta)?;
        // Last: on an error the window is still that of the task.
        Ok(Backing::Shared(HeldJointWindow::new(windows.clone(), window, used)?))
    }
}

impl Engine {
    /// Takes the windows in which workers may send batches that they have made together. Later calls change nothing.
    pub fn share_windows(&self, windows: Arc<JointWindows>) {
        let _ = self.joint.0.set(windows);
    }

    /// Returns the windows, if workers share tasks.
    pub(super) fn windows(&self) -> Option<&Arc<JointWindows>> {
        self.joint.0.get()
    }

    /// Wakes up to `most` sleeping workers: `most` runs wait for a worker. A worker that is awake looks for runs before it
    /// sleeps. A worker that is woken while it waits for room takes no run; another worker then finds the run after at
    /// most [`LONGEST_SLEEP`](crate::transport::LONGEST_SLEEP).
    pub fn wake_workers(&self, most: usize) {
        let sleepers = self
            .handles
            .iter()
            .map(|handle| (handle.control.worker(handle.worker).worker_sleeps, &handle.eventfd));
        take_some(sleepers, most).for_each(EventFd::notify);
    }
}
