//! A number of workers that changes: only the first ones get tasks.

use crate::scheduler::Scheduler;
use crate::transport::Transport;

/// The worker that [began](Scheduler::begin_worker) last, and the first task that it got since.
#[derive(Debug, Default)]
pub(super) struct Varying {
    added: Option<(u32, Option<u64>)>,
}

impl Varying {
    pub(super) fn reset(&mut self) {
        self.added = None;
    }

    /// The task `seq` goes to this worker.
    pub(super) fn note_chosen(&mut self, chosen: Option<u32>, seq: u64) {
        if let Some((worker, first @ None)) = &mut self.added
            && chosen == Some(*worker)
        {
            *first = Some(seq);
        }
    }
}

impl<T> Scheduler<T> {
    /// Sends tasks to the first `workers` workers only from now on, of which `most` may be out. It may be called again
    /// with other numbers. Results of the others' tasks still come. Only with [`balance`](Self::balance) or
    /// [`share_tasks`](Self::share_tasks).
    pub fn use_first(&mut self, transport: &impl Transport, workers: u32, most: u64) {
        let varying = self.features.varying.get_or_insert_default();
        varying.added = varying.added.filter(|&(added, _)| added < workers);
        self.selector.use_first(workers, most);
        if let Some(joint) = transport.joint() {
            joint.share_among(workers);
        }
    }

    /// Returns true if more tasks than [`most_tasks`](Self::most_tasks) may be out, because fewer workers get tasks than
    /// did.
    #[must_use]
    #[inline]
    pub fn varies(&self) -> bool {
        self.features.varying.is_some()
    }

    /// A process runs as `worker`, which had none, or whose process was to end and owed nothing.
    pub fn begin_worker(&mut self, worker: u32) {
        self.ended.retain(|&ended| ended != worker);
        self.features.varying.get_or_insert_default().added = Some((worker, None));
    }

    /// Returns true if the worker that [began](Self::begin_worker) last has made a batch since, or some of one that all
    /// workers make; in the epochs after; and once it gets no more tasks.
    pub fn has_begun(&self, transport: &impl Transport) -> bool {
        let Some((worker, first)) = self.features.varying.as_ref().and_then(|varying| varying.added) else {
            return true;
        };
        match (transport.joint(), first) {
            (Some(joint), _) => joint.has_made(worker),
            (None, None) => false,
            (None, Some(first)) => self.tasks.awaited_tasks().all(|(seq, _)| seq != first),
        }
    }

    /// Returns true if `worker` owes nothing of tasks that all workers share. Its process was told to end, and has
    /// ended; what it had committed was taken. If it owes something, it is [lost](crate::scheduler::Poll::Lost).
    pub fn retire(&mut self, transport: &impl Transport, worker: u32) -> bool {
        let Some(joint) = transport.joint() else { return true };
        if joint.has_claim(worker) {
            return false;
        }
        self.ended.extend(std::iter::from_fn(|| transport.take_ended()));
        self.ended.retain(|&ended| ended != worker);
        true
    }

    /// Returns how many tasks each worker has that it has not answered. A result in a worker's ring counts as answered.
    /// If workers share tasks: 0 for one that makes nothing and finds nothing to make.
    pub fn unanswered(&self, transport: &impl Transport) -> Box<[u64]> {
        if let Some(joint) = transport.joint() {
            return self.joint_loads(joint);
        }
        let mut loads = vec![0; self.selector.workers()].into_boxed_slice();
        self.count_unanswered(transport, &mut loads);
        loads
    }

    /// Sends tasks to as many workers as `before`, if their number changes there.
    pub(super) fn vary_as(&mut self, before: &Self) {
        if before.varies() {
            self.features.varying = Some(Varying::default());
            self.selector.use_first(before.selector.used(), before.selector.max_tasks());
        }
    }
}
