//! The samples of a dataset, each kept once and read by all processes: in memory, or in a file with a name.
//!
//! Memory is one memfd: words that all have, the [table](crate::cache) with a word for each sample of the dataset, and
//! the records, each at a multiple of 64 (see [`record`]). A page of it exists once something was written to it. With
//! a file that has a name, only the first words lie in memory.
//!
//! ```text
//! | words | table | record | record | lost | record | ...      each record after all others
//!   mapped   mapped   written by pwrite; read from a mapping
//! ```
//!
//! - **Publishing.** The word of an index says that nothing is kept, or where the record begins. One store of it
//!   publishes the record, after `pwrite` has returned. In memory, places are never used again: `clear` raises the
//!   floor, below which words count for nothing, and punches the bytes below it. A reader finds the record that it
//!   began to read, or finds that it was cleared, and never another sample.
//! - **Nobody claims a sample.** Two that want one at the same moment both make it, and one record of it is found. So
//!   nobody waits, and a dataset may read its own cache.
//! - **No SIGBUS.** The memfd is sealed against shrinking, so it may be mapped: reading a large record by `pread` takes
//!   three times as long. Nothing of a file with a name is mapped.
//!
//! # When a process dies
//!
//! | killed | left behind | repaired by |
//! |---|---|---|
//! | while it writes or has written a sample, which no index names | the bytes are lost | `clear` gives them back |
//! | while it makes a file of samples | a header that says so | the next that opens the file makes it |

#![forbid(unsafe_code)]

mod bound;
mod named;
pub mod record;

use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};

use self::named::NamedFile;
use crate::cache::Table;
use crate::error::{Error, Result};
use crate::number::usize_from;
use crate::os::page::page_size;
use crate::os::shared_file::SharedFile;
use crate::os::word_file::WordFile;
use crate::sync::{AtomicU64, Ordering};
use crate::testing::failpoint::failpoint;
use crate::testing::fault::fault;

pub use bound::Bound;
pub use named::LONGEST_VERSION;

const WORD: usize = 8;

/// Words that all processes have. Each that changes often has a cache line of its own.
mod at {
    pub(super) const TAIL: usize = 0;
    pub(super) const FLOOR: usize = 16;
    /// 1 if a sample had no room since all were forgotten.
    pub(super) const FULL: usize = 32;
    pub(super) const HITS: usize = 48;
    pub(super) const MISSES: usize = 64;
    /// The first word of the table.
    pub(super) const TABLE: usize = 512;
}

/// The samples of a dataset of a fixed length.
#[derive(Debug)]
pub struct Samples {
    memory: WordFile,
    named: Option<NamedFile>,
    len: usize,
    bound: Bound,
}

/// A record that an index names, and how long it says to be.
#[derive(Debug)]
pub struct RecordRef {
    index: usize,
    at: u64,
    len: u64,
}

impl RecordRef {
    /// Bytes of the record.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len
    }
}

/// The outcome of storing a sample.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stored {
    /// The sample exists, this record of it or another one.
    There,
    /// There is no room left.
    Full,
    /// The sample is larger than all that the user allows.
    TooLarge,
}

