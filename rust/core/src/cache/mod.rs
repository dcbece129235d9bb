//! A table of the samples that are kept: a word for each index, and two for the room that is used.
//!
//! ```text
//!   0                       floor                                    tail
//!   | cleared, not used again | record | record | lost | record | ... | nothing yet
//!                               ^ word of an index            ^
//! ```
//!
//! A record is written once, behind all others, and its place is never used again. So a reader that has begun finds the
//! record, or after [`Table::clear`] bytes that are none. A word says where the record of its index begins, or that
//! its sample cannot be kept; a place below `floor` says nothing, so one store clears all words.
//!
//! A process may die anywhere: what it had reserved is lost until the table is cleared, and nothing else.

use crate::sync::{AtomicU64, Ordering, acquire_unless, release_unless};
use crate::testing::failpoint::failpoint;
use crate::testing::fault::fault;

/// Records begin at multiples of this, so the low bits of a word are free.
pub const ALIGN: u64 = 64;

/// The bit of a word that says that its sample cannot be kept.
const REFUSED: u64 = 1;

/// The word of an index, as it was seen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Seen(u64);

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

/// The table. All processes have the same words.
///
/// INVARIANT: `floor` and `tail` are multiples of [`ALIGN`] that only grow, and `floor <= tail`. Each range of
/// records is reserved once.
#[derive(Debug, Clone, Copy)]
pub struct Table<'a> {
    /// The end of what was reserved.
    pub tail: &'a AtomicU64,
    /// The end of what was cleared.
    pub floor: &'a AtomicU64,
    /// The tail at which a sample last had no room, and one more.
    pub full: &'a AtomicU64,
    /// By index.
    pub words: &'a [AtomicU64],
}

impl Table<'_> {
    /// Returns the state of an index, and the word that says it.
    ///
    /// # Panics
    /// When there is no such index.
    #[must_use]
    pub fn look(&self, index: usize) -> (State, Seen) {
        // ORDERING there: a record that the word names is whole.
        let word = self.words[index].load(acquire_unless("there_load_relaxed"));
        let place = word & !(ALIGN - 1);
        let state = if place < self.floor() || word == 0 {
            State::Missing
        } else if word & REFUSED != 0 {
            State::Refused
        } else {
            State::At(place)
        };
        (state, Seen(word))
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
                self.note_full();
                return None;
            }
            if fault("reserved_by_store") {
                self.tail.store(end, Ordering::Relaxed);
                return Some(at);
            }
            // Relaxed: the range is all that the tail says.
            if self.tail.compare_exchange(at, end, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
                return Some(at);
            }
        }
    }

    /// Notes that a sample had no room.
    pub fn note_full(&self) {
        self.full.store(self.tail.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    /// Gives the bytes back that were reserved last, if nothing was reserved since.
    pub fn unreserve(&self, at: u64, len: u64) {
        let end = at + len.next_multiple_of(ALIGN);
        let _ = self.tail.compare_exchange(end, at, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Makes a record that is written the one of its index. `false`: another is, or the table was cleared meanwhile; the
    /// record's bytes are then nobody's, and the caller gives them back to the system.
    #[must_use]
    pub fn publish(&self, index: usize, seen: Seen, at: u64) -> bool {
        failpoint("sample-written");
        // ORDERING there: the record is whole before the word names it.
        let order = release_unless("there_relaxed");
        if fault("published_by_store") {
            self.words[index].store(at, order);
            return true;
        }
        if self.words[index].compare_exchange(seen.0, at, order, Ordering::Relaxed).is_err() {
            return false;
        }
        failpoint("sample-published");
        // A table that is cleared gives back what lies below its floor after it has raised the floor. The system
        // orders that with the writing of the record: whichever comes later sees what the other has done.
        fault("cleared_bytes_ignored") || at >= self.floor()
    }

    /// Notes that the sample of an index cannot be kept.
    pub fn refuse(&self, index: usize, seen: Seen) {
        let word = self.tail.load(Ordering::Relaxed) | REFUSED;
        let _ = self.words[index].compare_exchange(seen.0, word, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Forgets a record that was found damaged.
    pub fn forget(&self, index: usize, seen: Seen) {
        let _ = self.words[index].compare_exchange(seen.0, 0, Ordering::Relaxed, Ordering::Relaxed);
    }

    /// Forgets all records. Returns the range of their bytes, which the caller gives back to the system.
    pub fn clear(&self) -> std::ops::Range<u64> {
        // One step further: what was noted at the tail lies below the floor.
        let end = self.tail.fetch_add(ALIGN, Ordering::Relaxed) + ALIGN;
        let start = self.floor.fetch_max(end, Ordering::Relaxed);
        start..end.max(start)
    }

    /// Bytes that are used: records, and what was lost by deaths.
    #[must_use]
    pub fn used(&self) -> u64 {
        self.tail.load(Ordering::Relaxed).saturating_sub(self.floor())
    }

    /// True if a sample had no room since the table was cleared.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.full.load(Ordering::Relaxed) > self.floor()
    }

    /// Records that are there.
    #[must_use]
    pub fn items(&self) -> usize {
        (0..self.words.len()).filter(|&index| matches!(self.look(index).0, State::At(_))).count()
    }

    fn floor(&self) -> u64 {
        if fault("floor_ignored") { 0 } else { self.floor.load(Ordering::Relaxed) }
    }
}
