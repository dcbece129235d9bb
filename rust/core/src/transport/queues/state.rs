//! The contents of the queues, which one lock guards.

use std::collections::VecDeque;

use super::joint::JointTasks;
use super::{Reply, Request};

/// The queues of one worker.
#[derive(Debug)]
pub(super) struct Worker<I, R> {
    pub(super) requests: VecDeque<Request<I>>,
    pub(super) replies: VecDeque<Reply<R>>,
    /// Epochs that it has begun after its first one, and the batches that it has made in the last even one and the last
    /// odd one.
    pub(super) epoch: u64,
    pub(super) batches: [u64; 2],
}

/// The queues of all workers.
#[derive(Debug)]
pub(super) struct QueueState<I, R> {
    pub(super) workers: Vec<Worker<I, R>>,
    pub(super) joint: JointTasks<I, R>,
    /// The epoch of which batches are counted.
    pub(super) epoch: u64,
    pub(super) ended: VecDeque<u32>,
    /// The worker at which the next look at all begins.
    pub(super) turn: usize,
    pub(super) is_done: bool,
    pub(super) is_woken: bool,
    pub(super) is_closed: bool,
    /// The number of threads that wait for replies. If it is one thread, `only` names the worker that it waits for, if
    /// any.
    pub(super) waiting: u32,
    pub(super) only: Option<u32>,
}

impl<I, R> QueueState<I, R> {
    pub(super) fn new(workers: u32) -> Self {
        let worker =
            |_| Worker { requests: VecDeque::new(), replies: VecDeque::new(), epoch: 0, batches: [0; 2] };
        Self {
            workers: (0..workers).map(worker).collect(),
            joint: JointTasks::default(),
            epoch: 0,
            ended: VecDeque::new(),
            turn: 0,
            is_done: false,
            is_woken: false,
            is_closed: false,
            waiting: 0,
            only: None,
        }
    }

    pub(super) fn is_there(&self, only: Option<u32>) -> bool {
        let has_replies = |worker: &Worker<I, R>| !worker.replies.is_empty();
        self.is_woken
            || self.is_closed
            || !self.ended.is_empty()
            || match only {
                Some(worker) => has_replies(&self.workers[worker as usize]),
                None => self.workers.iter().any(has_replies),
            }
    }

    /// The place of the first request that a worker may take: one that begins an epoch has to wait.
    pub(super) fn request_for(&self, worker: u32) -> Option<usize> {
        self.workers[worker as usize].requests.iter().position(|request| match request {
            Request::Epoch { number, .. } => self.joint.may_begin(*number),
            _ => true,
        })
    }

    /// Returns true if a thread that waits may be glad of news of `worker`.
    pub(super) fn is_awaited(&self, worker: u32) -> bool {
        self.waiting > 1 || self.waiting == 1 && self.only.is_none_or(|only| only == worker)
    }
}
