//! The samples of a dataset, each kept once and read by all processes: a file in memory, or one with a name.
//!
//! | bytes | hold |
//! |---|---|
//! | 0..4096 | the header: magic, format, number of samples, length of the version, XXH3 (64 bits) of these and the version once the file is whole; from 64 on `tail`, `floor` and `full` of the [table](crate::cache); from 128 on hits, from 192 on misses; from 256 on where the tables begin; from 1024 on the version |
//! | from 4096 on | the tables, each at a multiple of 4096, and the records, each at a multiple of 64: see [`record`] |
//!
//! Words are `u64` in the machine's order, so a file of another machine is none. Header and tables are mapped; records
//! are written by system calls. In a file with a name they are believed once their checksum is right. The words of the
//! header that change show a flipped bit by themselves; hits and misses do not, and nothing depends on them.
//!
//! ```text
//! | header | table | record | record | larger table | record | ...      each after all others
//!   mapped   mapped   written by pwrite; read from a mapping (memory) or by pread (a file with a name)
//! ```
//!
//! - **Publishing.** The word of an index says that nothing is kept, where the record begins, or that the sample cannot
//!   be kept. One store of it publishes the record, after `pwrite` has returned. Places are never used again: `clear`
//!   raises the floor, below which words and tables count for nothing, and punches the bytes below it. A reader finds
//!   the record that it began to read, or finds that it was cleared, and never another sample.
//! - **Claims.** The right to make a sample is a lock of the process on the byte of the file whose number is the index,
//!   and an entry in a set of the process for its threads. A claim is tried and never awaited: a thread that does not
//!   get it makes the sample for itself and keeps none, so a dataset may read its own cache. A fork does not inherit
//!   the locks, and they need no open file of their own. Closing any descriptor of the file drops them; then a sample
//!   is made twice, and the second to publish gives its bytes back.
//! - **No SIGBUS.** Header and tables have the blocks of all their pages before they are mapped. A memfd is sealed against shrinking, so
//!   its records may be mapped too: reading a large one by `pread` takes three times as long. A file with a name is
//!   read by `pread`, so that a damaged disk is an error, and the sample is made again.
//! - **A name.** A file is opened under a lock of the open file, which excludes threads too. `tail` is at least the
//!   file's length: after a crash of the machine, the disk may have an older header than its records.
//!
//! # When a process dies
//!
//! | killed | left behind | repaired by |
//! |---|---|---|
//! | while it makes, writes or has written a sample, which no index names | its claim is gone, the bytes are lost | the next that wants the sample makes it; `clear` gives the bytes back |
//! | while it makes a file of samples | a header that says so | the next that opens the file makes it |

#![forbid(unsafe_code)]

mod bound;
mod claim;
mod open;
pub mod record;

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::cache::{FIRST, Seen, State, TABLES, Table, TableMemory};
use crate::error::{Error, Result};
use crate::os::page::page_size;
use crate::os::record_lock;
use crate::os::word_file::WordFile;
use crate::sync::{AtomicU64, Ordering};
use crate::testing::failpoint::failpoint;
use crate::testing::fault::fault;

pub use bound::Bound;
pub use claim::Claim;

const WORD: usize = 8;
/// Bytes of the header, whatever the size of pages: a file with a name outlives the kernel that made it.
const HEADER: u64 = 4096;
const HEADER_WORDS: usize = HEADER as usize / WORD;

/// Words of the header.
mod at {
    pub(super) const MAGIC: usize = 0;
    pub(super) const FORMAT: usize = 1;
    pub(super) const LEN: usize = 2;
    pub(super) const VERSION_BYTES: usize = 3;
    pub(super) const SUM: usize = 4;
    pub(super) const TAIL: usize = 8;
    pub(super) const FLOOR: usize = 9;
    pub(super) const FULL: usize = 10;
    pub(super) const HITS: usize = 16;
    pub(super) const MISSES: usize = 24;
    pub(super) const TABLES: usize = 32;
}

/// Byte of the header where the version begins, and the most bytes that it has.
const VERSION_AT: u64 = 1024;
/// The longest version, in bytes.
pub const LONGEST_VERSION: usize = 2048;

/// The samples of a dataset of a fixed length.
#[derive(Debug)]
pub struct Samples {
    file: WordFile,
    len: usize,
    bound: Bound,
    was_damaged: bool,
}

impl TableMemory for WordFile {
    fn words(&self, at: u64, count: usize) -> Option<&[AtomicU64]> {
        self.words_at(at, count)
    }

    fn make(&self, at: u64, len: u64) -> bool {
        self.make_words(at, len).is_ok()
    }

    fn give_back(&self, at: u64, len: u64) {
        self.punch(at, len);
    }

