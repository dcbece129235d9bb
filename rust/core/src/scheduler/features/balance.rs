//! The worker with the fewest unanswered tasks gets the next one.

use crate::scheduler::Scheduler;
use crate::transport::Transport;

/// Memory in which each worker's unanswered tasks are counted.
#[derive(Debug)]
pub(super) struct Balance(Box<[u64]>);

impl<T> Scheduler<T> {
    /// Sends each task from now on to the worker with the fewest unanswered tasks, and not by torch's rule. Of several
    /// such workers, the next in turn gets it. The order of the results stays. Only for map-style datasets, where any
    /// worker may do any task.
    ///
    /// A result in a worker's ring counts as answered: in order, it may wait there for a slow worker's batch. Results
    /// of an abandoned epoch are dropped before the ring is counted. One worker may get all tasks, so its ring has room
    /// for all of them.
    pub fn balance(&mut self) {
        self.features.balance.get_or_insert_with(|| Balance(vec![0; self.selector.workers()].into()));
    }

    pub(super) fn choose_least(&mut self, transport: &impl Transport) -> Option<u32> {
        let Some(Balance(mut loads)) = self.features.balance.take() else { return self.selector.choose() };
        self.count_unanswered(transport, &mut loads);
        let chosen = self.selector.choose_least(&loads);
        self.features.balance = Some(Balance(loads));
        if let Some(varying) = &mut self.features.varying {
            varying.note_chosen(chosen, self.tasks.send_idx());
        }
        chosen
    }

    pub(super) fn count_unanswered(&self, transport: &impl Transport, loads: &mut [u64]) {
        loads.fill(0);
        for (_, worker) in self.tasks.awaited_tasks() {
            loads[worker as usize] += 1;
        }
        for (worker, load) in (0..).zip(loads).filter(|(_, load)| **load > 0) {
            // The error of a ring that cannot be read is raised in its turn, and not in place of another worker's
            // batch.
            let there = self.drop_stale(transport, worker).and_then(|_| transport.there_of(worker));
            *load = load.saturating_sub(there.unwrap_or(0));
        }
    }
}
