//! A file of which words are mapped as atomics: the first ones, and those of ranges that were made for words. All other
//! bytes are written by system calls, which can say no: a full disk, a limit. They are read by system calls too, but
//! for those of a file in memory, which cannot be cut off.
//!
//! INVARIANT: `base .. base + 8 * count` is one shared mapping of the file for as long as the `WordFile` lives. The
//! file's blocks for it, and for other words, are allocated, so that no store to them raises SIGBUS. A memfd is sealed
//! against shrinking. Any program that may write to a file with a name can cut it off.

use std::mem::{ManuallyDrop, MaybeUninit};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::{FallocateFlags, FileType, SealFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use super::page::{pages_around, pages_within};
use super::windows::Windows;
use crate::error::{Error, Result};
use crate::sync::{AtomicU64, Ordering};

/// Such a file. It keeps its descriptor.
#[derive(Debug)]
pub struct WordFile {
    base: NonNull<AtomicU64>,
    count: usize,
    fd: ManuallyDrop<OwnedFd>,
    inode: (u64, u64),
    windows: Windows,
    /// Bytes that the file is known to have. Of a file in memory, that stays true.
    known: AtomicU64,
}

// SAFETY: shared memory has no thread of its own; all of it that is referred to is atomic.
unsafe impl Send for WordFile {}
// SAFETY: as for `Send`.
unsafe impl Sync for WordFile {}

impl WordFile {
    /// A file in memory, with `count` words of zero.
    ///
    /// # Errors
    /// [`Error::Os`] when the system refuses.
    pub fn in_memory(name: &str, count: usize) -> Result<Self> {
        let fd = super::memfd(name)?;
        allocate(&fd, 0, (count * size_of::<AtomicU64>()) as u64)?;
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK)
            .map_err(|errno| Error::os("sealing the memfd", errno))?;
        Self::map(fd, count)
    }

    /// Maps the first `count` words of a file that has them.
    ///
    /// # Errors
    /// [`Error::Corrupt`] when the file is shorter, [`Error::Os`] when the system refuses.
    pub fn map(fd: OwnedFd, count: usize) -> Result<Self> {
        let stat = rustix::fs::fstat(&fd).map_err(|errno| Error::os("fstat", errno))?;
        let len = count * size_of::<AtomicU64>();
        if (stat.st_size as u64) < len as u64 {
            return Err(Error::Corrupt(format!("a file of {} bytes has no {count} words", stat.st_size)));
        }
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory.
        let base =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), len, protection, MapFlags::SHARED, &fd, 0) }
                .map_err(|errno| Error::os("mmap", errno))?;
        let base = NonNull::new(base.cast()).ok_or_else(|| Error::os("mmap", Errno::NOMEM))?;
        // Only files in memory have seals.
        let seals = rustix::fs::fcntl_get_seals(&fd).unwrap_or(SealFlags::empty());
        let windows = Windows::new(seals.contains(SealFlags::SHRINK));
        let (fd, inode) = (ManuallyDrop::new(fd), (stat.st_dev, stat.st_ino));
        Ok(Self { base, count, fd, inode, windows, known: AtomicU64::new(0) })
    }

    /// The words. Other processes may change any of them at any time.
    #[must_use]
    #[inline]
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: mapped while `self` lives, at the start of a page; every value of an atomic is valid.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.count) }
    }

    /// The words from `at` on. `None`: the file is shorter, or they cannot be mapped. They lie in a range that was made
    /// for words by [`make_words`](Self::make_words), at a multiple of 4096; a range that was given back since holds
    /// zeros.
    #[must_use]
    pub fn words_at(&self, at: u64, count: usize) -> Option<&[AtomicU64]> {
        let len = count * size_of::<AtomicU64>();
        if !at.is_multiple_of(size_of::<AtomicU64>() as u64) || !self.has(at, len).ok()? {
            return None;
        }
        let address = self.windows.address(|| self.fd(), at, len as u64)?;
        // SAFETY: mapped while `self` lives, within the file and aligned; every value of an atomic is valid. Bytes are
        // copied from the same mapping as if nobody wrote to them, and those are records, which nobody takes for words
        // in a file in memory.
        Some(unsafe { std::slice::from_raw_parts(address as *const AtomicU64, count) })
    }

    /// Makes a range zero, with the blocks for it.
    ///
    /// # Errors
    /// [`Error::Os`] when the system refuses: a full disk.
    pub fn make_words(&self, at: u64, len: u64) -> Result<()> {
        let fd = self.fd()?;
        allocate(fd, at, len)?;
        // A record that had no room may have been written there in part.
        zero(fd, at, len)
    }

    /// Reads bytes from `at` on, and returns them; fewer at the end of the file.
    ///
    /// # Errors
    /// [`Error::Os`] when the system refuses: a damaged disk, or other code has closed the descriptor.
    pub fn read_at<'a>(&self, into: &'a mut [MaybeUninit<u8>], at: u64) -> Result<&'a mut [u8]> {
        let len = into.len();
        let mut done = 0;
        if self.has(at, len)?
            // SAFETY: the file is at least so long, and sealed, or nothing is copied; `fd` is that file's, or there is
            // no window yet and an error.
            && unsafe { self.windows.copy_out(|| self.fd(), into, at) }
        {
            done = len;
        }
        let fd = if done < len { Some(self.fd()?) } else { None };
        while let Some(fd) = fd
            && done < len
        {
            match rustix::io::pread(fd, &mut into[done..], at + done as u64) {
                Ok(([], _)) => break,
                Ok((read, _)) => done += read.len(),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(Error::os("reading samples", errno)),
            }
        }
        // SAFETY: the calls above have written `done` bytes.
        Ok(unsafe { std::slice::from_raw_parts_mut(into.as_mut_ptr().cast(), done) })
    }

    /// Returns true if the file has `len` bytes from `at` on.
    fn has(&self, at: u64, len: usize) -> Result<bool> {
        let Some(end) = at.checked_add(len as u64) else { return Ok(false) };
        if end > self.known.load(Ordering::Relaxed) {
            self.known.store(self.file_len()?, Ordering::Relaxed);
        }
        Ok(end <= self.known.load(Ordering::Relaxed))
    }

    /// Writes all of `bytes` from `at` on.
    ///
    /// # Errors
    /// [`Error::Os`] when the system refuses: a full disk, a low `RLIMIT_FSIZE`.
    pub fn write_at(&self, bytes: &[u8], at: u64) -> Result<()> {
        write_at(self.fd()?, bytes, at)
    }

    /// Gives the pages that lie wholly in a range back to the system, where it takes them; they read as zero after. A
    /// process that reads them from a mapping meanwhile faults first: the system unmaps them before it takes them.
    pub fn punch(&self, at: u64, len: u64) {
        let pages = pages_within(at, at.saturating_add(len));
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        if !pages.is_empty()
            && let Ok(fd) = self.fd()
        {
            // Refused, as by some network file systems, they go with the file.
            let _ = rustix::fs::fallocate(fd, flags, pages.start, pages.end - pages.start);
        }
    }

    /// Waits until all that was written is on the disk.
    ///
    /// # Errors
    /// [`Error::Os`] when it could not be written.
    pub fn sync(&self) -> Result<()> {
        rustix::fs::fdatasync(self.fd()?).map_err(|errno| Error::os("fdatasync", errno))
    }

    /// Bytes of the file, holes included.
    ///
    /// # Errors
    /// [`Error::Os`].
    pub fn file_len(&self) -> Result<u64> {
        let stat = rustix::fs::fstat(self.fd()?).map_err(|errno| Error::os("fstat", errno))?;
        Ok(stat.st_size as u64)
    }

    /// Bytes that the file system has left for this user, and whether its files are memory.
    ///
    /// # Errors
    /// [`Error::Os`].
    pub fn disk_left(&self) -> Result<(u64, bool)> {
        const TMPFS: i64 = 0x0102_1994;
        let stat = rustix::fs::fstatfs(self.fd()?).map_err(|errno| Error::os("fstatfs", errno))?;
        Ok((stat.f_bavail.saturating_mul(stat.f_bsize as u64), stat.f_type as i64 == TMPFS))
    }

    /// Device and number of the file.
    #[must_use]
    pub fn inode(&self) -> (u64, u64) {
        self.inode
    }

    /// Returns the descriptor that another process needs to [`map`](Self::map) the file. Nothing is read or written
    /// without this look: under the same number there may be another file by now.
    ///
    /// # Errors
    /// [`Error::Os`] when other code has closed it by its number, as daemons do.
    pub fn fd(&self) -> Result<BorrowedFd<'_>> {
        let stat = rustix::fs::fstat(&*self.fd).map_err(|errno| Error::os("fstat", errno))?;
        if (stat.st_dev, stat.st_ino) != self.inode {
            return Err(Error::os("the descriptor is another file's by now", Errno::BADF));
        }
        Ok(self.fd.as_fd())
    }
}