/// Counts over all processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stats {
    /// Samples that exist.
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
        let memory = WordFile::in_memory("ringloader-samples", words_of(len)?, true)?;
        let start = records_of_memory(len);
        memory.words()[at::TAIL].store(start, Ordering::Relaxed);
        memory.words()[at::FLOOR].store(start, Ordering::Relaxed);
        Ok(Self::over(memory, None, len, bound))
    }

    /// Opens the samples of a dataset of `len` and `version`, for which the file was opened by its name; makes the file
    /// if it is empty.
    ///
    /// # Errors
    /// [`Error::Config`] when it is none of ours, or holds those of another dataset, [`Error::Os`] when the system
    /// refuses.
    pub fn open(fd: OwnedFd, len: usize, version: &str, bound: Bound) -> Result<Self> {
        let named = NamedFile::open(fd, len, version)?;
        let memory = WordFile::in_memory("ringloader-samples", at::TABLE, false)?;
        Ok(Self::over(memory, Some(named), len, bound))
    }

    /// Shares the samples of another process, by the descriptors of its memory and of its file, and the file's version.
    ///
    /// # Errors
    /// [`Error::Corrupt`] when the memory is another one, [`Error::Os`] when the system refuses.
    pub fn attach(memory: OwnedFd, named: Option<(OwnedFd, &str)>, len: usize, bound: Bound) -> Result<Self> {
        let words = if named.is_some() { at::TABLE } else { words_of(len)? };
        let memory = WordFile::map(memory, words, named.is_none())?;
        let named = named.map(|(fd, version)| NamedFile::attach(fd, len, version)).transpose()?;
        Ok(Self::over(memory, named, len, bound))
    }

    fn over(memory: WordFile, named: Option<NamedFile>, len: usize, bound: Bound) -> Self {
        let samples = Self { memory, named, len, bound };
        samples.bound.look(samples.used(), samples.named.as_ref().map(NamedFile::file));
        samples
    }

    /// Samples that the dataset has.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Looks for the sample of an index. `None`: it is not kept.
    #[must_use]
    pub fn find(&self, index: usize) -> Option<RecordRef> {
        let at = match &self.named {
            Some(named) => named.look(index)?,
            None => self.table().look(index)?,
        };
        let mut header = [MaybeUninit::uninit(); record::HEADER];
        // An error says nothing of the record, which others may be able to read.
        let header = self.read_at(&mut header, at).ok()?;
        let len = record::len(header, index);
        let found = len.filter(|&len| self.file().had(at, len).unwrap_or(false));
        if found.is_none() {
            self.forget(index, at);
        }
        found.map(|len| RecordRef { index, at, len })
    }

    fn read_at<'a>(&self, into: &'a mut [MaybeUninit<u8>], at: u64) -> Result<&'a mut [u8]> {
        match &self.named {
            Some(named) => named.file().read_at(into, at),
            None => self.memory.read_at(into, at),
        }
    }

    /// Completes the bytes of a record, of which those after [`record::HEADER`] are written. `last` is where its last
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
        let bytes = self.read_at(into, found.at).ok()?;
        let whole = Some(bytes).filter(|bytes| bytes.len() as u64 == found.len).and_then(|bytes| {
            let last = record::check(bytes, found.index, self.is_on_disk())?;
            Some((&*bytes, last))
        });
        // ORDERING floor: this look comes after the bytes are read.
        if self.table().was_cleared(found.at) && !fault("cleared_while_read") {
            // Reading a mapping has brought pages back.
            self.memory.file().punch(found.at, found.len);
            return None;
        }
        if whole.is_none() {
            self.forget(found.index, found.at);
        }
        whole
    }

    fn forget(&self, index: usize, at: u64) {
        if let Some(named) = &self.named {
            named.forget(index, at);
        }
    }

    /// Keeps a sealed record as that of an index.
    #[must_use]
    pub fn store(&self, index: usize, record: &[u8]) -> Stored {
        let len = record.len() as u64;
        if self.bound.is_below(len) {
            return Stored::TooLarge;
        }
        let stored = match &self.named {
            Some(named) => named.store(index, record, |used| self.allowed(used, len)),
            None => self.store_in_memory(index, record),
        };
        if stored == Stored::Full {
            self.word(at::FULL).store(1, Ordering::Relaxed);
        }
        stored
    }

    fn store_in_memory(&self, index: usize, record: &[u8]) -> Stored {
        let (table, file, len) = (self.table(), self.memory.file(), record.len() as u64);
        if table.look(index).is_some() {
            return Stored::There;
        }
        let Some(at) = table.reserve(len, self.allowed(table.used(), len)) else { return Stored::Full };
        failpoint("sample-reserved");
        if fault("published_before_written") {
            table.publish(index, at);
        }
        if file.write_at(record, at).is_err() {
            // The part for which there was room.
            file.punch(at, len);
            return Stored::Full;
        }
        table.publish(index, at);
        Stored::There
    }

    fn allowed(&self, used: u64, len: u64) -> u64 {
        self.bound.allowed(used, len, self.named.as_ref().map(NamedFile::file))
    }

    /// Forgets all samples and gives their memory, or blocks, back.
    ///
    /// # Errors
    /// [`Error::Os`] when the disk does not take it: the samples may be there again after the machine has stopped.
    pub fn clear(&self) -> Result<()> {
        self.word(at::FULL).store(0, Ordering::Relaxed);
        if let Some(named) = &self.named {
            return named.clear();
        }
        // ORDERING floor: it is raised before the bytes are given back, which is after this.
        let end = self.table().clear();
        let start = records_of_memory(self.len);
        self.memory.file().punch(start, end - start);
        Ok(())
    }

    /// Counts a sample that was read.
    pub fn count_hit(&self) {
        self.word(at::HITS).fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a sample that is made.
    pub fn count_miss(&self) {
        self.word(at::MISSES).fetch_add(1, Ordering::Relaxed);
    }

    /// Counts over all processes that share the samples, and not just the file.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let count = |number: usize| self.word(number).load(Ordering::Relaxed);
        let used = self.used();
        Stats {
            items: self.items(),
            bytes: used,
            max_bytes: self.bound.look(used, self.named.as_ref().map(NamedFile::file)),
            hits: count(at::HITS),
            misses: count(at::MISSES),
            full: count(at::FULL) != 0,
        }
    }

    fn used(&self) -> u64 {
        self.named.as_ref().map_or_else(|| self.table().used(), NamedFile::used)
    }

    /// Records that are named. Reads no mapping: what was never written would become memory.
    fn items(&self) -> u64 {
        let mut buffer = vec![MaybeUninit::uninit(); 1 << 20];
        let floor = self.word(at::FLOOR).load(Ordering::Relaxed).max(1);
        let words = [at::TABLE, at::TABLE + self.len].map(|word| (word * WORD) as u64);
        let (mut at, mut count) = (self.file().next_data(words[0]), 0);
        while at < words[1] {
            let len = buffer.len().min(usize_from(words[1] - at));
            let words = self.file().read_at(&mut buffer[..len], at).unwrap_or_default();
            count += words.as_chunks().0.iter().filter(|&&word| u64::from_ne_bytes(word) >= floor).count();
            at = self.file().next_data(at + len as u64);
        }
        count as u64
    }

    /// Returns the file of the records: memory, or that with a name.
    #[must_use]
    pub fn file(&self) -> &SharedFile {
        self.named.as_ref().map_or(self.memory.file(), NamedFile::file)
    }

    /// Returns the descriptors that another process needs for [`attach`](Self::attach): of the memory, and of a file with
    /// a name.
    ///
    /// # Errors
    /// [`Error::Os`] when other code has closed one by its number.
    pub fn fds(&self) -> Result<(BorrowedFd<'_>, Option<BorrowedFd<'_>>)> {
        let named = self.named.as_ref().map(|named| named.file().fd()).transpose()?;
        Ok((self.memory.file().fd()?, named))
    }

    /// The version of a file with a name.
    #[must_use]
    pub fn version(&self) -> Option<&str> {
        self.named.as_ref().map(NamedFile::version)
    }

    /// True if the samples lie in a file with a name, whose bytes may have to come from a disk.
    #[must_use]
    pub fn is_on_disk(&self) -> bool {
        self.named.is_some()
    }

    fn word(&self, number: usize) -> &AtomicU64 {
        &self.memory.words()[number]
    }

    fn table(&self) -> Table<'_> {
        Table {
            tail: self.word(at::TAIL),
            floor: self.word(at::FLOOR),
            words: &self.memory.words()[at::TABLE..],
        }
    }
}

/// The words of samples in memory.
fn words_of(len: usize) -> Result<usize> {
    let most = usize::MAX / 2 / WORD;
    len.checked_add(at::TABLE).filter(|&words| words <= most).ok_or(Error::allocation(len as u64))
}

/// The start of the records in memory.
fn records_of_memory(len: usize) -> u64 {
    ((at::TABLE + len) as u64 * WORD as u64).next_multiple_of(page_size())
}

#[cfg(test)]
mod tests;
