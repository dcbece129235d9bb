//! Finds the samples that are kept in memory: a word for each sample of the dataset, and a few for the bytes that are
//! used.
//!
//! ```text
//!   0       start             floor                               tail
//!   | words | cleared, not used again | record | record | lost | record | nothing yet
//! ```
//!
//! Each record is written after all others, and its bytes are never used again. So a reader that has begun finds the
//! record, or after [`Table::clear`] bytes that are none. A word says where the record of its index begins, or that its
//! sample cannot be kept; a place below `floor` says nothing, so one store clears all words.
//!
//! A process may die anywhere: what it had reserved is lost until the table is cleared, and nothing else.

#![forbid(unsafe_code)]

use crate::sync::{AtomicU64, Ordering, acquire_unless, fence, release_unless};
use crate::testing::failpoint::failpoint;
use crate::testing::{fault::fault, planted};

/// Records begin at multiples of this, so the low bits of a word are free.
pub const ALIGN: u64 = 64;

/// The bit of a word that says that its sample cannot be kept.
const REFUSED: u64 = 1;

/// The state of an index, as its word says it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SampleState {
    /// Nothing is kept.
    Missing,
    /// The record begins there.
    At(u64),
    /// The sample cannot be kept.
    Refused,
}

/// An index, and its word as it was seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Seen {
    index: usize,
    word: u64,
}

/// The table. All processes have the same words.
///
/// INVARIANT: `floor` and `tail` are multiples of [`ALIGN`] that only grow from the same place, and `floor <= tail`. Each range is reserved
/// once. `floor` was the tail once, so no range lies on both sides of it.
#[derive(Debug)]
pub struct Table<'a> {
    /// The end of what was reserved.
    pub tail: &'a AtomicU64,
    /// The end of what was cleared.
    pub floor: &'a AtomicU64,
    /// The tail at which a sample last had no room, and one more.
    pub full: &'a AtomicU64,
    /// The word of each index.
    pub words: &'a [AtomicU64],
}

impl Table<'_> {
    /// Returns the state of an index, and what says it.
    #[must_use]
    pub fn look(&self, index: usize) -> (SampleState, Seen) {
        // ORDERING there: a record that the word names is whole.
        let word = self.words[index].load(acquire_unless("there_load_relaxed"));
        (self.state_of(word), Seen { index, word })
    }

    fn state_of(&self, word: u64) -> SampleState {
        let place = word & !(ALIGN - 1);
        if place < self.floor() || word == 0 {
            SampleState::Missing
        } else if word & REFUSED != 0 {
            SampleState::Refused
        } else {
            SampleState::At(place)
        }
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
                self.record_full();
                return None;
            }
            planted!("reserved_by_store" => { self.tail.store(end, Ordering::Relaxed); return Some(at) });
            // Relaxed: the range is all that the tail says.
            if self.tail.compare_exchange(at, end, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
                return Some(at);
            }
        }
    }

    /// Notes that a sample had no room.
    pub fn record_full(&self) {
        self.full.store(self.tail.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    /// Gives the bytes back that were reserved last, if nothing was reserved since.
    pub fn unreserve(&self, at: u64, len: u64) {
        let end = at + len.next_multiple_of(ALIGN);
        let _ = self.tail.compare_exchange(end, at, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Makes a record that is written the one of the index that was seen. `false`: another is, or the table was cleared
    /// meanwhile; then no word names the record's bytes, and the caller gives them back to the system.
    #[must_use]
    pub fn publish(&self, seen: Seen, at: u64) -> bool {
        failpoint("sample-written");
        let word = &self.words[seen.index];
        // ORDERING there: the record is whole before the word names it.
        let order = release_unless("there_relaxed");
        planted!("published_by_store" => { word.store(at, order); return true });
        if word.compare_exchange(seen.word, at, order, Ordering::Relaxed).is_err() {
            return false;
        }
        failpoint("sample-published");
        // A table that is cleared gives back what lies below its floor after it has raised the floor. A lock of the
        // system orders that with the writing of the record: whichever comes later sees what the other has done.
        fault("cleared_bytes_ignored") || at >= self.floor()
    }

    /// Notes that the sample of an index cannot be kept, unless its word has changed.
    pub fn refuse(&self, seen: Seen) {
        self.replace(seen, self.tail.load(Ordering::Relaxed) | REFUSED);
    }

    /// Forgets a record that was found damaged.
    pub fn forget(&self, seen: Seen) {
        self.replace(seen, 0);
    }

    fn replace(&self, seen: Seen, word: u64) {
        let order = Ordering::Relaxed;
        let _ = self.words[seen.index].compare_exchange(seen.word, word, order, order);
    }

    /// Forgets all records. Returns the range of their bytes, which the caller gives back to the system after this.
    #[expect(
        clippy::disallowed_methods,
        reason = "what it orders are plain bytes, which ThreadSanitizer does not judge by fences"
    )]
    pub fn clear(&self) -> std::ops::Range<u64> {
        // One step further: what was noted at the tail lies below the floor.
        let end = self.tail.fetch_add(ALIGN, Ordering::Relaxed) + ALIGN;
        let start = self.floor.fetch_max(end, Ordering::Relaxed);
        // ORDERING floor: a call of the system is no fence. Without this one, a weakly ordered machine may show that the
        // bytes are gone before it shows the floor.
        planted!("raised_without_fence" => return start..end.max(start));
        fence(Ordering::Release);
        start..end.max(start)
    }

    /// True if what lies there was cleared.
    #[must_use]
    pub fn is_cleared(&self, at: u64) -> bool {
        at < self.floor()
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
        planted!("looked_without_fence" => return self.is_cleared(at));
        fence(Ordering::Acquire);
        self.is_cleared(at)
    }

    /// Bytes of records, with what was lost by deaths.
    #[must_use]
    pub fn used(&self) -> u64 {
        self.tail.load(Ordering::Relaxed).saturating_sub(self.floor())
    }

    /// True if a sample had no room since the table was cleared.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.full.load(Ordering::Relaxed) > self.floor()
    }

    /// Existing records of the indices in a range.
    #[must_use]
    pub fn items(&self, range: std::ops::Range<usize>) -> usize {
        let words = self.words[range].iter().map(|word| self.state_of(word.load(Ordering::Relaxed)));
        words.filter(|state| matches!(state, SampleState::At(_))).count()
    }

    fn floor(&self) -> u64 {
        if fault("floor_ignored") { 0 } else { self.floor.load(Ordering::Relaxed) }
    }
}
