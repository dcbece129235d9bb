//! The word of a segment that carries oversize batches: which side has its memory.
//!
//! ```text
//!           lend                give_back
//!   FRESH ---------> LENT -----------------> BACK
//!                     ^                       |
//!                     +-------- lend ---------+
//! ```
//!
//! The worker lends a segment that it keeps for later batches; the parent gives it back after its last view of the batch.
//! A segment that is never lent carries one batch.

use crate::sync::{AtomicU64, Ordering, acquire_unless, release_unless};

const LENT: u64 = 1;
const BACK: u64 = 2;

/// The word of one segment. Zero: fresh.
#[derive(Debug, Clone, Copy)]
pub struct Custody<'a>(&'a AtomicU64);

impl<'a> Custody<'a> {
    /// The custody that `word` tells.
    #[must_use]
    pub fn new(word: &'a AtomicU64) -> Self {
        Self(word)
    }

    /// FRESH or BACK -> LENT: the worker writes a batch. The ring's `tail` publishes this.
    pub fn lend(self) {
        self.0.store(LENT, Ordering::Relaxed);
    }

    /// LENT -> BACK, after the parent's last access. `false`: the worker does not use the memory again.
    #[must_use]
    pub fn give_back(self) -> bool {
        // ORDERING segment-returned
        let returned = release_unless("segment_given_back_relaxed");
        self.0.compare_exchange(LENT, BACK, returned, Ordering::Relaxed).is_ok()
    }

    /// Returns true if nobody but the worker has the memory, of a segment that it has lent before.
    #[must_use]
    pub fn is_back(self) -> bool {
        // ORDERING segment-returned
        self.0.load(acquire_unless("segment_back_relaxed")) == BACK
    }
}
