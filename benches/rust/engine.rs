//! A batch of one small leaf from a port to the engine: through one thread, and between two.

use std::os::fd::OwnedFd;
use std::thread;
use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use ringloader_core::batch::{Dtype, MetaWriter, StorageRecord};
use ringloader_core::engine::Engine;
use ringloader_core::message::{ResultKind, Task, TaskKind};
use ringloader_core::port::{Port, Rest, Room};

const SHARE: u64 = 16 << 20;
const LEAF: u64 = 1024;
const MAX_TASKS: u32 = 8;

fn port(engine: &Engine) -> Port {
    let fds = engine.worker_fds(0);
    let fds: [OwnedFd; 4] = [fds.bell, fds.parent_bell, fds.parent, fds.socket]
        .map(|fd| fd.try_clone_to_owned().expect("a descriptor"));
    Port::attach(engine.control().clone(), 0, SHARE, fds).expect("a port")
}

fn send(engine: &Engine, seq: u64) {
    let bytes = seq.to_le_bytes().to_vec();
    engine.put_task(0, Task { seq, kind: TaskKind::Index, bytes }).expect("a task that fits");
}

/// Answers a task: the leaf holds its number in every byte.
fn answer(port: &Port, engine: &Engine, task: &Task, meta: &mut MetaWriter) {
    let segment = engine.control().segment();
    let base = segment.base().as_ptr() as u64;
    let chunk = port.allocate(LEAF).expect("memory").expect("a free slot");
    segment.copy_in(chunk.address as u64 - base, &[task.seq as u8; LEAF as usize]).expect("a chunk");
    let mut commit = port.begin_commit();
    let offset = commit.locate(chunk.address, LEAF).expect("a chunk of this slot");
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
    assert!(commit.finish(task.seq, ResultKind::Batch, at..end, end, false).expect("a slot"));
}

/// Takes the batch of `seq`, if it is there, and asks for its table. `checked`: and reads every byte.
fn take(engine: &Engine, seq: u64, checked: bool) -> bool {
    let Some(mut delivery) = engine.try_next().expect("a sound ring") else { return false };
    assert_eq!(delivery.seq, seq);
    assert!(delivery.lease());
    let storage = delivery.meta().expect("a table").storage(0).expect("one leaf");
    let address = delivery.pointer(storage.offset, storage.nbytes).expect("bytes").as_ptr() as u64;
    if checked {
        let segment = engine.control().segment();
        let mut bytes = Vec::new();
        segment.copy_out(address - segment.base().as_ptr() as u64, LEAF, &mut bytes).expect("bytes");
        assert_eq!(bytes, [seq as u8; LEAF as usize]);
    }
    true
}

/// `batches` there and back through one thread.
fn ping_pong(batches: u64, checked: bool) -> Duration {
    let engine = Engine::new(1, MAX_TASKS, SHARE).expect("an engine");
    let port = port(&engine);
    let mut meta = MetaWriter::new();
    let start = Instant::now();
    for seq in 0..batches {
        send(&engine, seq);
        let task = port.try_task().expect("a sound ring").expect("the task just sent");
        answer(&port, &engine, &task, &mut meta);
        assert!(take(&engine, seq, checked));
    }
    start.elapsed()
}

/// `batches` from a worker's thread, which always has tasks; both ends sleep when they have nothing to do.
fn two_threads(batches: u64, checked: bool) -> Duration {
    let engine = Engine::new(1, MAX_TASKS, SHARE).expect("an engine");
    let port = port(&engine);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut meta = MetaWriter::new();
            loop {
                match port.try_task().expect("a sound ring") {
                    Some(task) if task.kind == TaskKind::End => break,
                    Some(task) => answer(&port, &engine, &task, &mut meta),
                    None => assert_eq!(port.rest(Duration::from_secs(1)), Ok(Rest::Look)),
                }
            }
        });
        let start = Instant::now();
        let first = batches.min(u64::from(MAX_TASKS));
        (0..first).for_each(|seq| send(&engine, seq));
        for seq in 0..batches {
            while !take(&engine, seq, checked) {
                engine.wait(Duration::from_secs(1)).expect("a watch");
            }
            if seq + first < batches {
                send(&engine, seq + first);
            }
        }
        let elapsed = start.elapsed();
        engine.put_task(0, Task { seq: 0, kind: TaskKind::End, bytes: Vec::new() }).expect("the end");
        elapsed
    })
}

fn engine(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("engine");
    group.throughput(Throughput::Elements(1));
    for (name, run) in [("ping_pong", ping_pong as fn(u64, bool) -> Duration), ("two_threads", two_threads)] {
        run(10_000, true);
        group.bench_function(name, |bencher| bencher.iter_custom(|batches| run(batches, false)));
    }
    group.finish();
}

criterion_group!(benches, engine);
criterion_main!(benches);
