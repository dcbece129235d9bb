//! The parent's side: holding a drained slot, leasing it to the user within bounds, and returning
//! it from any thread.

use super::words::SLOTS_PER_WORD;
use super::{Limits, SlotId, SlotWords};
use crate::number::u32_from;
use crate::sync::{AtomicU64, Ordering, release_unless};
use crate::testing::failpoint::failpoint;
use crate::testing::planted;

/// Counts what the user has leased from one worker and what is registered of it, and bounds both. Private memory of the
/// parent; any thread may use it.
///
/// INVARIANT: the leases stay within half the worker's share and half its slots, so holding batches
/// never starves the worker.
#[derive(Debug)]
pub struct Leases {
    leased_slots: AtomicU64,
    leased_bytes: AtomicU64,
    most_slots: u64,
    most_bytes: u64,
    /// The sum of the words in `registered`.
    pub(super) registered_bytes: AtomicU64,
    pub(super) most_registered: u64,
    pub(super) page: u64,
}

impl Leases {
    /// No leases, for a worker with this many slots.
    pub fn new(limits: Limits, slots: u32) -> Self {
        Self {
            leased_slots: AtomicU64::new(0),
            leased_bytes: AtomicU64::new(0),
            most_slots: u64::from(slots) / 2,
            most_bytes: limits.half(),
            registered_bytes: AtomicU64::new(0),
            most_registered: limits.share / 2,
            page: limits.page,
        }
    }

    /// COMMITTED -> HELD, when the parent drains the descriptor that names `slot`, before anything
    /// else. Each hold is ended by one [`release`](Self::release), also when the batch is thrown
    /// away. One atomic operation.
    ///
    /// # Panics
    ///
    /// If `slot` is not one of `words`.
    pub fn hold(&self, words: SlotWords<'_>, slot: SlotId) {
        // A count and not a mark: the last release of this slot may still have its own `fetch_sub`
        // before it.
        let holds = &words.holds[slot.index()];
        planted!("hold_as_mark" => return holds.store(1, Ordering::Relaxed));
        holds.fetch_add(1, Ordering::Relaxed);
    }

    /// Leases a held slot to the user. Returns the bytes that this costs, to be given back by
    /// [`release`](Self::release); `None` if the user's leases would exceed their bounds: copy the
    /// batch, then release the slot without a cost. Lock-free.
    ///
    /// # Panics
    ///
    /// If `slot` is not one of `words`.
    #[must_use = "a lease is given back by `release` with its cost"]
    pub fn try_lease(&self, words: SlotWords<'_>, slot: SlotId) -> Option<u64> {
        if !add_within(&self.leased_slots, 1, self.most_slots) {
            return None;
        }
        // All that the window keeps, and not just this batch: none of it can be punched until the
        // slot is back.
        let cost = words.touched_of(slot).load(Ordering::Relaxed);
        if !add_within(&self.leased_bytes, cost, self.most_bytes) {
            self.leased_slots.fetch_sub(1, Ordering::Relaxed);
            return None;
        }
        Some(cost)
    }

    /// HELD -> RETURNED: ends one hold of `slot`, with the cost of its lease if it was leased. From
    /// any thread; wait-free, no lock, no allocation, no panic. The caller wakes the worker
    /// if that waits for room.
    pub fn release(&self, words: SlotWords<'_>, slot: SlotId, cost: Option<u64>) {
        // First, or the next batch in this slot could be refused a lease that the slot's own old
        // one still occupies.
        if let Some(cost) = cost {
            self.leased_bytes.fetch_sub(cost, Ordering::Relaxed);
            self.leased_slots.fetch_sub(1, Ordering::Relaxed);
        }
        let (word, bit) = slot.bit();
        let (Some(free), Some(holds)) = (words.free.get(word), words.holds.get(slot.index())) else {
            return;
        };
        planted!("unheld_before_returned" => { holds.fetch_sub(1, Ordering::Release); failpoint("returned-held") });
        // ORDERING slot-returned: what this process did with the bytes comes before the worker's
        // next filling.
        free.fetch_or(bit, release_unless("slot_returned_relaxed"));
        planted!("unheld_before_returned" => return);
        failpoint("returned-held");
        // ORDERING slot-unheld: the bit comes before a take-over that finds the slot not busy, so
        // that it is swapped away with the others and never arrives for a slot that was handed out
        // again. And the user's last access comes before the memory of what is not held is given back.
        planted!("hold_as_mark" => return holds.store(0, Ordering::Release));
        holds.fetch_sub(1, release_unless("unheld_relaxed"));
    }

