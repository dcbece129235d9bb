//! Memory that is written once, from its beginning to its end, and that no process can write to after that.
//!
//! INVARIANT: `base .. base + len` is one read-only mapping of a memfd that is sealed against writing, shrinking and
//! growing, for as long as the `Frozen` lives. So its bytes never change, and no access raises SIGBUS.

use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::SealFlags;
use rustix::io::Errno;
use rustix::mm::{MapFlags, ProtFlags};

use super::mapping::map;
use super::shared_file::SharedFile;
use crate::error::{Error, Result};

/// A memfd that bytes are appended to. It is not mapped.
#[derive(Debug)]
pub struct Growing {
    file: SharedFile,
    len: u64,
}

impl Growing {
    /// An empty one.
    ///
    /// # Errors
    /// [`Error::Os`] when the system refuses: too many open files.
    pub fn create(name: &str) -> Result<Self> {
        Ok(Self { file: SharedFile::new(super::memfd(name)?)?, len: 0 })
    }

    /// Bytes appended.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Appends `bytes`.
    ///
    /// # Errors
    /// [`Error::Os`] when the system refuses: no memory, a low `RLIMIT_FSIZE`.
    pub fn append(&mut self, bytes: &[u8]) -> Result<()> {
        self.file.write_at(bytes, self.len)?;
        self.len += bytes.len() as u64;
        Ok(())
    }

    /// Seals and maps it.
    ///
    /// # Errors
    /// [`Error::Os`] when the system refuses, [`Error::Corrupt`] when nothing was appended.
    pub fn freeze(self) -> Result<Frozen> {
        rustix::fs::fcntl_add_seals(self.file.fd()?, Frozen::seals() | SealFlags::SEAL)
            .map_err(|errno| Error::os("sealing the memfd", errno))?;
        Frozen::over(self.file)
    }
}

/// A mapped memfd whose bytes never change. It keeps its descriptor, which is for other processes.
#[derive(Debug)]
pub struct Frozen {
    base: NonNull<u8>,
    len: usize,
    file: SharedFile,
}

// SAFETY: memory that nobody writes to has no thread of its own.
unsafe impl Send for Frozen {}
// SAFETY: as for `Send`.
unsafe impl Sync for Frozen {}

impl Frozen {
    fn seals() -> SealFlags {
        SealFlags::SHRINK | SealFlags::GROW | SealFlags::WRITE
    }

    /// Maps what another process has frozen.
    ///
    /// # Errors
    /// [`Error::Corrupt`] when it is empty or can still be written to, [`Error::Os`] when it cannot be mapped.
    pub fn attach(fd: OwnedFd) -> Result<Self> {
        Self::over(SharedFile::new(fd)?)
    }

    fn over(file: SharedFile) -> Result<Self> {
        let seals =
            rustix::fs::fcntl_get_seals(file.fd()?).map_err(|errno| Error::os("reading seals", errno))?;
        if !seals.contains(Self::seals()) {
            return Err(Error::Corrupt("the descriptor is no memfd that is sealed against writing".into()));
        }
        let len = usize::try_from(file.size()?).map_err(|_| Error::os("mmap", Errno::NOMEM))?;
        if len == 0 {
            return Err(Error::Corrupt("the memfd is empty".into()));
        }
        // Private, because Linux before 6.7 maps no sealed memfd as shared. Pages that are only read are the memfd's.
        let base = map(file.fd()?, 0, len, ProtFlags::READ, MapFlags::PRIVATE)?;
        Ok(Self { base, len, file })
    }

    /// All of it.
    #[must_use]
    #[inline]
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: mapped while `self` lives, and never written to (see the invariant); every u8 is valid.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr(), self.len) }
    }

    /// Returns the descriptor that another process needs for [`attach`](Self::attach).
    ///
    /// # Errors
    /// [`Error::Os`] when other code has closed it by its number, as daemons do. What is mapped stays.
    pub fn fd(&self) -> Result<BorrowedFd<'_>> {
        self.file.fd()
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, and references into it borrow `self`.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_appended_is_read_and_cannot_be_changed() {
        let mut one = Growing::create("test").unwrap();
        one.append(b"first ").unwrap();
        one.append(&vec![7; (1 << 20) + 1]).unwrap();
        assert_eq!(one.len(), (1 << 20) + 7);
        let frozen = one.freeze().unwrap();
        assert_eq!(&frozen.bytes()[..7], b"first \x07");
        assert_eq!(frozen.bytes().len(), (1 << 20) + 7);
        assert_eq!(rustix::io::pwrite(frozen.fd().unwrap(), b"x", 0), Err(Errno::PERM));
        let again = Frozen::attach(frozen.fd().unwrap().try_clone_to_owned().unwrap()).unwrap();
        drop(frozen);
        assert_eq!(&again.bytes()[..5], b"first");
    }

    #[test]
    fn what_can_still_be_written_to_is_refused() {
        let mut growing = Growing::create("test").unwrap();
        growing.append(b"x").unwrap();
        rustix::fs::fcntl_add_seals(growing.file.fd().unwrap(), SealFlags::SHRINK | SealFlags::GROW).unwrap();
        assert!(matches!(Frozen::over(growing.file), Err(Error::Corrupt(_))));
        assert!(matches!(Growing::create("test").unwrap().freeze(), Err(Error::Corrupt(_))));
    }
}
