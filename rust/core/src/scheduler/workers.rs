//! The choice of workers for tasks: by torch's rule, or by the fewest tasks; of all, or of the first ones.

use super::Scheduler;
use crate::transport::Transport;

impl<T> Scheduler<T> {
    /// Sends each task from now on to the worker with the fewest unanswered tasks, and not by torch's rule. Of several
    /// such workers, the next in turn gets it. The order of the results stays. Only for map-style datasets, where any
    /// worker may do any task.
    ///
    /// A result in a worker's ring counts as answered: in order, it may wait there for a slow worker's batch. Results
    /// of an abandoned epoch are dropped before the ring is counted. One worker may get all tasks, so its ring has room
    /// for all of them.
    pub fn balance(&mut self) {
        self.loads.get_or_insert_with(|| vec![0; self.selector.workers()].into());
    }

    /// Sends tasks to the first `workers` workers only from now on, of which `most` may be out. It may be called again
    /// with other numbers. Results of the others' tasks still come. Only with [`balance`](Self::balance) or
    /// [`share_tasks`](Self::share_tasks).
    pub fn use_first(&mut self, transport: &impl Transport, workers: u32, most: u64) {
        self.varies = true;
        self.added = self.added.filter(|&(added, _)| added < workers);
        self.selector.use_first(workers, most);
        if self.shares {
            transport.share_among(workers);
        }
    }

    /// Returns true if more tasks than [`most_tasks`](Self::most_tasks) may be out, because fewer workers get tasks than
    /// did.
    #[must_use]
    pub fn varies(&self) -> bool {
        self.varies
    }

    /// A process runs as `worker`, which had none, or whose process was to end and owed nothing.
    pub fn begin_worker(&mut self, worker: u32) {
        self.ended.retain(|&ended| ended != worker);
        self.added = Some((worker, None));
    }

    /// Returns true if the worker that [began](Self::begin_worker) last has made a batch since, or some of one that all
    /// workers make; in the epochs after; and once it gets no more tasks.
    pub fn has_begun(&self, transport: &impl Transport) -> bool {
        match self.added {
            None => true,
            Some((worker, _)) if self.shares => transport.has_made(worker),
            Some((_, None)) => false,
            Some((_, Some(first))) => self.tasks.awaited_tasks().all(|(seq, _)| seq != first),
        }
    }

    /// Returns true if `worker` owes nothing of tasks that all workers share. Its process was told to end, and has
    /// ended; what it had committed was taken. If it owes something, it is [lost](super::Poll::Lost).
    pub fn retire(&mut self, transport: &impl Transport, worker: u32) -> bool {
        if self.shares && transport.has_claim(worker) {
            return false;
        }
        if self.shares {
            self.ended.extend(std::iter::from_fn(|| transport.take_ended()));
            self.ended.retain(|&ended| ended != worker);
        }
        true
    }

    /// Returns how many tasks each worker has that it has not answered. A result in a worker's ring counts as answered.
    /// If workers share tasks: 0 for one that makes nothing and finds nothing to make.
    pub fn unanswered(&self, transport: &impl Transport) -> Box<[u64]> {
        if self.shares {
            let is_open = transport.is_open();
            let has_some = |worker| (is_open && worker < self.selector.used()) || transport.has_claim(worker);
            return (0..self.selector.workers() as u32).map(|worker| has_some(worker).into()).collect();
        }
        let mut loads = vec![0; self.selector.workers()].into_boxed_slice();
        self.count_unanswered(transport, &mut loads);
        loads
    }

    pub(super) fn choose(&mut self, transport: &impl Transport) -> Option<u32> {
        let Some(mut loads) = self.loads.take() else { return self.selector.choose() };
        self.count_unanswered(transport, &mut loads);
        let chosen = self.selector.choose_least(&loads);
        self.loads = Some(loads);
        if let Some((worker, first @ None)) = &mut self.added
            && chosen == Some(*worker)
        {
            *first = Some(self.tasks.send_idx());
        }
        chosen
    }

    fn count_unanswered(&self, transport: &impl Transport, loads: &mut [u64]) {
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
