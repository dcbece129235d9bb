//! Samples in a file with a name, or of another process.
//!
//! The first process that opens a file makes it. The others wait for a lock, which the death of the first frees. The magic is written
//! first and the header's sum last: a file that was left in between is made again.

use twox_hash::XxHash3_64;

use super::*;
use crate::os::record_lock::Making;
use crate::os::word_file;

pub(super) const MAGIC: u64 = u64::from_le_bytes(*b"RLsample");
pub(super) const FORMAT: u64 = 2;

/// The words of a header that never change: up to [`at::SUM`].
type Words = [u64; at::SUM + 1];

impl Samples {
    /// Opens the samples of a dataset of `len` and `version`, for which the file was opened by its name; makes the file
    /// if it is empty.
    ///
    /// # Errors
    /// [`Error::Config`] when it is none of ours, or holds those of another dataset, [`Error::Os`] when the system
    /// refuses.
    pub fn open(fd: OwnedFd, len: usize, version: &str, bound: Bound) -> Result<Self> {
        if !word_file::is_regular(&fd)? {
            return Err(Error::Config("it is no regular file".into()));
        }
        {
            let _making = Making::wait(&fd)?;
            match header(&fd)? {
                Some(found) if found[at::SUM] != 0 => check(&fd, &found, len, version)?,
                Some(_) | None => make(&fd, len, version)?,
            }
        }
        let file = WordFile::map(fd, HEADER_WORDS).map_err(cut_off)?;
        let mut samples = Self { file, len, bound, was_damaged: false };
        samples.was_damaged = !samples.table().is_whole(|| samples.file.file_len().unwrap_or(0));
        if samples.was_damaged {
            // Two who find that clear twice, which loses what the first has made in between.
            samples.clear()?;
        }
        let Self { file, len, bound, was_damaged } = samples;
        Ok(Self { was_damaged, ..Self::over(file, len, bound) })
    }

    /// Shares the samples of another process, by its descriptor.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn attach(fd: OwnedFd, bound: Bound) -> Result<Self> {
        let Some([.., len, _, _]) = header(&fd)?.filter(|header| header[at::SUM] != 0) else {
            return Err(Error::Corrupt("the descriptor is no whole file of samples".into()));
        };
        let len = usize::try_from(len).map_err(|_| Error::Corrupt(format!("{len} samples")))?;
        Ok(Self::over(WordFile::map(fd, HEADER_WORDS)?, len, bound))
    }
}

/// The header of new samples.
pub(super) fn header_of(len: usize, version: &str) -> Words {
    let mut words = [MAGIC, FORMAT, len as u64, version.len() as u64, 0];
    words[at::SUM] = sum(&words, version.as_bytes());
    words
}

/// The sum of a header, which is not zero.
fn sum(header: &Words, version: &[u8]) -> u64 {
    let mut bytes = header[..at::SUM].iter().flat_map(|word| word.to_ne_bytes()).collect::<Vec<u8>>();
    bytes.extend_from_slice(version);
    XxHash3_64::oneshot(&bytes).max(1)
}

/// The header of a file that is there; `None` of an empty file.
fn header(fd: &OwnedFd) -> Result<Option<Words>> {
    let mut bytes = [0; size_of::<Words>()];
    let read = word_file::read_at(fd, &mut bytes, 0)?;
    let words: Words =
        std::array::from_fn(|word| u64::from_ne_bytes(std::array::from_fn(|byte| bytes[word * WORD + byte])));
    match (read, words[at::MAGIC], words[at::FORMAT]) {
        (0, ..) => Ok(None),
        (_, MAGIC, FORMAT) => Ok(Some(words)),
        (_, MAGIC, other) => {
            Err(Error::Config(format!("it has format {other}, of another version of ringloader; remove it")))
        }
        _ => Err(Error::Config("it is no file of cached samples; pass another path".into())),
    }
}

/// Makes an empty file, or one that was left half-made, a whole one.
fn make(fd: &OwnedFd, len: usize, version: &str) -> Result<()> {
    let made = (|| {
        word_file::empty(fd)?;
        let header = header_of(len, version);
        word_file::write_at(
            fd.as_fd(),
            &header[..at::SUM].iter().flat_map(|word| word.to_ne_bytes()).collect::<Vec<_>>(),
            0,
        )?;
        failpoint("samples-half-made");
        word_file::allocate(fd, 0, HEADER)?;
        word_file::write_at(fd.as_fd(), version.as_bytes(), VERSION_AT)?;
        word_file::write_at(fd.as_fd(), &header[at::SUM].to_ne_bytes(), (at::SUM * WORD) as u64)
    })();
    if made.is_err() {
        // A disk without room for the header: nothing is left on it.
        let _ = word_file::empty(fd);
    }
    made
}

/// Compares what a file holds with the dataset.
fn check(fd: &OwnedFd, header: &Words, len: usize, version: &str) -> Result<()> {
    let mut text = [0; LONGEST_VERSION];
    let bytes = text.len().min(header[at::VERSION_BYTES] as usize);
    let read = word_file::read_at(fd, &mut text[..bytes], VERSION_AT)?;
    if header[at::SUM] != sum(header, &text[..read]) {
        return Err(Error::Config("its header is damaged; remove it".into()));
    }
    let theirs = String::from_utf8_lossy(&text[..read]);
    if (header[at::LEN], &*theirs) == (len as u64, version) {
        return Ok(());
    }
    Err(Error::Config(format!(
        "it holds samples of version {theirs:?} of a dataset of length {}, and this is version {version:?} of length \
         {len}; pass the version of the file, or another path, or remove the file",
        header[at::LEN]
    )))
}

fn cut_off(error: Error) -> Error {
    match error {
        Error::Corrupt(what) => Error::Config(format!("it was cut off: {what}; remove it")),
        other => other,
    }
}
