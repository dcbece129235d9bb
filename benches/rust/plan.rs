//! The cost of scheduling per batch: reading the sampler, and sending, reordering and handing out one task.
//!
//! Every candidate is checked before it is timed. Worker selector and reorder buffer must cost the same for any number of workers.

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use ringloader_core::plan::{BatchRule, Chunk, Indices, ResultOrder, Step, Stream};

#[path = "parts/epoch.rs"]
mod epoch;

use epoch::Epoch;

const LEN: u64 = 1 << 20;

/// A permutation that every draw returns, without a copy.
#[derive(Debug)]
struct Reversed(&'static [i64]);

impl Indices for Reversed {
    fn as_slice(&self) -> &[i64] {
        self.0
    }
}

fn reversed() -> &'static [i64] {
    (0..LEN as i64).rev().collect::<Vec<_>>().leak()
}

/// A draw: a permutation, or all indices in order.
fn drawn(permutation: Option<&'static [i64]>) -> Chunk {
    match permutation {
        Some(permutation) => Chunk::Drawn(Box::new(Reversed(permutation))),
        None => Chunk::Range { start: 0, step: 1, len: i64::MAX as u64 },
    }
}

/// One batch; the last of its indices.
fn batch(stream: &mut Stream, permutation: Option<&'static [i64]>) -> i64 {
    loop {
        match stream.next() {
            Step::Batch(batch) => return *batch.last().expect("a batch is not empty"),
            Step::Need => {}
            other => panic!("{other:?}"),
        }
        stream.supply(Some(drawn(permutation)));
    }
}

fn streams(criterion: &mut Criterion) {
    let permutation = reversed();
    let mut group = criterion.benchmark_group("plan/stream");
    for size in [1, 64, 1024] {
        let rule = Some(BatchRule { size, drop_last: false });
        for (name, permutation) in [("random", Some(permutation)), ("sequential", None)] {
            let mut stream = Stream::new(rule).expect("a good rule");
            for number in 1..=2 * LEN / size {
                let read = (number * size - 1) as i64;
                let expected = if name == "random" { LEN as i64 - 1 - read % LEN as i64 } else { read };
                assert_eq!(batch(&mut stream, permutation), expected);
            }
            group.throughput(Throughput::Elements(size));
            group.bench_function(format!("{name}, batches of {size}"), |bencher| {
                bencher.iter(|| black_box(batch(&mut stream, permutation)));
            });
        }
    }
    group.finish();
}

fn scheduling(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("plan/selector and reorder");
    for (name, order) in [("in order", ResultOrder::InOrder), ("as completed", ResultOrder::AsCompleted)] {
        for workers in [1, 2, 8, 64] {
            let mut epoch = Epoch::new(workers, order);
            let mut seen = vec![0_u32; 4096];
            for number in 0..4096 {
                let seq = epoch.step();
                if order == ResultOrder::InOrder {
                    assert_eq!(seq, number);
                }
                if let Some(times) = seen.get_mut(seq as usize) {
                    *times += 1;
                }
            }
            assert!(seen.iter().all(|&times| times <= 1), "a batch came twice");
            assert_eq!(epoch.tasks.outstanding(), epoch.under_way.len() as u64);
            group.bench_function(format!("{name}, {workers} workers"), |bencher| {
                bencher.iter(|| black_box(epoch.step()));
            });
        }
    }
    group.finish();
}

criterion_group!(benches, streams, scheduling);
criterion_main!(benches);
