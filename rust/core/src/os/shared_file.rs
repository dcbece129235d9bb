//! A file that other processes have too, by its descriptor: read and written by system calls, which can say no.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{FallocateFlags, FileType, SeekFrom};
use rustix::io::Errno;

use super::page::pages_within;
use crate::error::{Error, Result};
use crate::sync::{AtomicU64, Ordering};

/// A file. Nothing is read or written before the descriptor is checked: other code may close it by its number, as
/// daemons do, and another file may have the number by then.
#[derive(Debug)]
pub struct SharedFile {
    /// `None` once this goes.
    fd: Option<OwnedFd>,
    /// Device and number of the file.
    inode: (u64, u64),
    /// Bytes that the file had at some time.
    known: AtomicU64,
}

impl SharedFile {
    /// Takes over a file.
    ///
    /// # Errors
    /// [`Error::Os`] when the system refuses.
    pub fn new(fd: OwnedFd) -> Result<Self> {
        let stat = rustix::fs::fstat(&fd).map_err(|errno| Error::os("fstat", errno))?;
        Ok(Self { fd: Some(fd), inode: (stat.st_dev, stat.st_ino), known: AtomicU64::new(0) })
    }

    /// Device and number of the file.
    #[must_use]
    pub fn inode(&self) -> (u64, u64) {
        self.inode
    }

