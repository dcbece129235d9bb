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

/// Counts the work of one worker: written by the worker, read by any process, exact only while the worker is idle.
#[repr(C)]
#[derive(Debug, Default)]
pub struct Counters {
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
    /// The figures, with their names.
    #[must_use]
    pub fn read(&self) -> [(&'static str, u64); 5] {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        [
            ("batches", get(&self.batches)),
            ("in_place", get(&self.in_place)),
            ("copied", get(&self.copied)),
            ("pickled", get(&self.pickled)),
            ("oversize", get(&self.oversize)),
        ]
    }

    pub(super) fn clear(&self) {
        let Self { batches, in_place, copied, pickled, oversize } = self;
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
