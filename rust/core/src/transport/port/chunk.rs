//! The parts of a slot that collate has while the slot is being filled.

use std::ops::Range;

use crate::forks::Moment;
use crate::pool::{OwnLease, SlotId};
use crate::process::Process;
use crate::sync::{Arc, Weak};
use crate::testing::failpoint::failpoint;

/// A slot that is being filled for one batch.
#[derive(Debug)]
pub(super) struct Fill {
    pub(super) slot: SlotId,
    /// The first byte that was not handed out, from the start of the window.
    pub(super) bump: u64,
    /// The chunks that were handed out, in order. Chunks at the end that the worker has dropped are taken back.
    chunks: Vec<(u64, Weak<OwnLease>)>,
}

impl Fill {
    pub(super) fn new(slot: SlotId) -> Self {
        Self { slot, bump: 0, chunks: Vec::new() }
    }

    /// Takes the chunks at the end that the worker no longer has.
    pub(super) fn take_back(&mut self) {
        while let Some((start, lease)) = self.chunks.last() {
            if lease.strong_count() > 0 {
                break;
            }
            self.bump = *start;
            self.chunks.pop();
        }
    }

    /// Hands out bytes of the slot, which lie at `address` in this process.
    pub(super) fn hand_out(
        &mut self,
        bytes: Range<u64>,
        address: usize,
        lease: OwnLease,
        process: &'static Process,
    ) -> Chunk {
        let lease = Arc::new(lease);
        self.chunks.push((bytes.start, Arc::downgrade(&lease)));
        self.bump = bytes.end;
        failpoint("chunk-taken");
        Chunk { address, len: bytes.end - bytes.start, lease, process, taken: process.now() }
    }
}

/// Bytes of a slot that collate may write to. The slot is not filled again before it is dropped, and the children
/// that were forked while it was there have ended.
#[derive(Debug)]
pub struct Chunk {
    address: usize,
    len: u64,
    lease: Arc<OwnLease>,
    process: &'static Process,
    taken: Moment,
}

impl Chunk {
    /// The address where they begin; as long as the chunk lives, no other code gets them.
    #[inline]
    #[must_use]
    pub fn address(&self) -> usize {
        self.address
    }

    /// Returns the number of bytes. Not zero.
    #[inline]
    #[must_use]
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> u64 {
        self.len
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        if !self.process.is_still(self.taken) {
            self.process.give_back(self.taken, || self.lease.clone());
        }
    }
}