    fn give_back_below(&self, at: u64, floor: u64) {
        let start = (at / page_size() * page_size()).max(HEADER);
        self.punch(start, floor.saturating_sub(start).min(page_size()));
    }
}

/// A record that the table names, and how long it says to be.
#[derive(Debug)]
pub struct RecordRef {
    index: usize,
    seen: Seen,
    at: u64,
    len: u64,
}

impl RecordRef {
    /// Bytes of the record.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Never true: a record has a header.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

/// The outcome of storing a sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stored {
    /// The sample is there, this record of it or another one.
    There,
    /// There is no room left.
    Full,
    /// The sample is larger than all that the user allows.
    TooLarge,
}

/// Counts over all processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stats {
    /// Samples that are there.
    pub items: u64,
    /// Bytes that they take, with what deaths have lost.
    pub bytes: u64,
    /// The bytes that may be taken.
    pub max_bytes: u64,
    /// Samples that were read.
    pub hits: u64,
    /// Samples that were made.
    pub misses: u64,
    /// True if a sample had no room.
    pub full: bool,
}

impl Samples {
    /// Samples in memory that goes with the last process that has it.
    ///
    /// # Errors
    /// [`Error::Os`] when the system refuses.
    pub fn in_memory(len: usize, bound: Bound) -> Result<Self> {
        let file = WordFile::in_memory("ringloader-samples", HEADER_WORDS)?;
        let header = open::header_of(len, "");
        for (word, value) in file.words().iter().zip(header) {
            word.store(value, Ordering::Relaxed);
        }
        Ok(Self::over(file, len, bound))
    }

    fn over(file: WordFile, len: usize, bound: Bound) -> Self {
        let samples = Self { file, len, bound, was_damaged: false };
        // A machine that stopped may have written records, and not the tail that covers them.
        let end = samples.file.file_len().unwrap_or(0).next_multiple_of(HEADER);
        samples.table().begin(HEADER, end);
        samples.bound.look(samples.table().used(), &samples.file);
        samples
    }

    /// True if the file was found damaged when it was opened, so that all samples are made again.
    #[must_use]
    pub fn was_damaged(&self) -> bool {
        self.was_damaged
    }

    /// Samples that the dataset has.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// True of a dataset without samples.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Looks for the sample of an index. `None`: it is not kept.
    #[must_use]
    pub fn find(&self, index: usize) -> Option<RecordRef> {
        let (State::At(at), seen) = self.table().look(index) else { return None };
        let mut header = [MaybeUninit::uninit(); record::HEADER];
        // An error says nothing of the record, which others may be able to read.
        let header = self.file.read_at(&mut header, at).ok()?;
        let len = record::len(header, index);
        let found = RecordRef { index, seen, at, len: len.unwrap_or(0) };
        let tail = self.table().tail();
        if len.is_none() || at.checked_add(found.len).is_none_or(|end| end > tail) {
            self.forget(&found);
            return None;
        }
        Some(found)
    }

    /// Completes the bytes of a record, of which those after [`record::HEADER`] are there. `last` is where its last
    /// part begins.
    ///
    /// # Panics
    /// When it is shorter than a header.
    pub fn seal(&self, record: &mut [u8], index: usize, last: usize) {
        record::seal(record, index, last, self.is_on_disk());
    }