    /// The slots that are held, one bit each: read after the dead worker's ring is drained and before
    /// [`WorkerSlots::take_over`](super::WorkerSlots::take_over) swaps the free words.
    pub fn busy(words: SlotWords<'_>) -> Vec<u64> {
        words
            .holds
            .chunks(SLOTS_PER_WORD)
            .map(|counters| {
                counters.iter().enumerate().fold(0, |busy, (bit, holds)| {
                    // ORDERING slot-unheld
                    busy | u64::from(holds.load(Ordering::Acquire) > 0) << bit
                })
            })
            .collect()
    }

    /// Returns true if the shared holds can be true: each slot that the user has leased is held. A slot that is not
    /// held is given back, so a hold that some other process has overwritten must not be believed. Ask once nothing is
    /// drained any more, or while nothing can be.
    pub fn is_borne_out(&self, words: SlotWords<'_>) -> bool {
        // ORDERING slot-unheld: a lease ends before its hold, so a thread that finds the hold lowered finds the lease
        // ended.
        let held = words.holds.iter().filter(|holds| holds.load(Ordering::Acquire) > 0).count();
        held as u64 >= self.leased_slots.load(Ordering::Relaxed)
    }

    /// Returns true if the user has leased more than half of what he may lease.
    pub fn is_half_leased(&self) -> bool {
        2 * u64::from(self.leased_slots()) > self.most_slots || self.leased_bytes() > self.most_bytes / 2
    }

    /// Slots that the user has leased.
    pub fn leased_slots(&self) -> u32 {
        u32_from(self.leased_slots.load(Ordering::Relaxed))
    }

    /// Bytes that the user has leased.
    pub fn leased_bytes(&self) -> u64 {
        self.leased_bytes.load(Ordering::Relaxed)
    }
}

/// Adds to a counter unless that would take it above `most`. Publishes nothing: the counters only
/// have to add up.
pub(super) fn add_within(counter: &AtomicU64, more: u64, most: u64) -> bool {
    let mut now = counter.load(Ordering::Relaxed);
    while let Some(sum) = now.checked_add(more).filter(|&sum| sum <= most) {
        match counter.compare_exchange_weak(now, sum, Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => return true,
            Err(changed) => now = changed,
        }
    }
    false
}

#[cfg(all(test, not(ringloader_loom)))]
mod tests {
    use super::super::heap_words::HeapWords;
    use super::*;

    const LIMITS: Limits = Limits { share: 1 << 20, window: 1 << 20, page: 4 << 10 };

    fn touch(words: SlotWords<'_>, slot: u32, bytes: u64) -> SlotId {
        words.touched()[slot as usize].store(bytes, Ordering::Relaxed);
        let slot = SlotId::new(slot);
        Leases::new(LIMITS, words.slots()).hold(words, slot);
        slot
    }

    #[test]
    fn leases_stay_within_half_the_bytes() {
        let heap = HeapWords::new(64);
        let words = heap.words();
        let leases = Leases::new(LIMITS, 64);
        let [a, b, c] =
            [(0, LIMITS.half() - 10), (1, 11), (2, 10)].map(|(slot, bytes)| touch(words, slot, bytes));
        let cost = leases.try_lease(words, a);
        assert_eq!(cost, Some(LIMITS.half() - 10));
        assert_eq!(leases.try_lease(words, b), None);
        assert_eq!(leases.leased_slots(), 1, "a refusal leaves nothing behind");
        assert_eq!(leases.try_lease(words, c), Some(10));
        leases.release(words, a, cost);
        assert_eq!(leases.try_lease(words, b), Some(11));
        assert_eq!((leases.leased_slots(), leases.leased_bytes()), (2, 21));
    }

