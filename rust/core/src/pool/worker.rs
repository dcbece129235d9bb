//! The worker's side: the only allocator of its slots.

use super::registered::fixed;
use super::{Growth, Leases, Limits, Pages, SlotId, SlotWords};
use crate::Result;
use crate::number::u32_from;
use crate::sync::{Arc, Ordering, acquire_unless};
use crate::testing::failpoint::failpoint;
use crate::testing::{fault::fault, planted};

/// The worker's knowledge of a slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum SlotState {
    Free,
    Filling,
    /// Committed, and not seen to have come back.
    Committed,
    /// Back from the parent, or abandoned, but the worker itself has an [`OwnLease`] on it.
    OwnLeased,
}

/// A lease of the worker's own: it has a tensor in the slot. The slot is not handed out again
/// before all of its own leases on it have ended. Dropping is one atomic operation, from any thread.
#[derive(Debug)]
#[must_use = "the slot is not handed out again for as long as this lives"]
pub struct OwnLease {
    // ORDERING own-lease-dropped: counting owners, with the orderings that reuse needs, is what `Arc`
    // does.
    _owner: Arc<()>,
}

/// The private state of one worker about its slots.
///
/// INVARIANT states: `free` has each slot in `SlotState::Free` once, `own_leased` each one in
/// `SlotState::OwnLeased` once.
/// INVARIANT budget: `resident` is the sum over `touched`, at most `limits.share` once
/// [`grow`](Self::grow) has returned, unless a predecessor with a larger share left more. `touched`
/// is at most the window. The shared words repeat both and are never read back, so that no other
/// process can move the bounds by a stray write.
#[derive(Debug)]
pub struct WorkerSlots {
    limits: Limits,
    states: Box<[SlotState]>,
    touched: Box<[u64]>,
    resident: u64,
    /// Bytes that the share has to hold in addition to the slots.
    beside: u64,
    /// Least recently used first.
    free: Vec<SlotId>,
    own_leased: Vec<SlotId>,
    /// One owner is this, the others are the own leases on the slot.
    own_leases: Box<[Arc<()>]>,
}

impl WorkerSlots {
    /// The slots of the first worker on fresh words, which are all zero: all of them free, none
    /// with memory.
    pub fn new(words: SlotWords<'_>, limits: Limits) -> Self {
        let slots = words.slots();
        Self {
            limits,
            states: (0..slots).map(|_| SlotState::Free).collect(),
            touched: (0..slots).map(|_| 0).collect(),
            resident: 0,
            beside: 0,
            free: (0..slots).rev().map(SlotId::new).collect(),
            own_leased: Vec::new(),
            own_leases: (0..slots).map(|_| Arc::new(())).collect(),
        }
    }

    /// The slots of a worker whose predecessor has ended. `busy` is
    /// [`Leases::busy`](super::Leases::busy), which the parent read after it had drained the
    /// predecessor's ring and before it started this worker.
    pub fn take_over(words: SlotWords<'_>, limits: Limits, busy: &[u64]) -> Self {
        debug_assert_eq!(busy.len(), words.free.len());
        let mut slots = Self::new(words, limits);
        for (number, word) in words.free.iter().enumerate() {
            // ORDERING slot-returned
            let returned = word.swap(0, acquire_unless("take_over_relaxed"));
            failpoint("take-over-swapped");
            let mut busy = busy.get(number).copied().unwrap_or(u64::MAX);
            planted!("busy_read_after_swap" => busy = Leases::busy(words)[number]);
            for slot in SlotId::of_bits(number, busy & !returned) {
                if let Some(state) = slots.states.get_mut(slot.index()) {
                    *state = SlotState::Committed;
                }
            }
        }
        for (own, shared) in slots.touched.iter_mut().zip(words.touched()) {
            // More than the window is nonsense; the whole window is the most that can have been
            // touched.
            *own = shared.load(Ordering::Relaxed).min(limits.window);
            shared.store(*own, Ordering::Relaxed);
        }
        slots.resident = slots.touched.iter().sum();
        words.resident.store(slots.resident, Ordering::Relaxed);

        let Self { free, states, touched, .. } = &mut slots;
        free.retain(|slot| states[slot.index()] == SlotState::Free);
        free.sort_by_key(|slot| touched[slot.index()]);
        slots
    }

