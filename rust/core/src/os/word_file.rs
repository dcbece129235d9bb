//! A file in memory of which the first words are mapped as atomics. Bytes after them are written by system calls, and
//! may be mapped to be read: by system calls, which look every page up, that takes three times as long. Mapped memory
//! that was read counts as each reader's own in what the system says of a process, though it exists once.
//!
//! INVARIANT: `base .. base + mapped` is one shared mapping of a memfd that is sealed against shrinking, and has
//! `8 * count <= mapped` bytes, for as long as the `WordFile` lives. Bytes after the words are read only where the file
//! has them, so no access raises SIGBUS.

use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::SealFlags;
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use super::mapping::map;
use super::memory::address_space_left;
use super::shared_file::SharedFile;
use crate::error::{Error, Result};
use crate::number::usize_from;
use crate::sync::AtomicU64;

/// Such a file.
#[derive(Debug)]
pub struct WordFile {
    base: NonNull<AtomicU64>,
    count: usize,
    mapped: usize,
    file: SharedFile,
}

/// Bytes of address space that are tried for what follows the words. What cannot be mapped is read by system calls.
const FURTHER: [usize; 3] = [1 << 42, 1 << 38, 1 << 34];

// SAFETY: shared memory has no thread of its own; all of it that is referred to is atomic.
unsafe impl Send for WordFile {}
// SAFETY: as for `Send`.
unsafe impl Sync for WordFile {}

impl WordFile {
    /// Makes `count` words of zero, none of them resident. Maps what follows them, too, if `is_read`.
    ///
    /// # Errors
    /// [`Error::Os`] when the system refuses.
    pub fn in_memory(name: &str, count: usize, is_read: bool) -> Result<Self> {
        let file = SharedFile::new(super::memfd(name)?)?;
        let len =
            count.checked_mul(size_of::<AtomicU64>()).ok_or_else(|| Error::os("ftruncate", Errno::FBIG))?;
        file.truncate(len as u64)?;
        rustix::fs::fcntl_add_seals(file.fd()?, SealFlags::SHRINK)
            .map_err(|errno| Error::os("sealing the memfd", errno))?;
        Self::over(file, count, is_read)
    }

    /// Maps the first `count` words of the memory of another process, and what follows them, if `is_read`.
    ///
    /// # Errors
    /// [`Error::Corrupt`] when it has fewer, or can shrink, [`Error::Os`] when the system refuses.
    pub fn map(fd: OwnedFd, count: usize, is_read: bool) -> Result<Self> {
        let file = SharedFile::new(fd)?;
        let seals = rustix::fs::fcntl_get_seals(file.fd()?).unwrap_or(SealFlags::empty());
        let len = file.size()?;
        if !seals.contains(SealFlags::SHRINK) || (count as u64).checked_mul(8).is_none_or(|end| end > len) {
            return Err(Error::Corrupt(format!("the descriptor is no sealed memory of {count} words")));
        }
        Self::over(file, count, is_read)
    }

    fn over(file: SharedFile, count: usize, is_read: bool) -> Result<Self> {
        let words = count * size_of::<AtomicU64>();
        let mapped = |further| {
            let (len, flags) = (words.saturating_add(further), MapFlags::SHARED | MapFlags::NORESERVE);
            Ok((map(file.fd()?, 0, len, ProtFlags::READ | ProtFlags::WRITE, flags)?.cast(), len))
        };
        // A bound of the address space would be filled by what is hardly used.
        let further = if is_read && address_space_left().is_none() { &FURTHER[..] } else { &[] };
        let all = further.iter().find_map(|&further| mapped(further).ok());
        let (base, mapped) = all.map_or_else(|| mapped(0), Ok)?;
        Ok(Self { base, count, mapped, file })
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
        let len = into.len();
        if at.saturating_add(len as u64) <= self.mapped as u64 && self.file.had(at, len as u64)? {
            let bytes = into.as_mut_ptr().cast::<u8>();
            // SAFETY: mapped, and the file has them, which cannot shrink. Nobody writes to what was written; where it is
            // given back to the system meanwhile, the bytes are zero, and any byte is valid.
            unsafe {
                self.base
                    .cast::<u8>()
                    .add(usize_from(at))
                    .copy_to_nonoverlapping(NonNull::new_unchecked(bytes), len)
            };
            // SAFETY: all of it was written.
            return Ok(unsafe { std::slice::from_raw_parts_mut(bytes, len) });
        }
        self.file.read_at(into, at)
    }
}

impl Drop for WordFile {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and references into it borrow `self`.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.mapped) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sync::Ordering;

    #[test]
    fn words_and_bytes_are_shared() {
        let one = WordFile::in_memory("test", 600, true).unwrap();
        let fd = || one.file().fd().unwrap().try_clone_to_owned().unwrap();
        let [other, unmapped] = [true, false].map(|is_read| WordFile::map(fd(), 600, is_read).unwrap());
        assert_eq!(unmapped.mapped, 4800);
        one.words()[599].store(7, Ordering::Relaxed);
        assert_eq!(other.words()[599].load(Ordering::Relaxed), 7);
        one.file().write_at(b"sample", 8192).unwrap();
        for file in [other, unmapped] {
            let mut into = [MaybeUninit::uninit(); 6];
            assert_eq!(file.read_at(&mut into, 8192).unwrap(), b"sample");
            assert_eq!(file.read_at(&mut into, 8194).unwrap(), b"mple");
            assert_eq!(file.read_at(&mut into, u64::MAX).ok(), None);
        }
        assert!(matches!(WordFile::map(fd(), 1 << 20, true), Err(Error::Corrupt(_))), "it is shorter");
        assert!(matches!(WordFile::map(crate::os::memfd("test").unwrap(), 0, true), Err(Error::Corrupt(_))));
        assert!(one.file().truncate(8).is_err(), "it cannot shrink");
    }
}