    #[test]
    fn leases_stay_within_half_the_slots() {
        let heap = HeapWords::new(64);
        let words = heap.words();
        let leases = Leases::new(LIMITS, 64);
        for slot in 0..32 {
            assert_eq!(leases.try_lease(words, touch(words, slot, 1)), Some(1));
        }
        assert_eq!(leases.try_lease(words, touch(words, 32, 1)), None);
        leases.release(words, SlotId::new(7), Some(1));
        assert_eq!(leases.try_lease(words, SlotId::new(32)), Some(1));
    }

    #[test]
    fn a_corrupt_size_is_refused() {
        let heap = HeapWords::new(64);
        let leases = Leases::new(LIMITS, 64);
        let [a, b] = [(0, 1), (1, u64::MAX)].map(|(slot, bytes)| touch(heap.words(), slot, bytes));
        assert_eq!(leases.try_lease(heap.words(), a), Some(1));
        assert_eq!(leases.try_lease(heap.words(), b), None);
    }

    #[test]
    fn a_lowered_hold_of_a_leased_slot_is_noticed() {
        let heap = HeapWords::new(64);
        let words = heap.words();
        let leases = Leases::new(LIMITS, 64);
        let [a, b] = [(0, 1), (1, 1)].map(|(slot, bytes)| touch(words, slot, bytes));
        assert!(leases.is_borne_out(words));
        let [first, second] = [a, b].map(|slot| leases.try_lease(words, slot));
        assert!(leases.is_borne_out(words));
        words.holds[1].store(0, Ordering::Relaxed);
        assert!(!leases.is_borne_out(words));
        words.holds[1].store(1, Ordering::Relaxed);
        leases.release(words, a, first);
        assert!(leases.is_borne_out(words));
        leases.release(words, b, second);
        assert!(leases.is_borne_out(words));
    }

    #[test]
    fn busy_is_what_is_held() {
        let heap = HeapWords::new(128);
        let words = heap.words();
        let leases = Leases::new(LIMITS, 128);
        for slot in [0, 63, 64, 64, 127] {
            leases.hold(words, SlotId::new(slot));
        }
        assert_eq!(Leases::busy(words), [1 | 1 << 63, 1 | 1 << 63]);
        leases.release(words, SlotId::new(64), None);
        leases.release(words, SlotId::new(0), None);
        assert_eq!(Leases::busy(words), [1 << 63, 1 | 1 << 63]);
        assert_eq!(words.free[0].load(Ordering::Relaxed), 1);
        assert_eq!(words.free[1].load(Ordering::Relaxed), 1);
    }

    #[test]
    fn releasing_no_slot_does_nothing() {
        let heap = HeapWords::new(64);
        Leases::new(LIMITS, 64).release(heap.words(), SlotId::new(64), None);
        assert_eq!(Leases::busy(heap.words()), [0]);
    }

    #[test]
    fn registered_is_what_the_slot_keeps_in_whole_pages() {
        let heap = HeapWords::new(64);
        let words = heap.words();
        let leases = Leases::new(LIMITS, 64);
        let slot = touch(words, 3, 8 << 10);
        let registered = || (words.registered()[3].load(Ordering::Relaxed), leases.registered_bytes());
        assert!(!leases.set_registered(words, slot, (8 << 10) + 1));
        assert!(!leases.set_registered(words, slot, u64::MAX));
        assert_eq!(registered(), (0, 0), "a refusal leaves nothing behind");
        assert!(leases.set_registered(words, slot, 1));
        assert_eq!(registered(), (4 << 10, 4 << 10));
        assert!(leases.set_registered(words, slot, 8 << 10));
        assert_eq!(registered(), (8 << 10, 8 << 10));
        assert!(leases.set_registered(words, slot, 0));
        assert_eq!(registered(), (0, 0));
    }
}
