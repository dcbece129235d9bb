//! An epoch that begins before the end of the one before: its tasks go out while results of that one still come.

use crate::number::u32_from;
use crate::scheduler::Scheduler;

impl<T> Scheduler<T> {
    /// Makes the scheduler of the next epoch, whose tasks may be sent while results of this one still come. The caller
    /// sends nothing more in this one, and polls nothing in the next one before it [continues](Self::continue_from)
    /// from this one. Until then the tasks of the next one go to the workers in turn.
    ///
    /// INVARIANT: a worker answers in the order of its tasks, and where all workers share them, it begins an epoch once all
    /// tasks of the one before are answered. So in its ring nothing of this epoch comes after anything of the next.
    #[must_use]
    pub fn follow(&mut self) -> Self {
        let number = self.numbers.take();
        self.features.follower = Some(number);
        let mut next =
            Self::new(u32_from(self.selector.workers() as u64), self.selector.prefetch_factor(), self.order);
        next.epoch = number;
        if self.features.shares {
            next.share_tasks(self.most_tasks());
        }
        next.vary_as(self);
        next
    }

    /// Continues from `before`, which this one [follows](Self::follow) and which is over, or was given up.
    pub fn continue_from(&mut self, before: &mut Self) {
        self.ended = std::mem::take(&mut before.ended);
        self.features.balance = before.features.balance.take();
        self.numbers = std::mem::take(&mut before.numbers);
    }
}
