//! Descriptors of 64 bytes through a ring, beside rtrb's as a yardstick.
//!
//! Each candidate runs the same body, and is checked before it is timed. Across two threads both ends
//! spin, and yield where the other is not running: on few cores that measures the scheduler too.

use std::{hint::black_box, thread};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use ringloader_core::ring::{Consumer, Descriptor, Producer, Ring, RingHeader, WORDS, Words};

const SLOTS: usize = 256;
/// Descriptors in one timed transfer between two threads.
const BURST: u64 = 100_000;

/// One end that takes descriptors and one that gives them, over the same ring.
trait Push: Send {
    fn push(&mut self, words: &Words) -> bool;
}

trait Pop {
    fn pop(&mut self) -> Option<Words>;
}

/// An end with its ring, as rtrb's ends have theirs.
struct Ours<'a, End> {
    ring: Ring<'a>,
    end: End,
}

impl Push for Ours<'_, Producer> {
    #[inline(always)]
    fn push(&mut self, words: &Words) -> bool {
        self.end.push(self.ring, words).expect("sound")
    }
}

impl Pop for Ours<'_, Consumer> {
    #[inline(always)]
    fn pop(&mut self) -> Option<Words> {
        self.end.pop(self.ring).expect("sound")
    }
}

/// New ends of a ring that is empty.
fn ours(ring: Ring<'_>) -> (Ours<'_, Producer>, Ours<'_, Consumer>) {
    let producer = Producer::attach(ring).expect("sound");
    let consumer = Consumer::attach(ring).expect("sound");
    (Ours { ring, end: producer }, Ours { ring, end: consumer })
}

impl Push for rtrb::Producer<Words> {
    #[inline(always)]
    fn push(&mut self, words: &Words) -> bool {
        rtrb::Producer::push(self, *words).is_ok()
    }
}

impl Pop for rtrb::Consumer<Words> {
    #[inline(always)]
    fn pop(&mut self) -> Option<Words> {
        rtrb::Consumer::pop(self).ok()
    }
}

fn yardstick() -> (rtrb::Producer<Words>, rtrb::Consumer<Words>) {
    rtrb::RingBuffer::new(SLOTS)
}

fn words(number: u64) -> Words {
    [number; WORDS]
}

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
    // The heap instead of the mapping.
    let header = RingHeader::new();
    let slots: Vec<_> = (0..SLOTS).map(|_| Descriptor::new()).collect();
    let ring = Ring::new(&header, &slots).expect("a power of two");
    candidate(criterion, "ringloader", || ours(ring));
    candidate(criterion, "rtrb", yardstick);
}

criterion_group!(benches, ring);
criterion_main!(benches);
