//! An epoch that begins before the end of the one before: its tasks go out while results of that one still come.

use super::Scheduler;
use crate::transport::message::ResultKind;
use crate::transport::task_number::epoch_of;

impl<T> Scheduler<T> {
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
        next.vary_as(self);
        next
    }

    /// Continues from `before`, which this one [follows](Self::follow) and which is over, or was given up.
    pub fn continue_from(&mut self, before: &mut Self) {
        self.ended = std::mem::take(&mut before.ended);
        self.balance = before.balance.take();
        (self.last_number, self.told) = (before.last_number, before.told);
    }

    /// Returns true if a result answers a task of the epoch that follows.
    #[inline]
    pub(super) fn is_early(&self, seq: u64, kind: ResultKind) -> bool {
        kind != ResultKind::Object && self.follower == Some(epoch_of(seq))
    }
}