    /// Reads a record that was found to memory of its length. Returns its bytes, which are all of `into`, and the start
    /// of its last part, as [`seal`](Self::seal) got it. `None`: it was cleared meanwhile, or is damaged, and is not
    /// kept any more; or it cannot be read here.
    #[must_use]
    pub fn read<'a>(&self, found: &RecordRef, into: &'a mut [MaybeUninit<u8>]) -> Option<(&'a [u8], usize)> {
        let bytes = self.file.read_at(into, found.at).ok()?;
        let whole = Some(bytes).filter(|bytes| bytes.len() as u64 == found.len).and_then(|bytes| {
            let last = record::check(bytes, found.index, self.is_on_disk())?;
            Some((&*bytes, last))
        });
        // ORDERING floor: this look comes after the bytes are read.
        let is_there = !self.table().was_cleared(found.at) || fault("cleared_while_read");
        if whole.is_none() || !is_there {
            self.forget(found);
            return None;
        }
        whole
    }

    fn forget(&self, found: &RecordRef) {
        self.table().forget(found.seen);
        if self.table().is_cleared(found.at) {
            // The record was cleared while it was read. Reading a mapping has brought pages back.
            self.file.punch(found.at, found.len);
        }
    }

    /// Tries to become the one who makes the sample of an index and keeps it. `Some(false)`: another process is.
    /// `None`: the sample cannot be kept.
    ///
    /// All threads of a process get it: [`begin`](Self::begin) chooses one of them, which calls
    /// [`release`](Self::release).
    #[must_use]
    pub fn claim(&self, index: usize) -> Option<bool> {
        if !self.is_on_disk() && matches!(self.table().look(index).0, State::Refused) {
            return None;
        }
        Some(self.file.fd().is_ok_and(|fd| record_lock::try_lock(fd, index as u64)))
    }

    /// Lets others claim the index.
    pub fn release(&self, index: usize) {
        if let Ok(fd) = self.file.fd() {
            record_lock::unlock(fd, index as u64);
        }
    }

    /// Keeps a sealed record as that of an index.
    #[must_use]
    pub fn store(&self, index: usize, record: &[u8]) -> Stored {
        let len = record.len() as u64;
        // Even if this is the only record, its table must be there too.
        if self.bound.is_below(len + FIRST) {
            return Stored::TooLarge;
        }
        let Some((state, seen)) = self.table().enter(index, |len| self.allowed(len)) else {
            return Stored::Full;
        };
        if matches!(state, State::At(_)) {
            return Stored::There;
        }
        let Some(at) = self.table().reserve(len, self.allowed(len)) else { return Stored::Full };
        failpoint("sample-reserved");
        if fault("published_before_written") && self.table().publish(seen, at) {
            let _ = self.file.write_at(record, at);
            return Stored::There;
        }
        if self.file.write_at(record, at).is_err() {
            // First gives back the part that was written: once the tail is lower, others write there.
            self.file.punch(at, len);
            self.table().unreserve(at, len);
            self.table().record_full();
            return Stored::Full;
        }
        if !self.table().publish(seen, at) {
            self.file.punch(at, len);
        }
        Stored::There
    }

    fn allowed(&self, len: u64) -> u64 {
        self.bound.allowed(self.table().used(), len, &self.file)
    }

    /// Notes that the sample of an index cannot be kept, or that a kept one cannot be made an object again. A file with
    /// a name does not get that: the next run may have mended the dataset.
    pub fn refuse(&self, index: usize) {
        if self.is_on_disk() {
            return;
        }
        if let Some((_, seen)) = self.table().enter(index, |len| self.allowed(len)) {
            self.table().refuse(seen);
        }
    }

    /// Forgets all samples and gives their memory, or blocks, back.
    ///
    /// # Errors
    /// [`Error::Os`] when the disk does not take it: the samples may be there again after the machine has stopped.
    pub fn clear(&self) -> Result<()> {
        // ORDERING floor: it is raised before the bytes are given back, which is after this.
        let cleared = self.table().clear(self.file.file_len().unwrap_or(0));
        let synced = if self.bound.is_on_disk() { self.file.sync() } else { Ok(()) };
        // The page in which the floor was is given back too, but for the header's.
        let start = (cleared.start / page_size() * page_size()).max(HEADER.next_multiple_of(page_size()));
        self.file.punch(start, cleared.end.saturating_sub(start));
        synced
    }

    /// Counts a sample that was read.
    pub fn count_hit(&self) {
        self.file.words()[at::HITS].fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a sample that is made.
    pub fn count_miss(&self) {
        self.file.words()[at::MISSES].fetch_add(1, Ordering::Relaxed);
    }

    /// Counts over all processes, since the file was made.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let count = |word: usize| self.file.words()[word].load(Ordering::Relaxed);
        let (table, used) = (self.table(), self.table().used());
        Stats {
            items: table.items() as u64,
            bytes: used,
            max_bytes: self.bound.look(used, &self.file),
            hits: count(at::HITS),
            misses: count(at::MISSES),
            full: table.is_full(),
        }
    }

    /// Returns the descriptor that another process needs for [`attach`](Self::attach).
    ///
    /// # Errors
    /// [`Error::Os`] when other code has closed it by its number.
    pub fn fd(&self) -> Result<BorrowedFd<'_>> {
        self.file.fd()
    }

    /// Device and number of the file.
    #[must_use]
    pub fn inode(&self) -> (u64, u64) {
        self.file.inode()
    }

    /// True if the samples lie in a file with a name, whose bytes may have to come from a disk.
    #[must_use]
    pub fn is_on_disk(&self) -> bool {
        self.bound.is_on_disk()
    }

    fn table(&self) -> Table<'_, WordFile> {
        let words = self.file.words();
        Table {
            tail: &words[at::TAIL],
            floor: &words[at::FLOOR],
            full: &words[at::FULL],
            tables: &words[at::TABLES..at::TABLES + TABLES],
            room: &self.file,
        }
    }
}

#[cfg(test)]
mod tests;
