//! The words that a worker and its parent share about the worker's slots, borrowed from the side that
//! owns the memory.

use std::fmt;

use crate::number::u32_from;
use crate::sync::{AtomicU32, AtomicU64};

/// The number of slots, and so of bits, in a `free` word.
pub(super) const SLOTS_PER_WORD: usize = u64::BITS as usize;

/// The number of a slot among those of its worker. A side that reads one out of shared memory checks it first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct SlotId(u32);

impl SlotId {
    /// The slot with this number.
    pub const fn new(number: u32) -> Self {
        Self(number)
    }

    /// The number.
    pub const fn get(self) -> u32 {
        self.0
    }

    /// The number as an index into words and windows.
    pub const fn index(self) -> usize {
        self.0 as usize
    }

    /// The `free` word that has the slot's bit, and the bit in it.
    pub(super) const fn bit(self) -> (usize, u64) {
        (self.index() / SLOTS_PER_WORD, 1 << (self.index() % SLOTS_PER_WORD))
    }

    /// Returns true if the slot's bit is set in `words`, which have a bit for each slot.
    pub fn is_in(self, words: &[u64]) -> bool {
        let (word, bit) = self.bit();
        words.get(word).is_some_and(|word| word & bit != 0)
    }

    /// The slots whose bits are set in `bits`, the `free` word with this number.
    pub(super) fn of_bits(word: usize, mut bits: u64) -> impl Iterator<Item = Self> {
        std::iter::from_fn(move || {
            let bit = (bits != 0).then(|| bits.trailing_zeros())?;
            bits &= bits - 1;
            Some(Self(u32_from((word * SLOTS_PER_WORD) as u64) + bit))
        })
    }
}

impl fmt::Display for SlotId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The shared words of one worker's slots.
#[derive(Clone, Copy, Debug)]
pub struct SlotWords<'a> {
    /// One bit for each slot, 64 to a word. Set when a lease ends; swapped to zero by the worker
    /// when it sweeps.
    pub free: &'a [AtomicU64],
    /// The number of times that the parent has drained each slot and not yet finished its release.
    pub holds: &'a [AtomicU32],
    /// The [touched](Self::touched) words of all slots, then the [registered](Self::registered) words. They are one
    /// slice, because the words are borrowed several times for each batch.
    sizes: &'a [AtomicU64],
    /// The sum over `touched`, except while the worker is between two stores. Only the worker
    /// writes it.
    pub resident: &'a AtomicU64,
}

impl<'a> SlotWords<'a> {
    /// The words of one geometry, from which the lengths of the slices follow.
    pub fn new(
        free: &'a [AtomicU64],
        holds: &'a [AtomicU32],
        sizes: &'a [AtomicU64],
        resident: &'a AtomicU64,
    ) -> Self {
        debug_assert!(free.len() == holds.len().div_ceil(SLOTS_PER_WORD) && sizes.len() == 2 * holds.len());
        Self { free, holds, sizes, resident }
    }

    /// Returns the number of slots.
    pub fn slots(&self) -> u32 {
        u32_from(self.holds.len() as u64)
    }

    /// Bytes of each window, from its start, that may be backed by memory. Only the worker writes
    /// it. It never says less than the truth.
    pub fn touched(&self) -> &'a [AtomicU64] {
        &self.sizes[..self.holds.len()]
    }

    /// Returns the [`touched`](Self::touched) word of one slot. Used for each batch.
    pub(super) fn touched_of(&self, slot: SlotId) -> &'a AtomicU64 {
        &self.sizes[slot.index()]
    }

    /// Bytes of each window, from its start, that the parent has registered with a driver; whole pages, never more
    /// than [`touched`](Self::touched). Only the parent writes it, more only while it holds the slot. See
    /// [`registered`](super::registered).
    pub fn registered(&self) -> &'a [AtomicU64] {
        &self.sizes[self.holds.len()..]
    }
}

#[cfg(all(test, not(ringloader_loom)))]
mod tests {
    use super::*;

    #[test]
    fn bits_and_slots_are_inverse() {
        for number in [0, 1, 63, 64, 130] {
            let slot = SlotId::new(number);
            let (word, bit) = slot.bit();
            assert_eq!(SlotId::of_bits(word, bit).collect::<Vec<_>>(), [slot]);
        }
        let slots: Vec<_> = SlotId::of_bits(1, 1 | 1 << 5 | 1 << 63).map(SlotId::get).collect();
        assert_eq!(slots, [64, 69, 127]);
    }
}
