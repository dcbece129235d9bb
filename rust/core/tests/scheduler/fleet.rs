//! A scheduler with its workers in one process: they do what a test says, when it says so.

use std::fmt::Debug;

use ringloader_core::plan::ResultOrder;
use ringloader_core::scheduler::{Poll, Scheduler};
use ringloader_core::transport::Transport;

/// A transport with the workers' side of it.
pub(crate) trait Backend {
    type Transport: Transport<Received: Debug>;

    fn new(workers: u32, max_tasks: u32) -> Self;

    fn transport(&self) -> &Self::Transport;

    /// The index that any task asks for.
    fn index() -> <Self::Transport as Transport>::Index;

    /// A worker takes its next task; its number has its epoch above `EPOCH_SHIFT`.
    fn take_task(&self, worker: u32) -> Option<u64>;

    /// A worker answers the task that it took with a batch that is a number.
    fn commit(&self, worker: u32, seq: u64, content: i64);

    /// A worker answers with a batch that cannot be had.
    fn commit_missing(&self, worker: u32, seq: u64);

    /// The next descriptor of a worker is nonsense. Nothing comes of that worker after it.
    fn commit_nonsense(&self, worker: u32);

    /// The process of a worker has ended.
    fn end(&self, worker: u32);

    /// Nothing is taken any more.
    fn close(&mut self);

    /// The worker that made a batch, and the number that it is.
    fn read(received: &Found<Self>) -> (u32, i64);
}

/// The received results of a backend.
pub(crate) type Found<B> = <<B as Backend>::Transport as Transport>::Received;

pub(crate) struct Fleet<B> {
    pub(crate) backend: B,
    pub(crate) scheduler: Scheduler<u64>,
    prefetch_factor: u32,
}

impl<B: Backend> Fleet<B> {
    pub(crate) fn new(workers: u32, prefetch_factor: u32, order: ResultOrder) -> Self {
        let backend = B::new(workers, workers * prefetch_factor);
        Self { backend, scheduler: Scheduler::new(workers, prefetch_factor, order), prefetch_factor }
    }

    /// Sends tasks to the first `workers` workers only, and as many to each as to all of them before.
    pub(crate) fn use_first(&mut self, workers: u32) {
        let most = workers * self.prefetch_factor;
        self.scheduler.use_first(self.backend.transport(), workers, most.into());
    }

    /// Sends a task; returns to which worker.
    pub(crate) fn send(&mut self) -> Option<u32> {
        self.scheduler.send(self.backend.transport(), B::index()).unwrap()
    }

    /// Sends as many tasks as torch's limit allows.
    pub(crate) fn fill(&mut self) {
        while !self.scheduler.is_full() {
            self.send();
        }
    }

    pub(crate) fn poll(&mut self) -> Poll<u64, Found<B>> {
        self.try_poll().unwrap()
    }

    pub(crate) fn try_poll(&mut self) -> ringloader_core::Result<Poll<u64, Found<B>>> {
        self.scheduler.poll(Some(self.backend.transport()))
    }

    /// Takes a batch whose turn it is. Returns its worker.
    pub(crate) fn accept(&mut self, seq: u64) -> u32 {
        let (worker, _) = self.scheduler.accept(seq, seq).unwrap().expect("its turn");
        self.scheduler.record_delivered(worker);
        worker
    }

    /// A worker answers up to `most` of its tasks.
    pub(crate) fn answer(&self, worker: u32, most: usize) {
        for _ in 0..most {
            if let Some(seq) = self.backend.take_task(worker) {
                self.backend.commit(worker, seq, 0);
            }
        }
    }
}