    /// FREE -> FILLING: the most recently used free slot, which is the warmest, after all that came
    /// back is counted in; `None` when every slot is in use. Wait-free: one load for each 64 slots,
    /// one swap where something came back.
    pub fn begin(&mut self, words: SlotWords<'_>) -> Option<SlotId> {
        self.sweep(words);
        let slot = self.free.pop()?;
        self.states[slot.index()] = SlotState::Filling;
        Some(slot)
    }

    /// Makes the bytes `0..end` of the window of `slot`, which is being filled, usable. A
    /// comparison when they already are; otherwise the memory is counted first, and free slots are
    /// punched, the least recently used first, if it would exceed the share.
    ///
    /// # Errors
    ///
    /// The errors of `os`, unchanged. The slot keeps what it had.
    #[inline]
    pub fn grow(
        &mut self,
        words: SlotWords<'_>,
        slot: SlotId,
        end: u64,
        os: &mut impl Pages,
    ) -> Result<Growth> {
        if end <= self.touched[slot.index()] {
            return Ok(Growth::Ready);
        }
        self.touch(words, slot, end, os)
    }

    /// Gives about `most` bytes of the free slots back, the least recently used first.
    pub fn shrink(&mut self, words: SlotWords<'_>, most: u64, os: &mut impl Pages) {
        self.sweep(words);
        self.punch_free(words, most, os);
    }

    /// Sets how many bytes the share has to hold in addition to the slots.
    pub fn set_beside(&mut self, bytes: u64) {
        self.beside = bytes;
    }

    /// FILLING -> COMMITTED, before the slot's descriptor is published.
    pub fn commit(&mut self, slot: SlotId) {
        debug_assert_eq!(self.states[slot.index()], SlotState::Filling);
        self.states[slot.index()] = SlotState::Committed;
    }

    /// FILLING -> FREE: what was written is not delivered. With own leases, the slot is free once they
    /// are gone.
    pub fn abandon(&mut self, slot: SlotId) {
        debug_assert_eq!(self.states[slot.index()], SlotState::Filling);
        self.recover(slot);
    }

    /// A lease of the worker's own on a slot that it fills.
    pub fn own_lease(&self, slot: SlotId) -> OwnLease {
        debug_assert_eq!(self.states[slot.index()], SlotState::Filling);
        OwnLease { _owner: Arc::clone(&self.own_leases[slot.index()]) }
    }

    /// Returns the number of slots that only the worker itself keeps, as of the last [`begin`](Self::begin).
    pub fn own_leased_slots(&self) -> u32 {
        u32_from(self.own_leased.len() as u64)
    }

    /// Bytes in slots that only the worker itself keeps, as of the last [`begin`](Self::begin).
    pub fn own_leased_bytes(&self) -> u64 {
        self.own_leased.iter().map(|slot| self.touched[slot.index()]).sum()
    }

    /// Returns true if the worker itself has anything in its slots, now.
    pub fn has_own_leases(&mut self) -> bool {
        // ORDERING own-lease-dropped
        self.own_leases.iter_mut().any(|owner| Arc::get_mut(owner).is_none())
    }

    /// Bytes that the slots may have touched, as the worker counts them.
    #[must_use]
    pub fn resident(&self) -> u64 {
        self.resident
    }

    #[cold]
    fn touch(&mut self, words: SlotWords<'_>, slot: SlotId, end: u64, os: &mut impl Pages) -> Result<Growth> {
        debug_assert_eq!(self.states[slot.index()], SlotState::Filling);
        if end > self.limits.half() {
            return Ok(Growth::Oversize);
        }
        let target = self.limits.round_up(end);
        let need = target - self.touched[slot.index()];
        if !self.make_room(words, need, os) {
            return Ok(Growth::NoRoom);
        }
        os.available(need)?;
        // Before the pages are touched: a worker that dies here has counted too much, never too
        // little.
        self.count(words, slot, target);
        failpoint("touched-stored");
        Ok(Growth::Ready)
    }

