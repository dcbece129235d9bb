//! Bytes of a slot that is being filled, on loan to collate.

use crate::forks::Moment;
use crate::pool::OwnLease;
use crate::process::Process;
use crate::sync::Arc;

/// Bytes of a slot that collate may write to. The slot is not filled again before it is dropped, and the children
/// that were forked while it was there have ended.
#[derive(Debug)]
pub struct Chunk {
    pub(super) address: usize,
    pub(super) len: u64,
    pub(super) lease: Arc<OwnLease>,
    pub(super) process: &'static Process,
    pub(super) taken: Moment,
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
