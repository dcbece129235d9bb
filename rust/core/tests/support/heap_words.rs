//! The shared words of slots, on the heap.
#![allow(dead_code, reason = "not each test that has the support needs it")]

use super::{AtomicU32, AtomicU64, SlotWords};

/// Shared words on the heap, all zero.
#[derive(Debug)]
pub(crate) struct HeapWords {
    free: Box<[AtomicU64]>,
    holds: Box<[AtomicU32]>,
    sizes: Box<[AtomicU64]>,
    resident: AtomicU64,
}

impl HeapWords {
    /// Words for this many slots.
    pub(crate) fn new(slots: u32) -> Self {
        Self {
            free: (0..slots.div_ceil(u64::BITS)).map(|_| AtomicU64::new(0)).collect(),
            holds: (0..slots).map(|_| AtomicU32::new(0)).collect(),
            sizes: (0..2 * slots).map(|_| AtomicU64::new(0)).collect(),
            resident: AtomicU64::new(0),
        }
    }

    /// The words, borrowed.
    pub(crate) fn words(&self) -> SlotWords<'_> {
        SlotWords::new(&self.free, &self.holds, &self.sizes, &self.resident)
    }
}
