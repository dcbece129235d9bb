//! Epochs: their numbers, and the one that follows.

use super::Scheduler;
use crate::transport::task_number::EPOCHS;

impl<T> Scheduler<T> {
    /// Begins a new epoch: results of tasks sent before are thrown away when they come, also those of an epoch that was
    /// to [follow](Self::follow).
    pub fn reset(&mut self) {
        self.selector.reset();
        self.tasks.reset();
        self.behind = None;
        self.added = None;
        self.epoch = self.next_number();
        self.follower = None;
    }

    /// Makes the scheduler of the next epoch, whose tasks may be sent while results of this one still come. The caller
    /// sends nothing more in this one, and polls nothing in the next one before it [continues](Self::continue_from)
    /// from this one. Until then the tasks of the next one go to the workers in turn.
    ///
    /// INVARIANT: a worker answers in the order of its tasks, and where all workers share them, it begins an epoch once all
    /// tasks of the one before are answered. So in its ring nothing of this epoch comes after anything of the next.
    #[must_use]
    pub fn follow(&mut self) -> Self {
        let number = self.next_number();
        self.follower = Some(number);
        let mut next = Self::new(self.selector.workers() as u32, self.selector.prefetch_factor(), self.order);
        next.epoch = number;
        if self.shares {
            next.share_tasks(self.most_tasks());
        }
        if self.varies {
            next.varies = true;
            next.selector.use_first(self.selector.used(), self.selector.max_tasks());
        }
        next
    }

    /// Continues from `before`, which this one [follows](Self::follow) and which is over, or was given up.
    pub fn continue_from(&mut self, before: &mut Self) {
        self.ended = std::mem::take(&mut before.ended);
        self.loads = before.loads.take();
        (self.last_number, self.told) = (before.last_number, before.told);
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

    fn next_number(&mut self) -> u64 {
        let told = self.told.take();
        told.unwrap_or_else(|| {
            self.last_number = (self.last_number + 1) % EPOCHS;
            self.last_number
        })
    }

    /// Numbers this epoch as if `epochs` epochs had begun and ended before. For tests of the numbers.
    #[must_use]
    pub fn after_epochs(mut self, epochs: u64) -> Self {
        self.epoch = epochs % EPOCHS;
        self.last_number = self.epoch;
        self
    }
}
