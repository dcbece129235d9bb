//! Epochs: how one begins, and their numbers.

use super::Scheduler;
use crate::transport::task_number::EPOCHS;

impl<T> Scheduler<T> {
    /// Begins a new epoch: results of tasks sent before are thrown away when they come, also those of an epoch that was
    /// to [follow](Self::follow).
    pub fn reset(&mut self) {
        self.selector.reset();
        self.tasks.reset();
        self.behind = None;
        if let Some(varying) = &mut self.varying {
            varying.reset();
        }
        self.epoch = self.next_number();
        self.follower = None;
    }

    /// Returns the number of this epoch in the numbers of its tasks.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Returns a number for the epoch that begins next, by [`reset`](Self::reset) or [`follow`](Self::follow). No epoch
    /// before has it, also none that was given a number here and never began.
    pub fn number_next(&mut self) -> u64 {
        self.last_number = (self.last_number + 1) % EPOCHS;
        self.told = Some(self.last_number);
        self.last_number
    }

    pub(super) fn next_number(&mut self) -> u64 {
        let told = self.told.take();
        told.unwrap_or_else(|| {
            self.last_number = (self.last_number + 1) % EPOCHS;
            self.last_number
        })
    }
}
