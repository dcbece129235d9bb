//! The structures in a segment, made of atomics.
#![forbid(unsafe_code)]

use crate::pool::SlotWords;
use crate::ring::{Ring, RingHeader};
use crate::sync::{AtomicU32, AtomicU64, Ordering, WaitFlag};

#[repr(C)]
#[derive(Debug)]
pub(super) struct SegmentHeader {
    pub(super) geometry: [AtomicU64; 7],
    pub(super) done: AtomicU32,
    pub(super) parent_sleeps: WaitFlag,
}

#[repr(C)]
#[derive(Debug)]
pub(super) struct WorkerHeader {
    pub(super) tasks: RingHeader,
    pub(super) results: RingHeader,
    pub(super) worker_sleeps: WaitFlag,
    pub(super) parent_sleeps: WaitFlag,
    pub(super) counters: Counters,
    pub(super) resident: AtomicU64,
}

/// Counts the work of one worker in an epoch: written by the worker, read by any process, exact only while the worker is
/// idle.
#[repr(C)]
#[derive(Debug, Default)]
pub struct Counters {
    /// Epochs that the worker has begun behind its first one.
    epoch: AtomicU64,
    /// Batches committed.
    pub batches: AtomicU64,
    /// Storages that collate had already written into the slot.
    pub in_place: AtomicU64,
    /// Storages copied into the slot.
    pub copied: AtomicU64,
    /// Batches whose tree went through pickle.
    pub pickled: AtomicU64,
    /// Batches in a segment of their own.
    pub oversize: AtomicU64,
}

impl Counters {
    /// The figures of an epoch, with their names. They are zero until the worker has begun it.
    #[must_use]
    pub fn read(&self, epoch: u64) -> [(&'static str, u64); 5] {
        // ORDERING epoch: acquires the zeros that `begin_epoch` stored before.
        let is_begun = self.epoch.load(Ordering::Acquire) == epoch;
        let get = |counter: &AtomicU64| if is_begun { counter.load(Ordering::Relaxed) } else { 0 };
        [
            ("batches", get(&self.batches)),
            ("in_place", get(&self.in_place)),
            ("copied", get(&self.copied)),
            ("pickled", get(&self.pickled)),
            ("oversize", get(&self.oversize)),
        ]
    }

    /// Begins another epoch, in the worker.
    pub fn begin_epoch(&self) {
        self.zero();
        // ORDERING epoch: releases the zeros to `read`.
        self.epoch.fetch_add(1, Ordering::Release);
    }

    /// Begins `epoch` for a successor, unless the worker that has ended was in it: a successor is not told of it.
    pub fn succeed(&self, epoch: u64) {
        // ORDERING epoch: the parent alone is left to see it.
        if self.epoch.load(Ordering::Relaxed) != epoch {
            self.zero();
            self.epoch.store(epoch, Ordering::Release);
        }
    }

    /// Begins the first epoch again. No worker is left to see it.
    pub(super) fn clear(&self) {
        self.zero();
        self.epoch.store(0, Ordering::Relaxed);
    }

    fn zero(&self) {
        let Self { epoch: _, batches, in_place, copied, pickled, oversize } = self;
        for counter in [batches, in_place, copied, pickled, oversize] {
            counter.store(0, Ordering::Relaxed);
        }
    }
}

/// One worker's structures in the segment, borrowed.
#[derive(Debug, Clone, Copy)]
pub struct WorkerView<'a> {
    /// Tasks: the parent produces, the worker consumes.
    pub tasks: Ring<'a>,
    /// Results: the worker produces, the parent consumes.
    pub results: Ring<'a>,
    /// The words that say which side has which slot.
    pub slots: SlotWords<'a>,
    /// Raised while the worker sleeps for a task or for room.
    pub worker_sleeps: &'a WaitFlag,
    /// Raised while the parent sleeps for a result of this worker alone.
    pub parent_sleeps: &'a WaitFlag,
    /// The counters of the worker's work.
    pub counters: &'a Counters,
}
