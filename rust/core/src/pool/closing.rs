//! The end of a transport: each slot's pages are given back once, by the last to have the slot.

use super::registered::is_registered;
use super::{SlotId, SlotWords};
use crate::sync::{AtomicBool, Ordering, acq_rel_unless};
use crate::testing::planted;

/// In the hold counter of a slot whose pages are given back: more holds than there can be.
const RETIRED: u32 = u32::MAX;

/// Says whether a worker's slots are given back to the system when they are released.
#[derive(Debug, Default)]
pub struct Closing(AtomicBool);

impl Closing {
    /// Makes a state that is not closed.
    pub fn new() -> Self {
        Self(AtomicBool::new(false))
    }

    /// Closes. The caller then retires every slot; a thread that holds one by then does so after its release.
    pub fn close(&self) {
        // ORDERING close: an exchange here and in `is_closed`, so the second of the two sees what
        // the first one did: this side the lowered hold, or that side the flag.
        self.0.swap(true, Ordering::AcqRel);
    }

    /// Returns true if a thread that has just released a slot must retire it.
    pub fn is_closed(&self) -> bool {
        planted!("closed_by_load" => return self.0.load(Ordering::Acquire));
        // ORDERING close: see `close`. A read-modify-write that changes nothing, to read the newest value.
        self.0.fetch_or(false, Ordering::AcqRel)
    }
}

/// Ends the use of a slot whose worker has ended, if it is not held and no driver has its memory. `true`: its pages
/// are the caller's to give back, and it is never held again.
pub fn retire(words: SlotWords<'_>, slot: SlotId) -> bool {
    // Only what is held is newly registered.
    if is_registered(words, slot) {
        return false;
    }
    // ORDERING close: of the threads that find the slot not held, one wins; it sees their last accesses.
    let won = acq_rel_unless("retire_relaxed");
    words.holds[slot.index()].compare_exchange(0, RETIRED, won, Ordering::Relaxed).is_ok()
}
