//! A scheduler with its workers in one process: they do what a test says, when it says so.

use ringloader_core::batch::{MetaWriter, Token};
use ringloader_core::plan::Order;
use ringloader_core::ring::Producer;
use ringloader_core::scheduler::{Poll, Scheduler};
use ringloader_core::transport::delivery::Delivery;
use ringloader_core::transport::engine::Engine;
use ringloader_core::transport::message::{ResultKind, TaskKind};
use ringloader_core::transport::port::{Port, Room};

const SHARE: u64 = 1 << 20;

pub(crate) struct Fleet {
    pub(crate) engine: Engine,
    pub(crate) scheduler: Scheduler<u64>,
    pub(crate) ports: Vec<Port>,
}

impl Fleet {
    pub(crate) fn new(workers: u32, prefetch_factor: u32, order: Order) -> Self {
        let engine = Engine::new(workers, workers * prefetch_factor, SHARE).unwrap();
        let port = |worker| {
            let fds = engine.worker_fds(worker);
            let fds = fds.for_port().unwrap();
            Port::attach(engine.control().clone(), worker, SHARE, fds).unwrap()
        };
        let ports = (0..workers).map(port).collect();
        Self { engine, scheduler: Scheduler::new(workers, prefetch_factor, order), ports }
    }

    /// Sends a task; returns to which worker.
    pub(crate) fn send(&mut self) -> Option<u32> {
        self.scheduler.send(&self.engine, TaskKind::None, Vec::new()).unwrap()
    }

    /// Sends as many tasks as torch's limit allows.
    pub(crate) fn fill(&mut self) {
        while !self.scheduler.is_full() {
            self.send();
        }
    }

    pub(crate) fn poll(&mut self) -> Poll<u64> {
        self.scheduler.poll(Some(&self.engine)).unwrap()
    }

    /// Takes a batch whose turn it is. Returns its worker.
    pub(crate) fn accept(&mut self, seq: u64) -> u32 {
        let (worker, _) = self.scheduler.accept(seq, seq).unwrap().expect("its turn");
        self.scheduler.delivered(worker);
        worker
    }

    /// A worker answers up to `most` of its tasks.
    pub(crate) fn answer(&self, worker: u32, most: usize) {
        for _ in 0..most {
            if let Some(seq) = self.take_task(worker) {
                self.commit(worker, seq, 0);
            }
        }
    }

    /// A worker takes its next task; its number has its epoch above `EPOCH_SHIFT`.
    pub(crate) fn take_task(&self, worker: u32) -> Option<u64> {
        self.ports[worker as usize].try_task().unwrap().map(|task| task.seq)
    }

    /// A worker answers the task that it took with a batch that is a number.
    pub(crate) fn commit(&self, worker: u32, seq: u64, content: i64) {
        let mut commit = self.ports[worker as usize].begin_commit();
        let mut meta = MetaWriter::new();
        meta.skeleton().int(content);
        let block = meta.finish(commit.generation());
        let len = block.len() as u64;
        assert!(matches!(commit.reserve(len).unwrap(), Room::Ready));
        let segment = self.engine.control().segment();
        let at = commit.pointer(0, len).unwrap().as_ptr() as u64 - segment.base().as_ptr() as u64;
        segment.copy_in(at, block).unwrap();
        assert!(commit.finish(seq, ResultKind::Batch, 0..len, len, false).unwrap());
    }

    /// A worker answers with a batch that is said to lie in a segment of its own, which was never sent.
    pub(crate) fn commit_unsent(&self, worker: u32, seq: u64) {
        let mut commit = self.ports[worker as usize].begin_commit();
        assert!(commit.finish(seq, ResultKind::Batch, 0..64, 64, true).unwrap());
    }

    /// The next descriptor of a worker is nonsense. Nothing comes of that worker after it.
    pub(crate) fn commit_nonsense(&self, worker: u32) {
        let ring = self.engine.control().worker(worker).results;
        assert!(Producer::attach(ring).unwrap().push(ring, &[7; 8]).unwrap());
        self.engine.control().ready().set(worker);
    }

    /// The number that a batch is.
    pub(crate) fn read(delivery: &Delivery) -> i64 {
        let meta = delivery.meta().unwrap();
        match meta.skeleton().next() {
            Some(Ok(Token::Int(content))) => content,
            other => panic!("{other:?}"),
        }
    }

    /// The process of a worker has ended.
    pub(crate) fn end(&self, worker: u32) {
        // No system gives so high a number: it is that of a process which is gone.
        self.engine.watch_worker(worker, i32::MAX as u32).unwrap();
    }
}
