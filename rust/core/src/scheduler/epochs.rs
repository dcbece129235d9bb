//! Epochs: how one begins, and their numbers.

use super::Scheduler;
use crate::transport::task_number::EPOCHS;

/// Gives numbers to epochs.
#[derive(Debug, Default)]
pub(super) struct EpochNumbers {
    /// The last number that an epoch got, also one that never began.
    last: u64,
    /// The number of the epoch that begins next, if it has one already.
    told: Option<u64>,
}

impl EpochNumbers {
    fn tell(&mut self) -> u64 {
        self.last = (self.last + 1) % EPOCHS;
        self.told = Some(self.last);
        self.last
    }

    /// Returns the number of the epoch that begins now.
    pub(super) fn take(&mut self) -> u64 {
        let number = self.told.unwrap_or_else(|| self.tell());
        self.told = None;
        number
    }
}

impl<T> Scheduler<T> {
    /// Begins a new epoch: results of tasks sent before are thrown away when they come.
    pub fn reset(&mut self) {
        self.selector.reset();
        self.tasks.reset();
        self.behind = None;
        self.features.reset();
        self.epoch = self.numbers.take();
    }

    /// Returns the number of this epoch in the numbers of its tasks.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Returns a number for the epoch that begins next. No epoch before has it, also none that was given a number here
    /// and never began.
    pub fn number_next(&mut self) -> u64 {
        self.numbers.tell()
    }
}
