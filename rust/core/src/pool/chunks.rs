//! The parts of a slot that is being filled, which are handed out one after the other.

use super::{OwnLease, SlotId};
use crate::sync::Arc;
use crate::testing::fault::fault;

/// A slot that is being filled for one batch.
#[derive(Debug)]
pub struct Fill {
    /// The slot.
    pub slot: SlotId,
    bump: u64,
    /// The start of each chunk, in order. One owner of its lease is this, the other ones are the chunk's.
    chunks: Vec<(u64, Arc<OwnLease>)>,
}

impl Fill {
    /// Of which nothing was handed out.
    #[must_use]
    pub fn new(slot: SlotId) -> Self {
        Self { slot, bump: 0, chunks: Vec::new() }
    }

    /// Returns the first byte that is not handed out, from the start of the window.
    #[must_use]
    pub fn bump(&self) -> u64 {
        self.bump
    }

    /// Takes the chunks at the end that the worker no longer has.
    pub fn take_back(&mut self) {
        // ORDERING own-lease-dropped: `get_mut` succeeds for the only owner, after all that the dropped ones did.
        let is_back =
            |lease: &mut Arc<OwnLease>| Arc::get_mut(lease).is_some() || fault("chunk_lease_ignored");
        while let Some((start, _)) = self.chunks.pop_if(|(_, lease)| is_back(lease)) {
            self.bump = start;
        }
    }

    /// Hands out the bytes up to `end`, from `start` on, where the chunks before end. They are the caller's until it
    /// drops the lease.
    pub fn hand_out(&mut self, start: u64, end: u64, lease: OwnLease) -> Arc<OwnLease> {
        let lease = Arc::new(lease);
        self.chunks.push((start, Arc::clone(&lease)));
        self.bump = end;
        lease
    }
}