impl Drop for WordFile {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and references into it borrow `self`.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.count * 8) };
        if self.fd().is_ok() {
            // SAFETY: not used after this. Another file's, it is not ours to close.
            unsafe { ManuallyDrop::drop(&mut self.fd) };
        }
    }
}

/// Takes all bytes from a file.
///
/// # Errors
/// [`Error::Os`] when the system refuses.
pub fn empty(fd: &OwnedFd) -> Result<()> {
    rustix::fs::ftruncate(fd, 0).map_err(|errno| Error::os("ftruncate", errno))
}

/// Gives a range of a file its blocks; bytes past the file's end become zero. Blocks can be smaller than pages, and the
/// first store to a mapped page asks for all blocks of the page: those of its other bytes are given too.
///
/// # Errors
/// [`Error::Os`] when the system refuses: a full disk.
pub fn allocate(fd: impl AsFd, at: u64, len: u64) -> Result<()> {
    let fd = fd.as_fd();
    match rustix::fs::fallocate(fd, FallocateFlags::empty(), at, len) {
        // A file system that cannot: zeros take the blocks as well.
        Err(Errno::OPNOTSUPP | Errno::NOSYS) => {
            let stat = rustix::fs::fstat(fd).map_err(|errno| Error::os("fstat", errno))?;
            let start = at.max(stat.st_size as u64).min(at + len);
            zero(fd, start, at + len - start)
        }
        other => other
            .and_then(|()| match pages_around(at, at + len) {
                pages if pages == (at..at + len) => Ok(()),
                pages => {
                    rustix::fs::fallocate(fd, FallocateFlags::KEEP_SIZE, pages.start, pages.end - pages.start)
                }
            })
            .map_err(|errno| Error::os("allocating a table of samples", errno)),
    }
}

