//! A file in memory of which the first words are mapped as atomics. Bytes after them are written by system calls, and
//! read from mappings.
//!
//! INVARIANT: `base .. base + 8 * count` is one shared mapping of a memfd that is sealed against shrinking, and has that
//! many bytes, for as long as the `WordFile` lives.

use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::SealFlags;
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use super::mappings::{Mappings, map};
use super::shared_file::SharedFile;
use crate::error::{Error, Result};
use crate::sync::AtomicU64;

/// Such a file.
#[derive(Debug)]
pub struct WordFile {
    base: NonNull<AtomicU64>,
    count: usize,
    file: SharedFile,
    mappings: Mappings,
}

// SAFETY: shared memory has no thread of its own; all of it that is referred to is atomic.
unsafe impl Send for WordFile {}
// SAFETY: as for `Send`.
unsafe impl Sync for WordFile {}

impl WordFile {
    /// Makes `count` words of zero, none of them resident.
    ///
    /// # Errors
    /// [`Error::Os`] when the system refuses.
    pub fn in_memory(name: &str, count: usize) -> Result<Self> {
        let file = SharedFile::new(super::memfd(name)?)?;
        let len =
            count.checked_mul(size_of::<AtomicU64>()).ok_or_else(|| Error::os("ftruncate", Errno::FBIG))?;
        file.truncate(len as u64)?;
        rustix::fs::fcntl_add_seals(file.fd()?, SealFlags::SHRINK)
            .map_err(|errno| Error::os("sealing the memfd", errno))?;
        Self::over(file, count)
    }

    /// Maps the first `count` words of the memory of another process.
    ///
    /// # Errors
    /// [`Error::Corrupt`] when it has fewer, or can shrink, [`Error::Os`] when the system refuses.
    pub fn map(fd: OwnedFd, count: usize) -> Result<Self> {
        let file = SharedFile::new(fd)?;
        let seals = rustix::fs::fcntl_get_seals(file.fd()?).unwrap_or(SealFlags::empty());
        let len = file.size()?;
        if !seals.contains(SealFlags::SHRINK) || (count as u64).checked_mul(8).is_none_or(|end| end > len) {
            return Err(Error::Corrupt(format!("the descriptor is no sealed memory of {count} words")));
        }
        Self::over(file, count)
    }

    fn over(file: SharedFile, count: usize) -> Result<Self> {
        let (len, protection) = (count * size_of::<AtomicU64>(), ProtFlags::READ | ProtFlags::WRITE);
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        let base = map(file.fd()?, 0, len, protection, flags)?.cast();
        Ok(Self { base, count, file, mappings: Mappings::new() })
    }

    /// The words. Other processes may change any of them at any time.
    #[must_use]
    #[inline]
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: mapped while `self` lives, at the start of a page; every value of an atomic is valid.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.count) }
    }

    /// The file. Its bytes after the words may be written.
    #[must_use]
    pub fn file(&self) -> &SharedFile {
        &self.file
    }

    /// Returns the descriptor that another process needs to [`map`](Self::map) the file.
    ///
    /// # Errors
    /// [`Error::Os`] when other code has closed it by its number.
    pub fn fd(&self) -> Result<BorrowedFd<'_>> {
        self.file.fd()
    }

    /// Reads bytes from `at` on, and returns them; fewer at the end of the file.
    ///
    /// # Errors
    /// [`Error::Os`] when other code has closed the descriptor and the bytes were not mapped before.
    pub fn read_at<'a>(&self, into: &'a mut [MaybeUninit<u8>], at: u64) -> Result<&'a mut [u8]> {
        if self.file.had(at, into.len() as u64)?
            // SAFETY: the file is at least so long, and is sealed; `fd` is that file's, or there is no mapping yet and
            // an error.
            && unsafe { self.mappings.copy_out(|| self.file.fd(), into, at) }
        {
            // SAFETY: all of it was written.
            return Ok(unsafe { std::slice::from_raw_parts_mut(into.as_mut_ptr().cast(), into.len()) });
        }
        self.file.read_at(into, at)
    }
}

impl Drop for WordFile {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and references into it borrow `self`.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.count * size_of::<AtomicU64>()) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::Ordering;

    #[test]
    fn words_and_bytes_are_shared() {
        let one = WordFile::in_memory("test", 600).unwrap();
        let fd = || one.file().fd().unwrap().try_clone_to_owned().unwrap();
        let other = WordFile::map(fd(), 600).unwrap();
        one.words()[599].store(7, Ordering::Relaxed);
        assert_eq!(other.words()[599].load(Ordering::Relaxed), 7);
        one.file().write_at(b"sample", 8192).unwrap();
        let mut into = [MaybeUninit::uninit(); 6];
        assert_eq!(other.read_at(&mut into, 8192).unwrap(), b"sample");
        assert_eq!(other.read_at(&mut into, 8194).unwrap(), b"mple");
        assert!(matches!(WordFile::map(fd(), 1 << 20), Err(Error::Corrupt(_))), "it is shorter");
        assert!(matches!(WordFile::map(crate::os::memfd("test").unwrap(), 0), Err(Error::Corrupt(_))));
        assert!(one.file().truncate(8).is_err(), "it cannot shrink");
    }
}
