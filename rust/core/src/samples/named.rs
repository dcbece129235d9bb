//! Samples in a file with a name, which several programs may have open.
//!
//! | bytes | hold |
//! |---|---|
//! | 0..4096 | the header: magic, format, number of samples, length of the version, XXH3 (64 bits) of these and the version once the file is whole; from 1024 on the version |
//! | from 4096 on | a word for each sample: where its record begins, or zero. Those of samples that were never kept are a hole |
//! | from the next multiple of 4096 on | the records, each at a multiple of 64, and each after all others |
//!
//! Words are `u64` in the machine's order, so a file of another machine is none.
//!
//! System calls read and write all of it: a file that was cut off, or a damaged disk, gives an error or fewer bytes, and
//! no signal. What is read is believed once the record's sum is right, whatever its word says, so nothing orders a
//! reader with those who write. Who writes has a lock of the process, and excludes its other threads. Closing any
//! descriptor of the file drops that lock; then two records may lie over each other, which their sums show.
//!
//! A file that is opened is made first by one process; the others wait for a lock of the open file, which the death of
//! the first frees. The magic is written first and the header's sum last: a file that was left in between is made again.

use std::mem::offset_of;
use std::sync::MutexGuard;

use rustix::io::Errno;
use twox_hash::XxHash3_64;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::*;
use crate::number::usize_from;
use crate::os::record_lock::Held;
use crate::os::shared_file::SharedFile;
use crate::process::{self, Leaked, Process};
use crate::sync::Lock;

const MAGIC: u64 = u64::from_le_bytes(*b"RLsample");
const FORMAT: u64 = 4;
/// Bytes of the header, and what the records begin at a multiple of, whatever the size of pages: a file with a name
/// outlives the kernel that made it.
const HEADER: u64 = 4096;
/// Byte of the header where the version begins, and the most bytes that it has.
const VERSION_AT: usize = 1024;
/// The longest version, in bytes.
pub const LONGEST_VERSION: usize = 2048;

/// The first words of a file, in this machine's order. A file that was left half-made has no sum.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
struct Header {
    magic: u64,
    format: u64,
    len: u64,
    version_bytes: u64,
    sum: u64,
}

/// The place of the sum.
const SUM: usize = offset_of!(Header, sum);

/// The file of a dataset of `len` samples and a version.
#[derive(Debug)]
pub(super) struct NamedFile {
    file: SharedFile,
    len: usize,
    version: String,
    /// The start of the records.
    start: u64,
}

/// The right to write to the file: no other thread and no other process has it.
struct Adding<'a> {
    // Fields are dropped in this order.
    _lock: Held<'a>,
    _thread: MutexGuard<'static, ()>,
    /// Bytes of the file.
    end: u64,
}

/// The turn of this process's threads: a lock on a file is all threads'.
///
/// INVARIANT: a thread of another process is never waited for. A forked child finds its parent's turn, which a thread may
/// have had at the fork, and moves to one of its own.
#[derive(Debug)]
struct Adders {
    process: &'static Process,
    turn: Lock<()>,
}

impl Adders {
    fn current() -> &'static Self {
        static LAST: Leaked<Adders> = Leaked::none();
        loop {
            let seen = LAST.get();
            match seen.filter(|adders| adders.process.is_current()) {
                Some(adders) => return adders,
                None => LAST.replace(seen, Self { process: process::current(), turn: Lock::default() }),
            };
        }
    }
}

impl NamedFile {
    /// Takes a file that another process has opened.
    pub(super) fn attach(fd: OwnedFd, len: usize, version: &str) -> Result<Self> {
        let start = (len as u64).checked_mul(WORD as u64).and_then(|words| words.checked_add(2 * HEADER));
        let start = start.ok_or_else(|| Error::os("a file of so many samples", Errno::FBIG))? - 1;
        let start = start / HEADER * HEADER;
        Ok(Self { file: SharedFile::new(fd)?, len, version: version.into(), start })
    }

    /// Opens a file; makes it if it is empty.
    pub(super) fn open(fd: OwnedFd, len: usize, version: &str) -> Result<Self> {
        let named = Self::attach(fd, len, version)?;
        if !named.file.is_regular()? {
            return Err(Error::Config("it is no regular file".into()));
        }
        {
            let fd = named.file.fd()?;
            let _making = Held::making(&fd)?;
            match named.header()? {
                Some(found) if found.sum != 0 => named.check(&found)?,
                Some(_) | None => named.make()?,
            }
        }
        Ok(named)
    }

    pub(super) fn file(&self) -> &SharedFile {
        &self.file
    }

    pub(super) fn version(&self) -> &str {
        &self.version
    }

    /// Returns where the record of an index begins, if one is named.
    pub(super) fn look(&self, index: usize) -> Option<u64> {
        let at = self.word(index).filter(|&at| at != 0)?;
        if at < self.start {
            self.forget(index, at);
            return None;
        }
        Some(at)
    }

    /// Forgets a record that is none, if it is named still.
    pub(super) fn forget(&self, index: usize, at: u64) {
        if let Ok(_adding) = self.adding()
            && self.word(index) == Some(at)
        {
            let _ = self.name(index, 0);
        }
    }

