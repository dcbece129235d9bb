//! The decisions of torch's multi-process iterator, with its own data structures, and workers that complete tasks in a
//! given order.

use std::collections::{HashMap, VecDeque};
use std::ops::ControlFlow;

use ringloader_core::plan::ResultOrder;

/// A worker's answer to a task.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Answer {
    Batch,
    /// `_IterableDatasetStopIteration`
    Stop,
}

/// Worker processes that do one task at a time, each in the order of its queue; a schedule says which is next.
#[derive(Clone, Debug)]
pub(crate) struct Workers {
    queues: Vec<VecDeque<u64>>,
    /// Batches that an iterable dataset's part still has; `None` for a map-style dataset.
    left: Vec<Option<u32>>,
    lengths: Vec<Option<u32>>,
    ended: Vec<bool>,
    /// Processes that are gone: they do not begin again.
    dead: Vec<bool>,
    schedule: Vec<u8>,
    step: usize,
    /// Every task that was put, with its worker.
    pub(crate) log: Vec<(u64, u32)>,
}

impl Workers {
    pub(crate) fn new(lengths: Vec<Option<u32>>, schedule: Vec<u8>) -> Self {
        let count = lengths.len();
        Self {
            queues: vec![VecDeque::new(); count],
            left: lengths.clone(),
            lengths,
            ended: vec![false; count],
            dead: vec![false; count],
            schedule,
            step: 0,
            log: Vec::new(),
        }
    }

    pub(crate) fn put(&mut self, worker: u32, seq: u64) {
        self.log.push((seq, worker));
        if !self.ended[worker as usize] {
            self.queues[worker as usize].push_back(seq);
        }
    }

    /// Some worker completes its oldest task.
    pub(crate) fn get(&mut self) -> (u64, Answer) {
        let busy: Vec<usize> =
            (0..self.queues.len()).filter(|&worker| !self.queues[worker].is_empty()).collect();
        assert!(!busy.is_empty(), "waits for ever");
        let choice = self.schedule.get(self.step % self.schedule.len().max(1)).copied().unwrap_or(0);
        self.step += 1;
        self.get_of(busy[usize::from(choice) % busy.len()])
    }

    /// This worker completes its oldest task.
    pub(crate) fn get_of(&mut self, worker: usize) -> (u64, Answer) {
        let seq = self.queues[worker].pop_front().expect("a busy worker");
        match &mut self.left[worker] {
            Some(0) => {
                self.ended[worker] = true;
                self.queues[worker].clear();
                (seq, Answer::Stop)
            }
            left => {
                *left = left.map(|left| left - 1);
                (seq, Answer::Batch)
            }
        }
    }

    /// A process that is gone answers nothing, but for what it had committed.
    pub(crate) fn kill(&mut self, worker: u32, committed: usize) {
        self.ended[worker as usize] = true;
        self.dead[worker as usize] = true;
        self.queues[worker as usize].truncate(committed);
    }

    /// Old tasks are done and thrown away, then the workers begin again.
    pub(crate) fn resume(&mut self) {
        self.queues.iter_mut().for_each(VecDeque::clear);
        self.left.clone_from(&self.lengths);
        self.ended.clone_from(&self.dead);
    }
}

/// A sampler that may end and go on: at each call, whether there is an index.
#[derive(Clone, Debug)]
pub(crate) struct Indices {
    pub(crate) script: Vec<bool>,
    pub(crate) calls: usize,
}

impl Indices {
    pub(crate) fn next(&mut self) -> bool {
        self.calls += 1;
        self.script.get(self.calls - 1).copied().unwrap_or(false)
    }
}

/// `_MultiProcessingDataLoaderIter`
pub(crate) struct TorchIterator {
    order: ResultOrder,
    prefetch_factor: u64,
    pub(crate) workers: Workers,
    pub(crate) indices: Indices,
    task_info: HashMap<u64, (u32, bool)>,
    pub(crate) rcvd_idx: u64,
    pub(crate) send_idx: u64,
    pub(crate) tasks_outstanding: u64,
    pub(crate) workers_status: Vec<bool>,
    pub(crate) workers_num_tasks: Vec<i64>,
    cycle: u32,
    /// True if, under [`ResultOrder::InOrder`], results come in the order of their tasks. Otherwise they come as the
    /// schedule says.
    pub(crate) arrive_in_order: bool,
}