    /// Returns true if `need` more bytes, in addition to the slots, are within the share. Punches as much of the free
    /// slots as that takes, and nothing if it would not be enough: the slots had better stay warm.
    pub fn make_room(&mut self, words: SlotWords<'_>, need: u64, os: &mut impl Pages) -> bool {
        let needed = self.resident.saturating_add(self.beside).saturating_add(need);
        let excess = needed.saturating_sub(self.limits.share);
        if excess == 0 {
            return true;
        }
        self.sweep(words);
        let in_free_slots: u64 = self.free.iter().map(|&slot| self.loose(words, slot)).sum();
        excess <= in_free_slots && self.punch_free(words, excess, os)
    }

    /// Bytes of a free slot that can be given back.
    fn loose(&self, words: SlotWords<'_>, slot: SlotId) -> u64 {
        let touched = self.touched[slot.index()];
        touched - fixed(words, slot, touched)
    }

    /// Punches about `excess` bytes of the free slots, the least recently used first. Returns whether it was as much.
    /// A slot whose pages the system does not take stays counted, and the next one's are given.
    fn punch_free(&mut self, words: SlotWords<'_>, mut excess: u64, os: &mut impl Pages) -> bool {
        for index in 0..self.free.len() {
            let slot = self.free[index];
            let touched = self.touched[slot.index()];
            let loose = self.loose(words, slot);
            let kept = touched - self.limits.round_up(excess.min(loose)).min(loose);
            if kept < touched {
                planted!("uncounted_before_punch" => self.count(words, slot, kept));
                if os.punch(slot, kept..touched).is_err() {
                    continue;
                }
                failpoint("punched");
                // After the pages are gone, for the same reason.
                self.count(words, slot, kept);
                excess = excess.saturating_sub(touched - kept);
            }
            if excess == 0 {
                break;
            }
        }
        excess == 0
    }

    /// Says that a slot keeps this many bytes. Between the two stores the sum is wrong; a successor
    /// computes it again.
    fn count(&mut self, words: SlotWords<'_>, slot: SlotId, bytes: u64) {
        let touched = &mut self.touched[slot.index()];
        self.resident = self.resident - *touched + bytes;
        *touched = bytes;
        words.resident.store(self.resident, Ordering::Relaxed);
        failpoint("resident-stored");
        words.touched()[slot.index()].store(bytes, Ordering::Relaxed);
    }

    /// RETURNED -> FREE, or OWN-LEASED while the worker itself keeps something in the slot. Returns true if a slot has
    /// come back from the parent.
    pub fn sweep(&mut self, words: SlotWords<'_>) -> bool {
        let mut came_back = false;
        if !self.own_leased.is_empty() {
            for slot in std::mem::take(&mut self.own_leased) {
                self.recover(slot);
            }
        }
        for (number, word) in words.free.iter().enumerate() {
            if word.load(Ordering::Relaxed) == 0 {
                continue;
            }
            // ORDERING slot-returned: a read-modify-write, so that the edge extends to a successor
            // when the bits are lost with this worker.
            let returned = word.swap(0, acquire_unless("sweep_relaxed"));
            failpoint("free-swapped");
            came_back = true;
            for slot in SlotId::of_bits(number, returned) {
                // A bit for any other slot is no correct peer's; to believe it would hand a slot
                // out twice.
                let committed = self.states.get(slot.index()) == Some(&SlotState::Committed);
                // Models have correct peers only.
                let is_model = cfg!(any(ringloader_loom, ringloader_tsan, ringloader_failpoints));
                debug_assert!(committed || !is_model, "slot {slot} came back without being out");
                if committed {
                    self.recover(slot);
                }
            }
        }
        came_back
    }

    fn recover(&mut self, slot: SlotId) {
        // ORDERING own-lease-dropped: `get_mut` succeeds for the only owner, after all that the ended leases
        // did.
        let ended = Arc::get_mut(&mut self.own_leases[slot.index()]).is_some();
        let (state, list) = if ended || fault("own_lease_ignored") {
            (SlotState::Free, &mut self.free)
        } else {
            (SlotState::OwnLeased, &mut self.own_leased)
        };
        self.states[slot.index()] = state;
        list.push(slot);
    }
}

#[cfg(all(test, not(ringloader_loom)))]
mod tests;
