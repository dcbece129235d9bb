//! Locks on single bytes of a file. The system drops them when their process ends, however it ends, in whatever
//! container; a lock says nothing of the byte.
//!
//! Two kinds of them exclude each other. A *process's* lock is not inherited by a fork, and other processes that
//! have the same open file are excluded; but all threads of the process have it, and closing any descriptor of the file
//! drops it. An *open file's* lock belongs to all processes that have this open file, a forked child too.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use rustix::io::Errno;

use crate::error::{Error, Result};

/// The byte that is locked while a file is made: after all bytes that a file can have.
const MAKING: i64 = i64::MAX - 1;
/// The byte that is locked while something is added to a file.
const ADDING: i64 = i64::MAX - 2;

/// A lock that is held for as long as this lives.
#[derive(Debug)]
pub struct Held<'a> {
    fd: BorrowedFd<'a>,
    byte: i64,
    unlock: i32,
}

impl<'a> Held<'a> {
    /// Waits until nobody else makes the file that was opened for this call: an open file's lock.
    ///
    /// # Errors
    /// [`Error::Os`] when the system refuses, or a signal ends the wait (`EINTR`).
    pub fn making(fd: &'a impl AsFd) -> Result<Self> {
        let fd = fd.as_fd();
        match lock(fd, libc::F_OFD_SETLKW, libc::F_WRLCK, MAKING) {
            // A file system without locks.
            Ok(()) | Err(Errno::NOLCK | Errno::OPNOTSUPP | Errno::NOSYS | Errno::INVAL) => {
                Ok(Self { fd, byte: MAKING, unlock: libc::F_OFD_SETLK })
            }
            Err(errno) => Err(Error::os("locking the file", errno)),
        }
    }

    /// Waits until no other process adds to the file. A file system without locks lets several do so at once.
    #[must_use]
    pub fn adding(fd: BorrowedFd<'a>) -> Self {
        while lock(fd, libc::F_SETLKW, libc::F_WRLCK, ADDING) == Err(Errno::INTR) {}
        Self { fd, byte: ADDING, unlock: libc::F_SETLK }
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        let _ = lock(self.fd, self.unlock, libc::F_UNLCK, self.byte);
    }
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "libc's constants are wider than the fields that they are for"
)]
fn lock(fd: BorrowedFd<'_>, command: i32, kind: i32, byte: i64) -> rustix::io::Result<()> {
    let lock = libc::flock {
        l_type: kind as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: byte,
        l_len: 1,
        // Asked for by the locks of an open file.
        l_pid: 0,
    };
    // SAFETY: reads a structure of this function's own.
    if unsafe { libc::fcntl(fd.as_raw_fd(), command, &raw const lock) } == 0 {
        return Ok(());
    }
    Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_has_its_own_locks_and_an_open_file_does_not() {
        let one = crate::os::memfd("test").unwrap();
        let adding = [(); 2].map(|()| Held::adding(one.as_fd()));
        let is_locked = || lock(one.as_fd(), libc::F_OFD_SETLK, libc::F_WRLCK, ADDING).is_err();
        assert!(is_locked(), "all threads have it, and the two kinds exclude each other");
        drop(adding);
        assert!(!is_locked());
        let _making = Held::making(&one).unwrap();
        assert!(lock(one.as_fd(), libc::F_SETLK, libc::F_WRLCK, MAKING).is_err());
    }
}
