//! Finds the samples that are kept: a word for each sample, and a few for the bytes that are used.
//!
//! ```text
//!   0                       floor                                               tail
//!   | cleared, not used again | table | record | record | lost | table | ... | nothing yet
//!                               |       ^ word of an index       ^
//!                               +--- the word of an index is in its entry of a table: see `entries`
//! ```
//!
//! Each record and table is written after all others, and its bytes are never used again. So a reader that has
//! begun finds the record, or after [`Table::clear`] bytes that are none. A word says where the record of its index
//! begins, or that its sample cannot be kept; a place below `floor` says nothing, so one store clears all words and all
//! tables.
//!
//! A process may die anywhere: what it had reserved is lost until the table is cleared, and nothing else.

mod entries;
mod sealed;

pub use entries::{FIRST, TABLES};

use crate::sync::{AtomicU64, Ordering, fence, release_unless};
use crate::testing::failpoint::failpoint;
use crate::testing::fault::fault;

/// Records begin at multiples of this, so the low bits of a word are free.
pub const ALIGN: u64 = 64;

/// The bit of a word that says that its sample cannot be kept.
const REFUSED: u64 = 1;

/// The entry of an index, and its word as it was seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Seen {
    /// The start of the entry; zero: the index has none.
    entry: u64,
    word: u64,
}

/// The state of an index, as its word says it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Nothing is kept.
    Missing,
    /// The record begins there.
    At(u64),
    /// The sample cannot be kept.
    Refused,
}

/// The memory that holds records and tables.
pub trait TableMemory {
    /// The words from `at` on, which lie in one table. `None`: they cannot be had.
    fn words(&self, at: u64, count: usize) -> Option<&[AtomicU64]>;

    /// Makes bytes zero, and such that no store to them can fail. `false`: there is no room.
    fn make(&self, at: u64, len: u64) -> bool;

    /// Gives bytes back to the system that nobody uses. Who still reads them finds zeros.
    fn give_back(&self, at: u64, len: u64);

    /// Gives the page back in which a word was written after it was cleared, if nothing in it lies above `floor`.
    fn give_back_below(&self, at: u64, floor: u64);
}

/// The table. All processes have the same words.
///
/// INVARIANT: `floor` and `tail` are multiples of [`ALIGN`] that only grow, and `floor <= tail`. Each range is reserved
/// once. `floor` was the tail once, so no range lies on both sides of it.
///
/// A flipped bit in these words, or in `tables`, is noticed. A damaged table has no room, until [`clear`](Self::clear)
/// is called.
#[derive(Debug)]
pub struct Table<'a, R> {
    /// The end of what was reserved.
    pub tail: &'a AtomicU64,
    /// The end of what was cleared.
    pub floor: &'a AtomicU64,
    /// The tail at which a sample last had no room, and one more.
    pub full: &'a AtomicU64,
    /// The start of each table, of at most [`TABLES`].
    pub tables: &'a [AtomicU64],
    /// The memory of records and tables.
    pub room: &'a R,
}