fn zero(fd: BorrowedFd<'_>, at: u64, len: u64) -> Result<()> {
    let zeros = vec![0; len.min(1 << 20) as usize];
    (0..len)
        .step_by(1 << 20)
        .try_for_each(|done| write_at(fd, &zeros[..zeros.len().min((len - done) as usize)], at + done))
}

/// True if `fd` is a file that can have blocks: no folder, pipe or device.
///
/// # Errors
/// [`Error::Os`].
pub fn is_regular(fd: &OwnedFd) -> Result<bool> {
    let stat = rustix::fs::fstat(fd).map_err(|errno| Error::os("fstat", errno))?;
    Ok(FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile)
}

/// Reads bytes from `at` on. Returns how many there are; fewer at the end of the file.
///
/// # Errors
/// [`Error::Os`] when the system refuses.
pub fn read_at(fd: &OwnedFd, into: &mut [u8], at: u64) -> Result<usize> {
    let mut done = 0;
    while done < into.len() {
        match rustix::io::pread(fd, &mut into[done..], at + done as u64) {
            Ok(0) => break,
            Ok(read) => done += read,
            Err(Errno::INTR) => {}
            Err(errno) => return Err(Error::os("reading samples", errno)),
        }
    }
    Ok(done)
}

/// Writes all of `bytes` from `at` on.
///
/// # Errors
/// [`Error::Os`] when the system refuses: a full disk, a low `RLIMIT_FSIZE`.
pub fn write_at(fd: BorrowedFd<'_>, mut bytes: &[u8], mut at: u64) -> Result<()> {
    while !bytes.is_empty() {
        match rustix::io::pwrite(fd, bytes, at) {
            Ok(0) => return Err(Error::os("writing samples", Errno::NOSPC)),
            Ok(written) => {
                bytes = &bytes[written..];
                at += written as u64;
            }
            Err(Errno::INTR) => {}
            Err(errno) => return Err(Error::os("writing samples", errno)),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::os::page::page_size;

    #[test]
    fn words_and_bytes_are_those_of_the_file() {
        let one = WordFile::in_memory("test", 600).unwrap();
        let other = WordFile::map(one.fd().unwrap().try_clone_to_owned().unwrap(), 600).unwrap();
        one.words()[599].store(7, Ordering::Relaxed);
        assert_eq!(other.words()[599].load(Ordering::Relaxed), 7);
        let at = 2 * page_size();
        one.write_at(b"sample", at).unwrap();
        let mut into = [MaybeUninit::uninit(); 10];
        assert_eq!(other.read_at(&mut into, at).unwrap(), b"sample");
        other.punch(at, page_size() - 1);
        assert_eq!(other.read_at(&mut into, at).unwrap(), b"sample", "no part of a page goes");
        other.punch(at, page_size());
        assert_eq!(other.read_at(&mut into[..6], at).unwrap(), [0; 6]);
        assert!(WordFile::map(one.fd().unwrap().try_clone_to_owned().unwrap(), 1 << 20).is_err());
    }

    #[test]
    fn words_that_are_made_are_zero_and_shared() {
        let one = WordFile::in_memory("test", 512).unwrap();
        let other = WordFile::map(one.fd().unwrap().try_clone_to_owned().unwrap(), 512).unwrap();
        let at = (1 << 20) - 4096;
        assert!(one.words_at(at, 2).is_none(), "the file is shorter");
        one.write_at(&[7; 100], at).unwrap();
        one.make_words(at, 8192).unwrap();
        assert!(one.words_at(at, 1024).is_none(), "two windows");
        for at in [at, at + 4096] {
            one.words_at(at, 512).unwrap()[5].store(at, Ordering::Relaxed);
            let theirs = other.words_at(at, 512).unwrap();
            assert_eq!((theirs[5].load(Ordering::Relaxed), theirs[6].load(Ordering::Relaxed)), (at, 0));
        }
    }

    #[test]
    fn what_cannot_be_written_is_told() {
        let file = WordFile::in_memory("test", 512).unwrap();
        rustix::fs::fcntl_add_seals(&*file.fd, SealFlags::GROW).unwrap();
        assert!(matches!(file.write_at(b"x", 1 << 20), Err(Error::Os { .. })));
    }
}
