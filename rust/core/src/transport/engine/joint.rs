//! Batches that all workers make together: their windows, and the wake-up of all workers.

use super::Engine;
use crate::sync::Arc;
use crate::transport::joint::windows::JointWindows;

impl Engine {
    /// Takes the windows in which workers may send batches that they have made together. Later calls change nothing.
    pub fn share_windows(&self, windows: Arc<JointWindows>) {
        let _ = self.windows.set(windows);
    }

    /// Wakes all workers that sleep: there is something that they share.
    pub fn wake_workers(&self) {
        self.handles.iter().for_each(|handle| handle.wake());
    }
}
