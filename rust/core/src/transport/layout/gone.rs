//! Windows that are given up, as this process alone knows it.
#![forbid(unsafe_code)]

use super::geometry::Geometry;
use crate::pool::SlotId;
use crate::sync::{AtomicU64, Ordering};

/// A bit for each slot of each worker.
#[derive(Debug)]
pub(super) struct Gone {
    bits: Box<[AtomicU64]>,
    slots: usize,
}

impl Gone {
    /// None of them.
    pub(super) fn new(geometry: &Geometry) -> Self {
        let slots = geometry.slots as usize;
        let words = (geometry.workers as usize * slots).div_ceil(64);
        Self { bits: (0..words).map(|_| AtomicU64::new(0)).collect(), slots }
    }

    /// Adds a window. Returns true if it was not in the set before. Any thread may call this.
    pub(super) fn insert(&self, worker: u32, slot: SlotId) -> bool {
        let (word, bit) = self.at(worker, slot);
        word.fetch_or(bit, Ordering::Relaxed) & bit == 0
    }

    /// Returns true if the window is in the set.
    pub(super) fn contains(&self, worker: u32, slot: SlotId) -> bool {
        let (word, bit) = self.at(worker, slot);
        word.load(Ordering::Relaxed) & bit != 0
    }

    fn at(&self, worker: u32, slot: SlotId) -> (&AtomicU64, u64) {
        let index = worker as usize * self.slots + slot.index();
        (&self.bits[index / 64], 1 << (index % 64))
    }
}
