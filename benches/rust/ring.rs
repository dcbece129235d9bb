//! Descriptors of 64 bytes through a ring, beside rtrb's as a yardstick.
//!
//! Each candidate runs the same body, and is checked before it is timed. Across two threads both ends
//! spin, and yield where the other is not running: on few cores that measures the scheduler too.

use std::{hint::black_box, thread};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use ringloader_core::ring::WORDS;

#[path = "parts/ends.rs"]
mod ends;

use ends::{Pop, Push, SLOTS, Storage, ours, words, yardstick};

/// Descriptors in one timed transfer between two threads.
const BURST: u64 = 100_000;

/// Tries until `attempt` succeeds.
fn spin<T>(mut attempt: impl FnMut() -> Option<T>) -> T {
    loop {
        for _ in 0..100 {
            if let Some(value) = attempt() {
                return value;
            }
            std::hint::spin_loop();
        }
        thread::yield_now();
    }
}

/// Sends `BURST` descriptors from another thread; the sum of what arrived.
fn transfer(mut push: impl Push, mut pop: impl Pop) -> u64 {
    thread::scope(|scope| {
        scope.spawn(move || {
            for number in 0..BURST {
                spin(|| push.push(&words(number)).then_some(()));
            }
        });
        (0..BURST).map(|_| spin(|| pop.pop())[WORDS - 1]).fold(0, u64::wrapping_add)
    })
}

/// Fills and empties the ring three times.
fn check(name: &str, mut push: impl Push, mut pop: impl Pop) {
    assert_eq!(pop.pop(), None, "{name} is empty at first");
    for round in 0..3 {
        for number in 0..SLOTS as u64 {
            assert!(push.push(&words(round + number)), "{name} takes {SLOTS} descriptors");
        }
        assert!(!push.push(&words(0)), "{name} takes no more than {SLOTS}");
        for number in 0..SLOTS as u64 {
            assert_eq!(pop.pop(), Some(words(round + number)), "{name} keeps the order");
        }
        assert_eq!(pop.pop(), None, "{name} is empty again");
    }
}

fn candidate<P: Push, C: Pop>(criterion: &mut Criterion, name: &str, ends: impl Fn() -> (P, C)) {
    let (push, pop) = ends();
    check(name, push, pop);
    let (push, pop) = ends();
    assert_eq!(transfer(push, pop), BURST * (BURST - 1) / 2, "{name} brings each descriptor once");

    let mut group = criterion.benchmark_group("one thread, push and pop");
    group.throughput(Throughput::Elements(1));
    let (mut push, mut pop) = ends();
    group.bench_function(name, |bencher| {
        bencher.iter(|| {
            assert!(push.push(black_box(&words(7))));
            black_box(&pop.pop());
        });
    });
    group.finish();

    let mut group = criterion.benchmark_group("two threads, a burst");
    group.throughput(Throughput::Elements(BURST)).sample_size(20);
    group.bench_function(name, |bencher| {
        bencher.iter(|| {
            let (push, pop) = ends();
            transfer(push, pop)
        });
    });
    group.finish();
}

fn ring(criterion: &mut Criterion) {
    let storage = Storage::new();
    candidate(criterion, "ringloader", || ours(storage.ring()));
    candidate(criterion, "rtrb", yardstick);
}

criterion_group!(benches, ring);
criterion_main!(benches);
