//! The engine, with ports in the same process.

use ringloader_core::batch::{MetaWriter, Token};
use ringloader_core::ring::Producer;
use ringloader_core::transport::engine::Engine;
use ringloader_core::transport::message::{ResultKind, TaskIndex, TaskKind};
use ringloader_core::transport::port::{Port, Room};
use ringloader_core::transport::received::Received;

use crate::fleet::Backend;

const SHARE: u64 = 1 << 20;

pub(crate) struct Rings {
    pub(crate) engine: Engine,
    pub(crate) ports: Vec<Port>,
}

impl Backend for Rings {
    type Transport = Engine;

    fn new(workers: u32, max_tasks: u32) -> Self {
        let engine = Engine::new(workers, max_tasks, SHARE).unwrap();
        let port = |worker| {
            let fds = engine.worker_fds(worker).for_port().unwrap();
            Port::attach(engine.control().clone(), worker, SHARE, fds, None).unwrap()
        };
        let ports = (0..workers).map(port).collect();
        Self { engine, ports }
    }

    fn transport(&self) -> &Engine {
        &self.engine
    }

    fn index() -> TaskIndex {
        (TaskKind::None, Vec::new())
    }

    fn take_task(&self, worker: u32) -> Option<u64> {
        self.ports[worker as usize].try_task().unwrap().map(|task| task.seq)
    }

    fn commit(&self, worker: u32, seq: u64, content: i64) {
        let mut commit = self.ports[worker as usize].begin_commit();
        let mut meta = MetaWriter::default();
        meta.skeleton().int(content);
        let block = meta.finish(commit.generation());
        let len = block.len() as u64;
        assert!(matches!(commit.reserve(len).unwrap(), Room::Ready));
        let segment = self.engine.control().segment();
        let at = commit.pointer(0, len).unwrap().as_ptr() as u64 - segment.base().as_ptr() as u64;
        segment.copy_in(at, block).unwrap();
        assert!(commit.finish(seq, ResultKind::Batch, 0..len, len).unwrap());
    }

    /// The batch is said to lie in a segment of its own, which was never sent.
    fn commit_missing(&self, worker: u32, seq: u64) {
        let mut commit = self.ports[worker as usize].begin_commit();
        assert!(commit.own_segment(64).unwrap());
        assert!(commit.finish(seq, ResultKind::Batch, 0..64, 64).unwrap());
    }

    fn commit_nonsense(&self, worker: u32) {
        let ring = self.engine.control().worker(worker).results;
        assert!(Producer::attach(ring).unwrap().push(ring, &[7; 8]).unwrap());
        self.engine.control().ready().set(worker);
    }

    fn end(&self, worker: u32) {
        // No system gives so high a number: it is that of a process which is gone.
        self.engine.watch_worker(worker, i32::MAX as u32).unwrap();
    }

    fn close(&mut self) {
        self.ports.clear();
        self.engine.close();
    }

    fn read(received: &Received) -> (u32, i64) {
        let meta = received.meta().unwrap();
        match meta.skeleton().next() {
            Some(Ok(Token::Int(content))) => (received.worker, content),
            other => panic!("{other:?}"),
        }
    }
}