impl TorchIterator {
    pub(crate) fn new(order: ResultOrder, prefetch_factor: u32, workers: Workers, indices: Indices) -> Self {
        let count = workers.queues.len();
        let mut this = Self {
            order,
            prefetch_factor: prefetch_factor.into(),
            workers,
            indices,
            task_info: HashMap::new(),
            rcvd_idx: 0,
            send_idx: 0,
            tasks_outstanding: 0,
            workers_status: vec![true; count],
            workers_num_tasks: vec![0; count],
            cycle: 0,
            arrive_in_order: false,
        };
        this.prime();
        this
    }

    fn max_tasks(&self) -> u64 {
        self.prefetch_factor * self.workers_status.len() as u64
    }

    fn prime(&mut self) {
        (0..self.max_tasks()).for_each(|_| self.try_put_index());
    }

    pub(crate) fn reset(&mut self) {
        let count = self.workers_status.len();
        (self.send_idx, self.rcvd_idx, self.tasks_outstanding) = (0, 0, 0);
        self.task_info = HashMap::new();
        self.workers_status = vec![true; count];
        self.workers_num_tasks = vec![0; count];
        self.cycle = 0;
        self.workers.resume();
        self.prime();
    }

    fn next_of_cycle(&mut self) -> u32 {
        let worker = self.cycle;
        self.cycle = (worker + 1) % self.workers_status.len() as u32;
        worker
    }

    fn try_put_index(&mut self) {
        assert!(self.tasks_outstanding < self.max_tasks());
        if !self.indices.next() {
            return;
        }
        let mut found = None;
        for _ in 0..self.workers_status.len() {
            let worker = self.next_of_cycle();
            if self.workers_status[worker as usize] {
                let active = self.workers_status.iter().filter(|&&status| status).count() as u64;
                if self.order != ResultOrder::AsCompleted
                    || self.workers_num_tasks[worker as usize] < (self.max_tasks() / active) as i64
                {
                    found = Some(worker);
                    break;
                }
            }
        }
        let Some(worker) = found else { return };
        self.workers.put(worker, self.send_idx);
        self.task_info.insert(self.send_idx, (worker, false));
        self.workers_num_tasks[worker as usize] += 1;
        self.tasks_outstanding += 1;
        self.send_idx += 1;
    }

    fn process_data(&mut self, seq: u64, worker: u32) -> Option<(u64, u32)> {
        self.workers_num_tasks[worker as usize] -= 1;
        self.try_put_index();
        Some((seq, worker))
    }

    /// One turn of the loop in `_next_data`, in which at most one result is got. It ends with which task's batch comes
    /// out of `next`, or none for `StopIteration`.
    pub(crate) fn step(&mut self) -> ControlFlow<Option<(u64, u32)>> {
        loop {
            if self.rcvd_idx >= self.send_idx {
                return ControlFlow::Break(None);
            }
            if let Some(&(worker, has_data)) = self.task_info.get(&self.rcvd_idx) {
                if has_data || self.workers_status[worker as usize] {
                    break;
                }
                self.task_info.remove(&self.rcvd_idx);
            }
            self.rcvd_idx += 1;
        }
        let seq = self.rcvd_idx;
        let (worker, has_data) = self.task_info[&seq];
        if has_data {
            self.task_info.remove(&seq);
            self.rcvd_idx += 1;
            return ControlFlow::Break(self.process_data(seq, worker));
        }
        assert!(self.tasks_outstanding > 0);
        let in_turn = self.arrive_in_order && self.order == ResultOrder::InOrder;
        let (idx, answer) = if in_turn { self.workers.get_of(worker as usize) } else { self.workers.get() };
        self.tasks_outstanding -= 1;
        if answer == Answer::Stop {
            let worker = self.task_info[&idx].0;
            self.workers_status[worker as usize] = false;
            self.try_put_index();
            return ControlFlow::Continue(());
        }
        if idx != self.rcvd_idx {
            if self.order != ResultOrder::InOrder {
                let (worker, _) = self.task_info.remove(&idx).expect("a task under way");
                return ControlFlow::Break(self.process_data(idx, worker));
            }
            self.task_info.get_mut(&idx).expect("a task under way").1 = true;
            return ControlFlow::Continue(());
        }
        let (worker, _) = self.task_info.remove(&idx).expect("a task under way");
        self.rcvd_idx += 1;
        ControlFlow::Break(self.process_data(idx, worker))
    }
}
