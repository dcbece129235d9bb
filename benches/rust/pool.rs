//! The cost of one batch in slots: the whole cycle, and growth that finds its bytes there.

use std::hint::black_box;
use std::ops::Range;

use criterion::{Criterion, criterion_group, criterion_main};
use heap_words::HeapWords;
use ringloader_core::Result;
use ringloader_core::pool::{Growth, Leases, Limits, Pages, SlotId, SlotWords, WorkerSlots};
use ringloader_core::sync::{AtomicU32, AtomicU64};

#[path = "../../rust/core/tests/support/heap_words.rs"]
mod heap_words;

const LIMITS: Limits = Limits { share: 1 << 30, window: 1 << 30, page: 4 << 10 };
const BATCH: u64 = 1 << 20;

/// Warm slots need nothing of the system.
struct Untouched;

impl Pages for Untouched {
    fn punch(&mut self, _slot: SlotId, _bytes: Range<u64>) -> Result<()> {
        panic!("punched on the hot path")
    }

    fn available(&mut self, _need: u64) -> Result<()> {
        panic!("asked for memory on the hot path")
    }
}

/// Memory without end, to warm the slots.
struct Plenty;

impl Pages for Plenty {
    fn punch(&mut self, _slot: SlotId, _bytes: Range<u64>) -> Result<()> {
        Ok(())
    }

    fn available(&mut self, _need: u64) -> Result<()> {
        Ok(())
    }
}

fn cycle(words: SlotWords<'_>, worker: &mut WorkerSlots, leases: &Leases, os: &mut impl Pages) -> SlotId {
    let slot = worker.begin(words).expect("a free slot");
    let growth = worker.grow(words, slot, BATCH, os);
    assert_eq!(growth, Ok(Growth::Ready));
    worker.commit(slot);
    leases.hold(words, slot);
    let cost = leases.try_lease(words, slot);
    assert_eq!(cost, Some(BATCH));
    leases.release(words, slot, cost);
    slot
}

fn one_batch(criterion: &mut Criterion) {
    for slots in [64, 1024] {
        let heap = HeapWords::new(slots);
        let words = heap.words();
        let mut worker = WorkerSlots::new(words, LIMITS);
        let leases = Leases::new(LIMITS, slots);
        let warm = cycle(words, &mut worker, &leases, &mut Plenty);
        let again = cycle(words, &mut worker, &leases, &mut Untouched);
        assert_eq!(again, warm, "the warm slot is used again");
        assert_eq!((leases.leased_slots(), leases.leased_bytes()), (0, 0));
        criterion.bench_function(&format!("pool/batch of one worker with {slots} slots"), |bencher| {
            bencher.iter(|| cycle(words, &mut worker, &leases, &mut Untouched));
        });
    }
}

fn growth(criterion: &mut Criterion) {
    let heap = HeapWords::new(64);
    let words = heap.words();
    let mut worker = WorkerSlots::new(words, LIMITS);
    let slot = worker.begin(words).expect("a free slot");
    assert_eq!(worker.grow(words, slot, BATCH, &mut Plenty), Ok(Growth::Ready));
    criterion.bench_function("pool/grow within what is touched", |bencher| {
        bencher.iter(|| worker.grow(words, slot, black_box(BATCH / 2), &mut Untouched));
    });
}

criterion_group!(benches, one_batch, growth);
criterion_main!(benches);
