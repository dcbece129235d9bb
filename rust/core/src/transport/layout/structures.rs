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

/// Counts the work of one worker in an epoch, and in the one before: written by the worker, read by any process, exact
/// only while the worker is idle.
#[repr(C)]
#[derive(Debug, Default)]
pub struct Counters {
    /// Epochs that the worker has begun after its first one.
    epoch: AtomicU64,
    /// Of even epochs, and of odd ones. A worker may be in the next epoch while one is still counted.
    counts: [Counts; 2],
}

/// The work of one worker in an epoch.
#[repr(C)]
#[derive(Debug, Default)]
pub struct Counts {
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
    /// The figures of an epoch, with their names. They are zero until the worker has begun it, and once it has begun
    /// the second epoch after it.
    #[must_use]
    pub fn read(&self, epoch: u64) -> [(&'static str, u64); 5] {
        // ORDERING epoch: acquires the zeros that `begin_epoch` stored before.
        let is_counted = is_counted(self.epoch.load(Ordering::Acquire), epoch);
        let counts = if is_counted { self.of(epoch).all() } else { [0; 5] };
        std::array::from_fn(|at| (Counts::NAMES[at], counts[at]))
    }

    /// Returns the counts of the epoch that the worker is in.
    #[must_use]
    pub fn now(&self) -> &Counts {
        self.of(self.epoch.load(Ordering::Relaxed))
    }

    /// Begins another epoch, in the worker.
    pub fn begin_epoch(&self) {
        self.of(self.epoch.load(Ordering::Relaxed).wrapping_add(1)).zero();
        // ORDERING epoch: releases the zeros to `read`.
        self.epoch.fetch_add(1, Ordering::Release);
    }

    /// Begins `epoch` for a successor, unless the worker that has ended was in it: a successor is not told of it. One
    /// that had begun the next epoch has left its counts of this one.
    pub fn succeed(&self, epoch: u64) {
        // ORDERING epoch: the parent alone is left to see it.
        if !is_counted(self.epoch.load(Ordering::Relaxed), epoch) {
            self.of(epoch).zero();
        }
        self.epoch.store(epoch, Ordering::Release);
    }

    /// Begins the first epoch again. No worker is left to see it.
    pub(super) fn clear(&self) {
        self.of(0).zero();
        self.epoch.store(0, Ordering::Relaxed);
    }

    fn of(&self, epoch: u64) -> &Counts {
        &self.counts[(epoch % 2) as usize]
    }
}

impl Counts {
    const NAMES: [&str; 5] = ["batches", "in_place", "copied", "pickled", "oversize"];

    /// The counters, in the order of their names.
    fn counters(&self) -> [&AtomicU64; 5] {
        [&self.batches, &self.in_place, &self.copied, &self.pickled, &self.oversize]
    }

    /// The figures, in the order of [`Counters::read`].
    #[must_use]
    pub fn all(&self) -> [u64; 5] {
        self.counters().map(|counter| counter.load(Ordering::Relaxed))
    }

    /// Replaces the figures by those that a worker elsewhere has counted.
    pub fn replace(&self, figures: [u64; 5]) {
        for (counter, figure) in self.counters().into_iter().zip(figures) {
            counter.store(figure, Ordering::Relaxed);
        }
    }

    fn zero(&self) {
        self.replace([0; 5]);
    }
}

/// Returns true if a worker in epoch `now` still has the counts of `epoch`.
fn is_counted(now: u64, epoch: u64) -> bool {
    now.wrapping_sub(epoch) <= 1
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