    /// Adds a record, unless one is named for the index. `allowed` gets the bytes that are used, and returns how many may
    /// be.
    pub(super) fn store(&self, index: usize, record: &[u8], allowed: impl Fn(u64) -> u64) -> Stored {
        let Ok(Adding { _lock, _thread, end }) = self.adding() else { return Stored::Full };
        if self.word(index).is_some_and(|at| at != 0) {
            return Stored::There;
        }
        let at = end.max(self.start).next_multiple_of(record::ALIGN);
        let used = at - self.start;
        if used + record.len() as u64 > allowed(used) {
            return Stored::Full;
        }
        let stored = self.file.write_at(record, at).and_then(|()| {
            failpoint("sample-written");
            self.name(index, at)
        });
        match stored {
            Ok(()) => {
                failpoint("sample-published");
                Stored::There
            }
            Err(_) => {
                // The part for which there was room.
                let _ = self.file.truncate(end);
                Stored::Full
            }
        }
    }

    /// Forgets all samples, and gives their blocks back.
    pub(super) fn clear(&self) -> Result<()> {
        let _adding = self.adding()?;
        self.file.truncate(HEADER)?;
        self.file.sync()
    }

    /// Bytes of records, with what was lost by deaths.
    pub(super) fn used(&self) -> u64 {
        self.file.size().map_or(0, |len| len.saturating_sub(self.start))
    }

    fn word(&self, index: usize) -> Option<u64> {
        let mut word = [MaybeUninit::uninit(); WORD];
        let word = self.file.read_at(&mut word, self.word_at(index)).ok()?;
        Some(u64::from_ne_bytes(<[u8; WORD]>::try_from(&*word).ok()?))
    }

    fn name(&self, index: usize, at: u64) -> Result<()> {
        self.file.write_at(&at.to_ne_bytes(), self.word_at(index))
    }

    fn word_at(&self, index: usize) -> u64 {
        HEADER + (index * WORD) as u64
    }

    /// Waits for the right to write. Somebody may have cut the file off: then its header is written again.
    fn adding(&self) -> Result<Adding<'_>> {
        let thread = Adders::current().turn.lock();
        let fd = self.file.fd()?;
        let lock = Held::adding(fd);
        let mut end = self.file.size()?;
        // The file may have been cut off while this process wrote to its end.
        if end < HEADER || self.read_header()?.1 == Header::default() {
            let _making = Held::making(&fd)?;
            self.make()?;
            end = HEADER;
        }
        Ok(Adding { _lock: lock, _thread: thread, end })
    }

    /// Makes an empty file, or one that was left half-made, a whole one.
    fn make(&self) -> Result<()> {
        let made = (|| {
            let whole = self.whole_header();
            let mut header = vec![0; usize_from(HEADER)];
            header[..SUM].copy_from_slice(&whole.as_bytes()[..SUM]);
            header[VERSION_AT..VERSION_AT + self.version.len()].copy_from_slice(self.version.as_bytes());
            self.file.truncate(0)?;
            self.file.write_at(&header, 0)?;
            failpoint("samples-half-made");
            self.file.write_at(whole.sum.as_bytes(), SUM as u64)
        })();
        if made.is_err() {
            // A disk without room for the header: nothing is left on it.
            let _ = self.file.truncate(0);
        }
        made
    }

    fn whole_header(&self) -> Header {
        let (len, version_bytes) = (self.len as u64, self.version.len() as u64);
        let header = Header { magic: MAGIC, format: FORMAT, len, version_bytes, sum: 0 };
        Header { sum: sum(&header, self.version.as_bytes()), ..header }
    }

    /// The header of an existing file; `None` of an empty file.
    fn header(&self) -> Result<Option<Header>> {
        let (read, header) = self.read_header()?;
        match (read, header.magic, header.format) {
            (0, ..) => Ok(None),
            (_, MAGIC, FORMAT) => Ok(Some(header)),
            (_, MAGIC, other) => Err(Error::Config(format!(
                "it has format {other}, of another version of ringloader; remove it"
            ))),
            _ => Err(Error::Config("it is no file of cached samples; pass another path".into())),
        }
    }

    /// The bytes of the header that there are, and the header.
    fn read_header(&self) -> Result<(usize, Header)> {
        let mut bytes = [MaybeUninit::uninit(); size_of::<Header>()];
        let read = self.file.read_at(&mut bytes, 0)?;
        let mut header = Header::default();
        header.as_mut_bytes()[..read.len()].copy_from_slice(read);
        Ok((read.len(), header))
    }

    /// Compares what a file holds with the dataset.
    fn check(&self, header: &Header) -> Result<()> {
        let mut text = [MaybeUninit::uninit(); LONGEST_VERSION];
        let bytes = text.len().min(usize_from(header.version_bytes));
        let text = self.file.read_at(&mut text[..bytes], VERSION_AT as u64)?;
        if header.sum != sum(header, text) {
            return Err(Error::Config("its header is damaged; remove it".into()));
        }
        let theirs = String::from_utf8_lossy(text);
        if (header.len, &*theirs) == (self.len as u64, &*self.version) {
            return Ok(());
        }
        Err(Error::Config(format!(
            "it holds samples of version {theirs:?} of a dataset of length {}, and this is version {:?} of length {}; \
             pass the version of the file, or another path, or remove the file",
            header.len, self.version, self.len
        )))
    }
}

/// The sum of a header, which is not zero.
fn sum(header: &Header, version: &[u8]) -> u64 {
    XxHash3_64::oneshot(&[&header.as_bytes()[..SUM], version].concat()).max(1)
}
