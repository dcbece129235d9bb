//! A batch of one small leaf from a port to the engine, and what scheduling over many workers costs the parent.
//!
//! `engine/*`: there and back through one thread, and between two. `scheduling/*`: the parent's work for one batch
//! of a [`Scheduler`], which must cost the same for any number of workers.

use std::thread;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use ringloader_core::batch::MetaWriter;
use ringloader_core::plan::ResultOrder;
use ringloader_core::transport::Transport;
use ringloader_core::transport::engine::Engine;
use ringloader_core::transport::message::{Task, TaskKind};
use ringloader_core::transport::port::Wake;

#[path = "parts/fleet.rs"]
mod fleet;

use fleet::{Fleet, SHARE, answer, port, read};

const MAX_TASKS: u32 = 8;
const WORKERS: [u32; 7] = [1, 2, 4, 8, 16, 32, 64];

fn send(engine: &Engine, seq: u64) {
    let bytes = seq.to_le_bytes().to_vec();
    engine.put(0, Task { seq, kind: TaskKind::Index, bytes }).expect("a task that fits");
}

/// Takes the batch of `seq`, if it is there.
fn take(engine: &Engine, seq: u64, checked: bool) -> bool {
    let Some(received) = engine.try_next().expect("a sound ring") else { return false };
    assert_eq!(received.seq, seq);
    read(engine, received, checked);
    true
}

/// `batches` there and back through one thread.
fn ping_pong(batches: u64, checked: bool) -> Duration {
    let engine = Engine::new(1, MAX_TASKS, SHARE).expect("an engine");
    let port = port(&engine, 0);
    let mut meta = MetaWriter::default();
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
    let port = port(&engine, 0);
    thread::scope(|scope| {
        scope.spawn(|| {
            let mut meta = MetaWriter::default();
            loop {
                match port.try_task().expect("a sound ring") {
                    Some(task) if task.kind == TaskKind::End => break,
                    Some(task) => answer(&port, &engine, &task, &mut meta),
                    None => assert_eq!(port.wait(Duration::from_secs(1)), Ok(Wake::Look)),
                }
            }
        });
        let start = Instant::now();
        let first = batches.min(u64::from(MAX_TASKS));
        (0..first).for_each(|seq| send(&engine, seq));
        for seq in 0..batches {
            while !take(&engine, seq, checked) {
                engine.wait_for(None, Duration::from_secs(1)).expect("a sleep");
            }
            if seq + first < batches {
                send(&engine, seq + first);
            }
        }
        let elapsed = start.elapsed();
        engine.put(0, Task { seq: 0, kind: TaskKind::End, bytes: Vec::new() }).expect("the end");
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

fn scheduling(criterion: &mut Criterion) {
    let orders = [("in_order", ResultOrder::InOrder), ("as_completed", ResultOrder::AsCompleted)];
    let runs =
        [("ready", Fleet::ready as fn(&mut Fleet, u64, bool) -> Duration), ("awaited", Fleet::awaited)];
    for (name, run) in runs {
        let mut group = criterion.benchmark_group(format!("scheduling/{name}"));
        group.throughput(Throughput::Elements(1)).sample_size(20);
        group.warm_up_time(Duration::from_millis(300)).measurement_time(Duration::from_secs(1));
        for (order, workers) in orders.iter().flat_map(|order| WORKERS.map(|workers| (order, workers))) {
            let mut fleet = Fleet::new(workers, order.1);
            run(&mut fleet, 1000, true);
            group.bench_function(BenchmarkId::new(order.0, workers), |bencher| {
                bencher.iter_custom(|batches| run(&mut fleet, batches, false));
            });
        }
        group.finish();
    }
}

criterion_group!(benches, engine, scheduling);
criterion_main!(benches);
