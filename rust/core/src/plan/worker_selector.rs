//! Chooses the worker for the next task.
#![forbid(unsafe_code)]

use crate::bits::Bits;
use crate::number::u32_from;

/// The order in which results are handed out, with torch's rule for the worker that gets the next task.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResultOrder {
    /// The next active worker, round and round: `in_order=True`.
    InOrder,
    /// The next active worker that has fewer tasks than its part of all that may be outstanding: `in_order=False` from
    /// torch 2.7 on.
    AsCompleted,
    /// Round and round although results are handed out as they come: `in_order=False` of torch 2.6.
    AsCompletedRoundRobin,
}

/// Chooses a worker for each task.
///
/// MIRRORS torch dataloader.py::_try_put_index
///
/// Every operation but `new`, `deactivate`, `reset` and `choose_least` takes one step for each 64 workers, and none
/// allocates. The methods that take a worker panic if it is none of the workers.
#[derive(Debug, Clone)]
pub struct WorkerSelector {
    order: ResultOrder,
    max_tasks: u64,
    /// The worker that the cycle names next.
    position: usize,
    workers: Vec<Worker>,
    /// The number of workers that get tasks: the first ones.
    used: usize,
    /// Tasks that an active worker must have fewer than, by `ResultOrder::AsCompleted`.
    limit: u64,
    /// INVARIANT: a worker's bit is set exactly if the rule lets it have the next task.
    eligible: Bits,
}

#[derive(Debug, Clone, Copy)]
struct Worker {
    active: bool,
    outstanding: u64,
}

impl Worker {
    const FRESH: Self = Self { active: true, outstanding: 0 };
}

impl WorkerSelector {
    /// All `workers` active and without tasks, the cycle at worker 0.
    pub fn new(workers: u32, prefetch_factor: u32, order: ResultOrder) -> Self {
        let mut selector = Self {
            order,
            max_tasks: u64::from(workers) * u64::from(prefetch_factor),
            position: 0,
            workers: vec![Worker::FRESH; workers as usize],
            used: workers as usize,
            limit: 0,
            eligible: Bits::new(workers as usize),
        };
        selector.judge_all();
        selector
    }

    /// For workers that share all tasks, of which `most` may be outstanding: in turn, only for the counts.
    pub fn for_shared(workers: u32, most: u64) -> Self {
        Self { max_tasks: most, ..Self::new(workers, 1, ResultOrder::InOrder) }
    }

    /// Gives tasks to the first `workers` workers only from now on, of which `most` may be outstanding. The others stay
    /// active: they may still have tasks.
    pub fn use_first(&mut self, workers: u32, most: u64) {
        self.used = workers as usize;
        self.max_tasks = most;
        self.judge_all();
    }

    /// Returns how many tasks may be outstanding at once. As many are asked for when an epoch begins.
    pub fn max_tasks(&self) -> u64 {
        self.max_tasks
    }

    /// The worker for the next task, or none: then the index that was to go is lost, as it is in torch.
    ///
    /// The cycle moves on as torch's does: past the worker that is chosen, once round if none is.
    pub fn choose(&mut self) -> Option<u32> {
        let chosen = self.eligible.first_from(self.position)?;
        self.position = (chosen + 1) % self.workers.len();
        Some(u32_from(chosen as u64))
    }

    /// The active worker with the smallest of `loads`, which has a number for each worker; or none, as for
    /// [`choose`](Self::choose). Of several, it is the one that the cycle names first, and the cycle moves on past it.
    ///
    /// The order's own rule has no say, and torch has none that is like it. One step for each worker.
    pub fn choose_least(&mut self, loads: &[u64]) -> Option<u32> {
        let from = self.position;
        let in_turn = (from..self.workers.len()).chain(0..from);
        let chosen = in_turn.filter(|&worker| self.is_open(worker)).min_by_key(|&worker| loads[worker])?;
        self.position = (chosen + 1) % self.workers.len();
        Some(u32_from(chosen as u64))
    }

    /// Sets the cycle to name `worker` next.
    pub fn begin_at(&mut self, worker: u32) {
        self.position = worker as usize;
    }

    /// Records that a task went to `worker`.
    pub fn record_sent(&mut self, worker: u32) {
        self.workers[worker as usize].outstanding += 1;
        self.judge(worker as usize);
    }

    /// Records that a result of `worker` is about to be handed out. Torch does not count the end of an iterable
    /// dataset.
    pub fn record_delivered(&mut self, worker: u32) {
        let outstanding = &mut self.workers[worker as usize].outstanding;
        debug_assert!(*outstanding > 0, "worker {worker} delivers without a task");
        *outstanding = outstanding.saturating_sub(1);
        self.judge(worker as usize);
    }

    /// Gives `worker` no more tasks in this epoch: its part of an iterable dataset has ended, or it died. A second call
    /// does nothing.
    pub fn deactivate(&mut self, worker: u32) {
        if std::mem::replace(&mut self.workers[worker as usize].active, false) {
            self.judge_all();
        }
    }

    /// Returns true if `worker` may get tasks in this epoch.
    pub fn is_active(&self, worker: u32) -> bool {
        self.workers[worker as usize].active
    }

    /// Returns the tasks that each worker is asked for ahead.
    #[must_use]
    pub fn prefetch_factor(&self) -> u32 {
        u32_from(self.max_tasks / self.used.max(1) as u64)
    }

    /// Returns the number of workers that get tasks, if they are active.
    #[must_use]
    pub fn used(&self) -> u32 {
        u32_from(self.used as u64)
    }

    /// Returns the number of workers, active or not.
    #[must_use]
    pub fn workers(&self) -> usize {
        self.workers.len()
    }

    /// torch's `_workers_num_tasks` of one worker.
    #[must_use]
    pub fn outstanding(&self, worker: u32) -> u64 {
        self.workers[worker as usize].outstanding
    }

    /// Begins a new epoch with the same workers: all active, no tasks, the cycle at worker 0.
    pub fn reset(&mut self) {
        self.position = 0;
        self.workers.fill(Worker::FRESH);
        self.judge_all();
    }

    fn is_open(&self, worker: usize) -> bool {
        worker < self.used && self.workers[worker].active
    }

    fn judge_all(&mut self) {
        let open = (0..self.workers.len()).filter(|&worker| self.is_open(worker)).count();
        self.limit = self.max_tasks.checked_div(open as u64).unwrap_or(0);
        (0..self.workers.len()).for_each(|worker| self.judge(worker));
    }

    fn judge(&mut self, worker: usize) {
        let has_room =
            self.order != ResultOrder::AsCompleted || self.workers[worker].outstanding < self.limit;
        self.eligible.set(worker, self.is_open(worker) && has_room);
    }
}
