//! Memory of slots that the parent has registered with a driver: a device reads it in place, so its pages stay.
//!
//! A driver that locks memory holds its *pages*. Punched, they leave the window, and the window gets others at the
//! next write: the device keeps reading the old ones, and sees old bytes. Unmapped, the driver keeps an address
//! that may be another mapping's. So:
//!
//! INVARIANT registered: no page below `registered` is punched or replaced. The worker keeps it when it
//! makes room and when it is idle, so does the segment cache, and at the end [`retire`](super::retire) refuses the
//! slot until the parent has unregistered it.
//!
//! Only the parent writes the word:
//!
//! - More, before it asks the driver to register, while it holds the slot. The worker reads the words of free slots
//!   alone, so a slot's own way back carries it (ORDERING slot-returned), to a successor too.
//! - Less, after the driver has unregistered, of slots that are held or not (ORDERING registered-cleared). The worker
//!   may find it late. At the end, threads end holds, unregister and close: by ORDERING close, the last of them finds
//!   the slot neither held nor registered.
//!
//! `touched >= registered`: only what the worker has counted is registered, and it counts no less while the word
//! stands. So registered memory is resident memory of the worker's share, and needs no count of its own there.
//!
//! INVARIANT room: what is registered stays within half the worker's share, so that a worker with nothing undelivered
//! and no lease on its slots has room for its batch. Registered and leased memory may fill the share together: then a
//! batch is oversize, as with leases of the worker's own.
//!
//! # Forked children
//!
//! ORDERING fork is not concerned. A child has the mapping, but a registration is its parent's: the parent's driver
//! holds the pages, and shared pages are not copied at a fork. What the child unmaps, the parent keeps; and it punches
//! nothing, because it releases no slot, closes no engine and writes no word. What it may still read of a slot that
//! the parent has dropped is a matter of the lease, which outlives the fork: to a reader, a registered page is a page.
//! A child of a worker must leave the worker's slots alone, as ever.

use super::lease::add_within;
use super::{Leases, SlotId, SlotWords};
use crate::sync::{Ordering, acquire_unless, release_unless};
use crate::testing::{fault::fault, planted};

impl Leases {
    /// Says that the driver is about to get the first `bytes` of the window of `slot`, rounded up to pages, or has
    /// given back all beyond them. `false`, and nothing is changed, where that is more than the slot keeps, or takes
    /// more than half the worker's share together with its other slots.
    ///
    /// The caller holds the slot, or says less; one thread at a time does this.
    ///
    /// # Panics
    ///
    /// If `slot` is not one of `words`.
    #[must_use = "a refusal means that the memory may be given back at any time"]
    pub fn set_registered(&self, words: SlotWords<'_>, slot: SlotId, bytes: u64) -> bool {
        let word = &words.registered()[slot.index()];
        let before = word.load(Ordering::Relaxed);
        let Some(bytes) = bytes.checked_next_multiple_of(self.page) else { return false };
        if bytes > before {
            let touched = words.touched()[slot.index()].load(Ordering::Relaxed);
            if bytes > touched || !add_within(&self.registered_bytes, bytes - before, self.most_registered) {
                return false;
            }
        }
        // ORDERING registered-cleared: the driver's last access comes before the memory is given back.
        word.store(bytes, release_unless("registered_relaxed"));
        if bytes < before {
            self.registered_bytes.fetch_sub(before - bytes, Ordering::Relaxed);
        }
        true
    }

    /// Bytes of the worker's slots that are registered.
    pub fn registered_bytes(&self) -> u64 {
        self.registered_bytes.load(Ordering::Relaxed)
    }
}

/// Returns true if a slot's pages must stay where they are. Asked by threads that are about to give them back for good.
pub(super) fn is_registered(words: SlotWords<'_>, slot: SlotId) -> bool {
    // ORDERING registered-cleared
    let registered = words.registered()[slot.index()].load(Ordering::Acquire);
    registered > 0 && !fault("retired_while_registered")
}

/// Bytes of a slot that is not held which stay, whatever else is given back: of `touched`, what is registered.
pub(crate) fn fixed(words: SlotWords<'_>, slot: SlotId, touched: u64) -> u64 {
    planted!("punched_below_registered" => return 0);
    // ORDERING slot-returned: the parent has written it before the slot came back. The segment cache, which reads it
    // in the parent, has found the slot not busy (ORDERING slot-unheld).
    // ORDERING registered-cleared: or later, and less.
    words.registered()[slot.index()].load(acquire_unless("fixed_relaxed")).min(touched)
}
