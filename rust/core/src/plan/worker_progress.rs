//! Counts each worker's batches that were handed to the caller, and says which worker's batch is next.
#![forbid(unsafe_code)]

use crate::number::u32_from;

/// The tasks and batches of each worker in an epoch, for a dataset that each worker reads by itself.
///
/// A batch that raised is passed once the next call has begun, and not before, as in the
/// [`Ledger`](super::Ledger).
/// Each operation takes O(1) and allocates nothing, but for [`position`](Self::position).
#[derive(Debug)]
pub struct WorkerProgress {
    workers: Vec<Worker>,
    first: u32,
    /// The worker of the last batch that was passed.
    last: Option<u32>,
    /// The worker of the batch that was got in the current call.
    current: Option<u32>,
    /// True once the call that got `current` has raised.
    has_raised: bool,
    /// Batches that were got.
    got: u64,
    /// Batches that were got and not returned.
    lost: u64,
}

#[derive(Debug, Clone, Copy, Default)]
struct Worker {
    sent: u64,
    passed: u64,
    /// Tasks that were answered when the worker was lost.
    answered: u64,
}

impl WorkerProgress {
    /// An epoch of `workers` workers, whose first task goes to worker `first`.
    #[must_use]
    pub fn new(workers: u32, first: u32) -> Self {
        let workers = vec![Worker::default(); workers as usize];
        Self { workers, first, last: None, current: None, has_raised: false, got: 0, lost: 0 }
    }

    /// Returns the worker that gets the first task.
    #[must_use]
    pub fn first(&self) -> u32 {
        self.first
    }

    /// Records that a task went to `worker`.
    pub fn record_sent(&mut self, worker: u32) {
        self.workers[worker as usize].sent += 1;
    }

    /// The caller asks for a batch: one that had raised is passed.
    pub fn begin_call(&mut self) {
        self.current = None;
        self.has_raised = false;
    }

    /// Records that the caller gets a batch of `worker`, unless the call still raises.
    pub fn record_got(&mut self, worker: u32) {
        self.workers[worker as usize].passed += 1;
        self.got += 1;
        self.last = Some(worker);
        self.current = Some(worker);
        self.has_raised = false;
    }

    /// Records that a call has raised; `returned` is the number of batches that the calls before it have returned.
    /// Returns the worker of the last batch that was got in the call, if any: the caller does not have that batch.
    pub fn record_raised(&mut self, returned: u64) -> Option<u32> {
        // A call that is refused before it begins has the batch of the call before it.
        if self.got <= returned + self.lost {
            return None;
        }
        self.lost = self.got - returned;
        self.has_raised = true;
        self.current
    }

    /// Records that `worker` was lost; `awaited` is the number of tasks that it has not answered.
    pub fn record_lost(&mut self, worker: u32, awaited: u64) {
        let worker = &mut self.workers[worker as usize];
        worker.answered = worker.sent.saturating_sub(awaited);
    }

    /// Returns the number of tasks that a worker had answered when it was lost, and the number of its batches that the
    /// caller has passed.
    #[must_use]
    pub fn when_lost(&self, worker: u32) -> (u64, u64) {
        let Worker { answered, passed, .. } = self.workers[worker as usize];
        (answered, passed)
    }

    /// Returns the number of batches of each worker that are passed, and the worker whose batch is next in turn.
    /// `returned` is the number of batches that calls have returned: a batch that was got in a call that still runs is
    /// not passed.
    #[must_use]
    pub fn position(&self, returned: u64) -> (Vec<u64>, u32) {
        let mut passed: Vec<u64> = self.workers.iter().map(|worker| worker.passed).collect();
        let still_runs = self.got.saturating_sub(self.lost) > returned;
        match (self.current, self.last) {
            (Some(worker), _) if self.has_raised || still_runs => {
                passed[worker as usize] -= 1;
                (passed, worker)
            }
            (_, Some(worker)) => (passed, (worker + 1) % u32_from(self.workers.len() as u64)),
            (_, None) => (passed, self.first),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_are_counted_by_worker_and_the_turn_goes_round() {
        let mut progress = WorkerProgress::new(3, 1);
        assert_eq!(progress.position(u64::MAX), (vec![0, 0, 0], 1));
        for worker in [1, 2, 0, 1] {
            progress.begin_call();
            progress.record_got(worker);
        }
        assert_eq!(progress.position(u64::MAX), (vec![1, 2, 1], 2));
    }

    #[test]
    fn a_batch_is_passed_once_its_call_has_returned() {
        let mut progress = WorkerProgress::new(2, 0);
        progress.begin_call();
        progress.record_got(0);
        assert_eq!((progress.position(0), progress.position(1)), ((vec![0, 0], 0), (vec![1, 0], 1)));
        progress.begin_call();
        progress.record_got(1);
        assert_eq!(progress.record_raised(1), Some(1));
        progress.begin_call();
        progress.record_got(0);
        // The batch that raised is passed, and never returned.
        assert_eq!((progress.position(1), progress.position(2)), ((vec![1, 1], 0), (vec![2, 1], 1)));
    }

    #[test]
    fn a_batch_that_raised_is_passed_with_the_next_call() {
        let mut progress = WorkerProgress::new(2, 0);
        progress.begin_call();
        progress.record_got(0);
        progress.begin_call();
        progress.record_got(1);
        assert_eq!(progress.record_raised(1), Some(1));
        assert_eq!(progress.position(u64::MAX), (vec![1, 0], 1));
        progress.begin_call();
        assert_eq!(progress.position(u64::MAX), (vec![1, 1], 0));
        // A call that raises before it gets a batch changes nothing.
        assert_eq!(progress.record_raised(1), None);
        assert_eq!(progress.position(u64::MAX), (vec![1, 1], 0));
        progress.begin_call();
        progress.record_got(0);
        // Nor one that is refused before it begins.
        assert_eq!(progress.record_raised(2), None);
        assert_eq!(progress.position(u64::MAX), (vec![2, 1], 1));
    }

    #[test]
    fn of_several_batches_of_a_call_that_raises_the_last_is_not_passed() {
        let mut progress = WorkerProgress::new(2, 0);
        progress.begin_call();
        progress.record_got(0);
        progress.record_got(1);
        progress.record_got(0);
        assert_eq!(progress.record_raised(0), Some(0));
        assert_eq!(progress.position(u64::MAX), (vec![1, 1], 0));
    }

    #[test]
    fn a_lost_worker_has_answered_what_is_not_awaited() {
        let mut progress = WorkerProgress::new(2, 0);
        for worker in [0, 1, 0, 1, 0] {
            progress.record_sent(worker);
        }
        progress.begin_call();
        progress.record_got(0);
        progress.record_lost(0, 1);
        assert_eq!(progress.when_lost(0), (2, 1));
    }
}
