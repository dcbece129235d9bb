//! Maps a file in memory.

use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::error::{Error, Result};

/// A new mapping of `len` bytes of a file. A core dump would hold all of it, so it is left out, where the system does that.
///
/// # Errors
/// [`Error::Os`] when the system refuses.
pub(super) fn map(
    fd: BorrowedFd<'_>,
    start: u64,
    len: usize,
    protection: ProtFlags,
    flags: MapFlags,
) -> Result<NonNull<u8>> {
    // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory; the advice is for it
    // alone.
    let base = unsafe {
        let base = rustix::mm::mmap(ptr::null_mut(), len, protection, flags, fd, start)
            .map_err(|errno| Error::os("mmap", errno))?;
        let _ = rustix::mm::madvise(base, len, Advice::LinuxDontDump);
        base
    };
    NonNull::new(base.cast()).ok_or_else(|| Error::os("mmap", Errno::NOMEM))
}
