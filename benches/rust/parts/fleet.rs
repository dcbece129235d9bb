//! A worker's part of a batch of one small leaf, and a parent with its workers in one thread.

use std::process::{Child, Command};
use std::time::{Duration, Instant};

use ringloader_core::batch::{Dtype, MetaWriter, StorageRecord};
use ringloader_core::plan::ResultOrder;
use ringloader_core::scheduler::{Poll, Scheduler};
use ringloader_core::transport::engine::Engine;
use ringloader_core::transport::message::{ResultKind, Task, TaskKind};
use ringloader_core::transport::port::{Port, Room};
use ringloader_core::transport::received::Received;

pub(crate) const SHARE: u64 = 16 << 20;
const LEAF: u64 = 1024;
const PREFETCH_FACTOR: u32 = 2;

pub(crate) fn port(engine: &Engine, worker: u32) -> Port {
    let fds = engine.worker_fds(worker).for_port().expect("descriptors");
    Port::attach(engine.control().clone(), worker, SHARE, fds, None).expect("a port")
}

/// The value of all bytes of a task's leaf.
fn content(seq: u64) -> [u8; LEAF as usize] {
    [seq as u8; LEAF as usize]
}

pub(crate) fn answer(port: &Port, engine: &Engine, task: &Task, meta: &mut MetaWriter) {
    let segment = engine.control().segment();
    let base = segment.base().as_ptr() as u64;
    let chunk = port.allocate(LEAF).expect("memory").expect("a free slot");
    segment.copy_in(chunk.address() as u64 - base, &content(task.seq)).expect("a chunk");
    let mut commit = port.begin_commit();
    let offset = (chunk.address() - commit.filled().start) as u64;
    meta.clear();
    let storage = meta.add_storage(StorageRecord { offset, nbytes: LEAF });
    let leaf = meta.add_tensor(storage, 0, Dtype::U8, &[LEAF as i64], &[1]);
    meta.skeleton().leaf(leaf);
    let block = meta.finish(commit.generation());
    let at = commit.bump();
    let end = at + block.len() as u64;
    assert!(matches!(commit.reserve(end), Ok(Room::Ready)));
    let address = commit.pointer(at, block.len() as u64).expect("what was reserved").as_ptr() as u64;
    segment.copy_in(address - base, block).expect("what was reserved");
    assert!(commit.finish(task.seq, ResultKind::Batch, at..end, end).expect("a slot"));
}

/// Asks a received result for its table and the address of its leaf. `checked`: and reads every byte.
pub(crate) fn read(engine: &Engine, mut received: Received, checked: bool) {
    assert!(received.lease());
    let storage = received.meta().expect("a table").storage(0).expect("one leaf");
    let address = received.pointer(storage.offset, storage.nbytes).expect("bytes").as_ptr() as u64;
    if checked {
        let segment = engine.control().segment();
        let mut bytes = Vec::new();
        segment.copy_out(address - segment.base().as_ptr() as u64, LEAF, &mut bytes).expect("bytes");
        assert_eq!(bytes, content(received.seq));
    }
}

/// A parent with its workers. What workers do happens between the measured pieces, on the same thread, so that
/// it takes no time from them; each has a process that sleeps, for the parent to watch.
pub(crate) struct Fleet {
    engine: Engine,
    scheduler: Scheduler<()>,
    ports: Vec<Port>,
    processes: Vec<Child>,
    meta: MetaWriter,
    /// The worker that commits the next batch.
    turn: usize,
}

impl Fleet {
    pub(crate) fn new(workers: u32, order: ResultOrder) -> Self {
        let engine = Engine::new(workers, workers * PREFETCH_FACTOR, SHARE).expect("an engine");
        let scheduler = Scheduler::new(workers, PREFETCH_FACTOR, order);
        let ports = (0..workers).map(|worker| port(&engine, worker)).collect();
        let sleeper = |worker| {
            let process = Command::new("sleep").arg("1000").spawn().expect("a process");
            engine.watch_worker(worker, process.id()).expect("a handle");
            process
        };
        let processes = (0..workers).map(sleeper).collect();
        let mut fleet = Self { engine, scheduler, ports, processes, meta: MetaWriter::default(), turn: 0 };
        while !fleet.scheduler.is_full() {
            fleet.send();
        }
        fleet
    }

    fn send(&mut self) {
        let bytes = vec![0; 8];
        let sent = self.scheduler.send(&self.engine, (TaskKind::Index, bytes));
        assert!(sent.expect("a task that fits").is_some());
    }

    /// A worker answers what it has, at most `most`, and goes to sleep: the next task notifies its eventfd.
    fn work(&mut self, worker: usize, most: usize) -> usize {
        let port = &self.ports[worker];
        let tasks = std::iter::from_fn(|| port.try_task().expect("a sound ring")).take(most);
        let done = tasks.map(|task| answer(port, &self.engine, &task, &mut self.meta)).count();
        self.engine.control().worker(worker as u32).worker_sleeps.announce();
        done
    }

    /// The next batch, which is there, and the next task. Not inlined: instructions are counted by its name.
    #[inline(never)]
    fn measured_step(&mut self, checked: bool) {
        let Ok(Poll::Arrived { seq, received }) = self.scheduler.poll(Some(&self.engine)) else {
            panic!("a batch is there")
        };
        let (worker, ()) = self.scheduler.accept(seq, ()).expect("a task under way").expect("its turn");
        read(&self.engine, received, checked);
        self.scheduler.record_delivered(worker);
        self.send();
    }

    /// Finds nothing, goes to sleep, and is woken by a notification from before.
    #[inline(never)]
    fn measured_wait(&mut self) {
        let Ok(Poll::Wait { worker, .. }) = self.scheduler.poll(Some(&self.engine)) else {
            panic!("no batch is there")
        };
        self.engine.wait_for(worker, Duration::from_secs(1)).expect("a sleep");
    }

    /// `batches` that all workers had committed before: polling, taking, and sending the next task.
    pub(crate) fn ready(&mut self, batches: u64, checked: bool) -> Duration {
        let mut elapsed = Duration::ZERO;
        let mut left = batches;
        while left > 0 {
            (0..self.ports.len()).for_each(|worker| _ = self.work(worker, usize::MAX));
            let round = left.min(self.ports.len() as u64 * u64::from(PREFETCH_FACTOR));
            let start = Instant::now();
            (0..round).for_each(|_| self.measured_step(checked));
            elapsed += start.elapsed();
            left -= round;
        }
        elapsed
    }

    /// `batches` of which each is waited for: finding nothing, going to sleep, being woken at once by the eventfd,
    /// then what `ready` does for the one batch that one of the workers has committed meanwhile.
    pub(crate) fn awaited(&mut self, batches: u64, checked: bool) -> Duration {
        let mut elapsed = Duration::ZERO;
        for _ in 0..batches {
            self.engine.wake();
            let start = Instant::now();
            self.measured_wait();
            elapsed += start.elapsed();
            // In order, the worker whose turn it is; else they take turns too.
            assert_eq!(self.work(self.turn, 1), 1);
            self.turn = (self.turn + 1) % self.ports.len();
            let start = Instant::now();
            self.measured_step(checked);
            elapsed += start.elapsed();
        }
        elapsed
    }
}

impl Drop for Fleet {
    fn drop(&mut self) {
        for process in &mut self.processes {
            process.kill().and_then(|()| process.wait().map(drop)).expect("a process that sleeps");
        }
    }
}
