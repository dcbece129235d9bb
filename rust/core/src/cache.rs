//! Finds the samples that are kept in memory: a word for each sample of the dataset, and two for the bytes that are used.
//!
//! ```text
//!   0       start             floor                               tail
//!   | words | cleared, not used again | record | record | lost | record | nothing yet
//! ```
//!
//! Each record is written after all others, and its bytes are never used again. So a reader that has begun finds the
//! record, or after [`Table::clear`] bytes that are none. A word says where the record of its index begins; a place
//! below `floor` says nothing, so one store clears all words. Of two that keep the record of one index at the same
//! moment, the later one's is found.
//!
//! A process may die anywhere: what it had reserved is lost until the table is cleared, and nothing else.

#![forbid(unsafe_code)]

use crate::sync::{AtomicU64, Ordering, acquire_unless, fence, release_unless};
use crate::testing::failpoint::failpoint;
use crate::testing::{fault::fault, planted};

/// Records begin at multiples of this.
pub const ALIGN: u64 = 64;

/// The table. All processes have the same words.
///
/// INVARIANT: `floor` and `tail` are multiples of [`ALIGN`] that only grow from the same place, and `floor <= tail`.
/// Each range is reserved once. `floor` was the tail once, so no range lies on both sides of it.
#[derive(Debug)]
pub struct Table<'a> {
    /// The end of what was reserved.
    pub tail: &'a AtomicU64,
    /// The end of what was cleared.
    pub floor: &'a AtomicU64,
    /// The word of each index.
    pub words: &'a [AtomicU64],
}

impl Table<'_> {
    /// Returns where the record of an index begins, if one is kept.
    #[must_use]
    pub fn look(&self, index: usize) -> Option<u64> {
        // ORDERING there: a record that the word names is whole.
        let at = self.words[index].load(acquire_unless("there_load_relaxed"));
        (at != 0 && at >= self.floor()).then_some(at)
    }

    /// Reserves `len` bytes, if no more than `bound` are used then. `None`: there is no room.
    ///
    /// The bytes are the caller's, until it names them by [`publish`](Self::publish).
    #[must_use]
    pub fn reserve(&self, len: u64, bound: u64) -> Option<u64> {
        let len = len.checked_next_multiple_of(ALIGN)?;
        loop {
            let at = self.tail.load(Ordering::Relaxed);
            let end = at.checked_add(len)?;
            if end.saturating_sub(self.floor()) > bound {
                return None;
            }
            planted!("reserved_by_store" => { self.tail.store(end, Ordering::Relaxed); return Some(at) });
            // Relaxed: the range is all that the tail says.
            if self.tail.compare_exchange(at, end, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
                return Some(at);
            }
        }
    }

    /// Makes a record that is written the one of an index. If the table was cleared since its bytes were reserved, it
    /// is none.
    pub fn publish(&self, index: usize, at: u64) {
        failpoint("sample-written");
        // ORDERING there: the record is whole before the word names it.
        self.words[index].store(at, release_unless("there_relaxed"));
        failpoint("sample-published");
    }

    /// Forgets all records. Returns the end of their bytes, which the caller gives back to the system after this.
    #[expect(
        clippy::disallowed_methods,
        reason = "what it orders are plain bytes, which ThreadSanitizer does not judge by fences"
    )]
    pub fn clear(&self) -> u64 {
        let end = self.tail.load(Ordering::Relaxed);
        self.floor.fetch_max(end, Ordering::Relaxed);
        // ORDERING floor: a call of the system is no fence. Without this one, a weakly ordered machine may show that the
        // bytes are gone before it shows the floor.
        planted!("raised_without_fence" => return end);
        fence(Ordering::Release);
        end
    }

    /// True if a record that was read may have been cleared before its last byte was read.
    #[must_use]
    #[expect(
        clippy::disallowed_methods,
        reason = "what it orders are plain bytes, which ThreadSanitizer does not judge by fences"
    )]
    pub fn was_cleared(&self, at: u64) -> bool {
        // ORDERING floor: whoever read a byte that was given back finds the floor that was raised before. The thread
        // that had the fault, which the system orders with the giving back, may be another one of this process: it
        // proves nothing.
        planted!("looked_without_fence" => return at < self.floor());
        fence(Ordering::Acquire);
        at < self.floor()
    }

    /// Bytes of records, with what was lost.
    #[must_use]
    pub fn used(&self) -> u64 {
        self.tail.load(Ordering::Relaxed).saturating_sub(self.floor())
    }

    fn floor(&self) -> u64 {
        if fault("floor_ignored") { 0 } else { self.floor.load(Ordering::Relaxed) }
    }
}