    /// Returns the descriptor, which other processes need.
    ///
    /// # Errors
    /// [`Error::Os`] when other code has closed it by its number.
    pub fn fd(&self) -> Result<BorrowedFd<'_>> {
        let is_ours =
            |fd: &&OwnedFd| rustix::fs::fstat(fd).is_ok_and(|stat| (stat.st_dev, stat.st_ino) == self.inode);
        let fd = self.fd.as_ref().filter(is_ours);
        Ok(fd
            .ok_or_else(|| Error::os("the descriptor was closed, or is another file's by now", Errno::BADF))?
            .as_fd())
    }

    /// Bytes of the file, holes included.
    ///
    /// # Errors
    /// [`Error::Os`].
    pub fn size(&self) -> Result<u64> {
        let stat = rustix::fs::fstat(self.fd()?).map_err(|errno| Error::os("fstat", errno))?;
        Ok(stat.st_size as u64)
    }

    /// Returns true if the file had `len` bytes from `at` on at some time; it has them still if it cannot shrink.
    ///
    /// # Errors
    /// [`Error::Os`].
    pub fn had(&self, at: u64, len: u64) -> Result<bool> {
        let Some(end) = at.checked_add(len) else { return Ok(false) };
        if end > self.known.load(Ordering::Relaxed) {
            self.known.store(self.size()?, Ordering::Relaxed);
        }
        Ok(end <= self.known.load(Ordering::Relaxed))
    }

    /// Reads bytes from `at` on, and returns them; fewer at the end of the file.
    ///
    /// # Errors
    /// [`Error::Os`] when the system refuses: a damaged disk.
    pub fn read_at<'a>(&self, into: &'a mut [MaybeUninit<u8>], at: u64) -> Result<&'a mut [u8]> {
        let (fd, mut done) = (self.fd()?, 0);
        while done < into.len() {
            match rustix::io::pread(fd, &mut into[done..], at + done as u64) {
                Ok(([], _)) => break,
                Ok((read, _)) => done += read.len(),
                Err(Errno::INTR) => {}
                Err(errno) => return Err(Error::os("reading the file", errno)),
            }
        }
        // SAFETY: the calls above have written `done` bytes.
        Ok(unsafe { std::slice::from_raw_parts_mut(into.as_mut_ptr().cast(), done) })
    }

    /// Writes all of `bytes` from `at` on.
    ///
    /// # Errors
    /// [`Error::Os`] when the system refuses: a full disk, a low `RLIMIT_FSIZE`.
    pub fn write_at(&self, mut bytes: &[u8], mut at: u64) -> Result<()> {
        let fd = self.fd()?;
        while !bytes.is_empty() {
            match rustix::io::pwrite(fd, bytes, at) {
                Ok(0) => return Err(Error::os("writing the file", Errno::NOSPC)),
                Ok(written) => {
                    bytes = &bytes[written..];
                    at += written as u64;
                }
                Err(Errno::INTR) => {}
                Err(errno) => return Err(Error::os("writing the file", errno)),
            }
        }
        Ok(())
    }

    /// Cuts the file off, or lengthens it by a hole.
    ///
    /// # Errors
    /// [`Error::Os`] when the system refuses.
    pub fn truncate(&self, len: u64) -> Result<()> {
        rustix::fs::ftruncate(self.fd()?, len).map_err(|errno| Error::os("ftruncate", errno))
    }

    /// Gives the pages that lie wholly in a range back to the system, where it takes them; they read as zero after. A
    /// process that reads them from a mapping meanwhile faults first: the system unmaps them before it takes them.
    pub fn punch(&self, at: u64, len: u64) {
        let pages = pages_within(at, at.saturating_add(len));
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        if !pages.is_empty()
            && let Ok(fd) = self.fd()
        {
            // Refused, they go with the file.
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

    /// Returns where the next bytes lie that are no hole, from `at` on: `at` where the file system does not know.
    #[must_use]
    pub fn next_data(&self, at: u64) -> u64 {
        match self.fd().map(|fd| rustix::fs::seek(fd, SeekFrom::Data(at))) {
            Ok(Ok(found)) => found,
            Ok(Err(Errno::NXIO)) => u64::MAX,
            Ok(Err(_)) | Err(_) => at,
        }
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

    /// True if this is a file that has bytes: no folder, pipe or device.
    ///
    /// # Errors
    /// [`Error::Os`].
    pub fn is_regular(&self) -> Result<bool> {
        let stat = rustix::fs::fstat(self.fd()?).map_err(|errno| Error::os("fstat", errno))?;
        Ok(FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile)
    }
}

impl Drop for SharedFile {
    fn drop(&mut self) {
        // Another file's, it is not ours to close.
        if self.fd().is_err() {
            std::mem::forget(self.fd.take());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::os::page::page_size;

    #[test]
    fn bytes_are_those_of_the_file() {
        let one = SharedFile::new(crate::os::memfd("test").unwrap()).unwrap();
        let other = SharedFile::new(one.fd().unwrap().try_clone_to_owned().unwrap()).unwrap();
        let at = 2 * page_size();
        assert!(!other.had(at, 1).unwrap());
        one.write_at(b"sample", at).unwrap();
        assert!(other.had(at, 6).unwrap() && !other.had(at, 7).unwrap() && !other.had(at, u64::MAX).unwrap());
        let mut into = [MaybeUninit::uninit(); 10];
        assert_eq!(other.read_at(&mut into, at).unwrap(), b"sample");
        other.punch(at, page_size() - 1);
        assert_eq!(other.read_at(&mut into, at).unwrap(), b"sample", "no part of a page goes");
        other.truncate(at + page_size()).unwrap();
        other.punch(at, page_size());
        assert_eq!(other.read_at(&mut into[..6], at).unwrap(), [0; 6]);
        other.truncate(at + 2).unwrap();
        assert_eq!(one.read_at(&mut into, at).unwrap(), [0; 2]);
    }

    #[test]
    fn holes_are_left_out() {
        let file = SharedFile::new(crate::os::memfd("test").unwrap()).unwrap();
        let page = page_size();
        file.truncate(1 << 40).unwrap();
        file.write_at(b"x", 3 * page + 7).unwrap();
        assert_eq!(
            [0, 3 * page + 9, 4 * page].map(|at| file.next_data(at)),
            [3 * page, 3 * page + 9, u64::MAX]
        );
    }

    #[test]
    fn what_cannot_be_written_is_told() {
        let file = SharedFile::new(crate::os::memfd("test").unwrap()).unwrap();
        rustix::fs::fcntl_add_seals(file.fd().unwrap(), rustix::fs::SealFlags::GROW).unwrap();
        assert!(matches!(file.write_at(b"x", 1 << 20), Err(Error::Os { .. })));
    }
}