impl<R: TableMemory> Table<'_, R> {
    /// Begins at `start`, unless the table began further on, and appends after `end`, the end of the bytes that are
    /// there.
    pub fn begin(&self, start: u64, end: u64) {
        sealed::raise(self.tail, end.max(start));
        sealed::raise(self.floor, start);
    }

    fn state_of(&self, word: u64) -> State {
        let place = word & !(ALIGN - 1);
        if place < self.floor() || word == 0 {
            State::Missing
        } else if word & REFUSED != 0 {
            State::Refused
        } else {
            State::At(place)
        }
    }

    /// Reserves `len` bytes, if no more than `bound` are used then. `None`: there is no room.
    ///
    /// The bytes are the caller's, until it names them by [`publish`](Self::publish).
    #[must_use]
    pub fn reserve(&self, len: u64, bound: u64) -> Option<u64> {
        self.reserve_at(len, ALIGN, bound)
    }

    fn reserve_at(&self, len: u64, align: u64, bound: u64) -> Option<u64> {
        let len = len.checked_next_multiple_of(ALIGN)?;
        loop {
            let seen = self.tail.load(Ordering::Relaxed);
            let at = sealed::open(seen)?.next_multiple_of(align);
            let end = at.checked_add(len).filter(|&end| end < sealed::END)?;
            if end.saturating_sub(self.floor()) > bound {
                self.record_full();
                return None;
            }
            if fault("reserved_by_store") {
                self.tail.store(sealed::seal(end), Ordering::Relaxed);
                return Some(at);
            }
            // Relaxed: the range is all that the tail says.
            let order = Ordering::Relaxed;
            if self.tail.compare_exchange(seen, sealed::seal(end), order, order).is_ok() {
                return Some(at);
            }
        }
    }

    /// Notes that a sample had no room.
    pub fn record_full(&self) {
        self.full.store(sealed::seal(self.tail() + 1), Ordering::Relaxed);
    }

    /// Gives the bytes back that were reserved last, if nothing was reserved since.
    pub fn unreserve(&self, at: u64, len: u64) {
        let end = at + len.next_multiple_of(ALIGN);
        let (end, at) = (sealed::seal(end), sealed::seal(at));
        let _ = self.tail.compare_exchange(end, at, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Makes a record that is written the one of the index whose entry was seen. `false`: another is, or the table was
    /// cleared meanwhile; then no word names the record's bytes, and the caller gives them back to the system.
    #[must_use]
    pub fn publish(&self, seen: Seen, at: u64) -> bool {
        failpoint("sample-written");
        let Some(word) = self.word(seen) else { return false };
        // ORDERING there: the record is whole before the word names it.
        let order = release_unless("there_relaxed");
        if fault("published_by_store") {
            word.store(at, order);
            return true;
        }
        // ORDERING floor: a word that was given back, and that this brings back, shows the floor that was raised before.
        let order = match order {
            Ordering::Release if !fault("published_without_acquire") => Ordering::AcqRel,
            order => order,
        };
        if word.compare_exchange(seen.word, at, order, Ordering::Relaxed).is_err() {
            return false;
        }
        failpoint("sample-published");
        // A table that is cleared gives back what lies below its floor after it has raised the floor. A lock of the
        // system orders that with the writing of the record: whichever comes later sees what the other has done.
        if fault("cleared_bytes_ignored") || at.min(seen.entry) >= self.floor() {
            return true;
        }
        self.room.give_back_below(seen.entry, self.floor());
        false
    }

    /// Notes that the sample of an index cannot be kept, whose entry was seen.
    pub fn refuse(&self, seen: Seen) {
        if let Some(word) = self.word(seen) {
            let refused = self.tail() | REFUSED;
            let _ = word.compare_exchange(seen.word, refused, Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    /// Forgets a record that was found damaged.
    pub fn forget(&self, seen: Seen) {
        if let Some(word) = self.word(seen) {
            let _ = word.compare_exchange(seen.word, 0, Ordering::Relaxed, Ordering::Relaxed);
        }
    }

    fn word(&self, seen: Seen) -> Option<&AtomicU64> {
        self.room.words(seen.entry, 2).filter(|_| seen.entry > 0).map(|words| &words[1])
    }

    /// Forgets all records and tables. Returns the range of their bytes, which the caller gives back to the system
    /// after this. `end` is the end of all bytes that are there, because a damaged tail does not say it.
    #[expect(
        clippy::disallowed_methods,
        reason = "what it orders are plain bytes, which ThreadSanitizer does not judge by fences"
    )]
    pub fn clear(&self, end: u64) -> std::ops::Range<u64> {
        let end = loop {
            let seen = self.tail.load(Ordering::Relaxed);
            // One step further: what was noted at the tail lies below the floor.
            let end = sealed::open(seen).unwrap_or(0).max(end).next_multiple_of(ALIGN) + ALIGN;
            let order = Ordering::Relaxed;
            if self.tail.compare_exchange(seen, sealed::seal(end), order, order).is_ok() {
                break end;
            }
        };
        let start = sealed::raise(self.floor, end).unwrap_or(0);
        // ORDERING floor: a call of the system is no fence. Without this one, a weakly ordered machine may show that the
        // bytes are gone before it shows the floor.
        if !fault("raised_without_fence") {
            fence(Ordering::Release);
        }
        for word in self.tables.iter().chain([self.full]) {
            // Mends a damaged one.
            sealed::raise(word, 0);
        }
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
        if !fault("looked_without_fence") {
            fence(Ordering::Acquire);
        }
        self.is_cleared(at)
    }

    /// Bytes that are used: records and tables, and what was lost by deaths.
    #[must_use]
    pub fn used(&self) -> u64 {
        self.tail().saturating_sub(self.floor())
    }

    /// True if a sample had no room since the table was cleared.
    #[must_use]
    pub fn is_full(&self) -> bool {
        sealed::open(self.full.load(Ordering::Relaxed)).is_some_and(|full| full > self.floor())
    }

    /// The end of what was reserved.
    #[must_use]
    pub fn tail(&self) -> u64 {
        sealed::open(self.tail.load(Ordering::Relaxed)).unwrap_or(0)
    }

    fn floor(&self) -> u64 {
        // Above all places while it is damaged: nothing is there.
        let floor = sealed::open(self.floor.load(Ordering::Relaxed)).unwrap_or(u64::MAX);
        if fault("floor_ignored") { 0 } else { floor }
    }
}
