//! Tasks that all workers share: the transport hands them out, and any worker may send the result of any task.

use crate::number::u32_from;
use crate::plan::WorkerSelector;
use crate::scheduler::Scheduler;
use crate::transport::Transport;
use crate::transport::joint::Joint;

impl<T> Scheduler<T> {
    /// Lets all workers share all tasks, of which `most` may be out, over a transport that is [`Joint`]. Before the first
    /// task. The order of the results stays.
    pub fn share_tasks(&mut self, most: u64) {
        self.features.shares = true;
        self.looks_in_turn = false;
        self.selector = WorkerSelector::for_shared(u32_from(self.selector.workers() as u64), most);
    }

    /// Returns true if all workers share all tasks.
    #[must_use]
    pub fn shares(&self) -> bool {
        self.features.shares
    }

    /// Returns true if `worker`, which has ended, owes a result: each one that gets tasks owes all, and one that was to
    /// end only what it has begun.
    pub(super) fn owes_jointly(&self, joint: &dyn Joint, worker: u32) -> bool {
        self.tasks.outstanding() > 0 && (worker < self.selector.used() || joint.has_claim(worker))
    }

    /// Returns 0 for each worker that makes nothing and finds nothing to make.
    pub(super) fn joint_loads(&self, joint: &dyn Joint) -> Box<[u64]> {
        let is_open = joint.is_open();
        let has_some = |worker| (is_open && worker < self.selector.used()) || joint.has_claim(worker);
        (0..u32_from(self.selector.workers() as u64)).map(|worker| has_some(worker).into()).collect()
    }

    /// As [`give_up`](Self::give_up). Where all workers share all tasks, the others do what this one had, if any is left.
    pub fn leave_to_others(&mut self, transport: &impl Transport, worker: u32) {
        self.give_up(worker);
        if transport.joint().is_none() {
            return;
        }
        transport.lose(worker);
        match self.selector.choose() {
            Some(other) => {
                for _ in 0..self.tasks.reassign(worker, other) {
                    self.selector.record_sent(other);
                }
            }
            // Tasks are counted for workers that were to end, too.
            None => (0..u32_from(self.selector.workers() as u64))
                .for_each(|other| self.selector.deactivate(other)),
        }
    }
}
