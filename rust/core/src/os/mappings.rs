//! Maps the part of a growing file in memory that is in use.
//!
//! A read by a system call takes three times as long: it looks every page up. Mapped memory that was read counts as
//! each reader's own in what the system says of a process, though it exists once.
//!
//! INVARIANT: a range is used only after it was written. A file in memory cannot shrink, so no access to it raises
//! SIGBUS.

use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};

use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::error::{Error, Result};
use crate::sync::{AtomicUsize, Ordering};

/// Bytes of the first mapping. Each later one has as many as all before it.
const FIRST: u64 = 1 << 20;
const COUNT: usize = 29;
/// A mapping that the system has refused.
const REFUSED: usize = 1;

/// Mappings of the file's parts, made when they are first used.
#[derive(Debug)]
pub(super) struct Mappings {
    /// Addresses, not locks: a child may be forked while another thread maps.
    places: [AtomicUsize; COUNT],
    /// True if bytes are read from mappings.
    reads: bool,
}

/// Start and length of the mapping in which `at` lies, and its number.
fn mapping_of(at: u64) -> (u64, u64, usize) {
    match (at / FIRST).checked_ilog2() {
        None => (0, FIRST, 0),
        Some(power) => (FIRST << power, FIRST << power, power as usize + 1),
    }
}

impl Mappings {
    pub(super) fn new() -> Self {
        // A bound of the address space would be filled by what is hardly used.
        let reads = super::memory::address_space_left().is_none();
        Self { places: [const { AtomicUsize::new(0) }; COUNT], reads }
    }

    /// Copies bytes of the file from `at` on. `false`: they cannot be mapped. `fd` is asked for when a mapping is made.
    ///
    /// # Safety
    /// `fd` returns the same file in each call, sealed against shrinking, and has been written up to `at + into.len()`.
    pub(super) unsafe fn copy_out<'a>(
        &self,
        fd: impl Fn() -> Result<BorrowedFd<'a>>,
        into: &mut [MaybeUninit<u8>],
        at: u64,
    ) -> bool {
        let mut done = 0;
        if !self.reads {
            return false;
        }
        while done < into.len() {
            let from = at + done as u64;
            let (start, len, number) = mapping_of(from);
            let Some(base) = self.mapped(&fd, start, len, number) else { return false };
            let part = ((start + len - from) as usize).min(into.len() - done);
            // SAFETY: the mapping has `part` bytes from `from` on, which are in the file by the caller's promise. Nobody
            // writes to what was written; where it is given back to the system meanwhile, the bytes are zero, and any
            // byte is valid.
            unsafe {
                let source = (base as *const u8).add((from - start) as usize);
                ptr::copy_nonoverlapping(source, into[done..].as_mut_ptr().cast(), part);
            }
            done += part;
        }
        true
    }

    fn mapped<'a>(
        &self,
        fd: impl Fn() -> Result<BorrowedFd<'a>>,
        start: u64,
        len: u64,
        number: usize,
    ) -> Option<usize> {
        let place = self.places.get(number)?;
        // ORDERING mapping: the mapping exists before its address does.
        let mut base = place.load(Ordering::Acquire);
        if base == 0 {
            let flags = MapFlags::SHARED | MapFlags::NORESERVE;
            let made = map(fd().ok()?, start, usize::try_from(len).ok()?, ProtFlags::READ, flags);
            base = made.map_or(REFUSED, |made| made.as_ptr() as usize);
            // ORDERING mapping: as above.
            if let Err(earlier) = place.compare_exchange(0, base, Ordering::AcqRel, Ordering::Acquire) {
                unmap(base, len);
                base = earlier;
            }
        }
        (base != REFUSED).then_some(base)
    }
}

impl Drop for Mappings {
    fn drop(&mut self) {
        for number in 0..COUNT {
            let len = if number == 0 { FIRST } else { FIRST << (number - 1) };
            unmap(self.places[number].load(Ordering::Relaxed), len);
        }
    }
}

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

fn unmap(base: usize, len: u64) {
    if base > REFUSED {
        // SAFETY: a mapping that this file has made, of which nobody has the address any more.
        let _ = unsafe { rustix::mm::munmap(base as *mut _, len as usize) };
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn mappings_lie_side_by_side() {
        let mut end = 0;
        for number in 0..COUNT {
            assert_eq!(mapping_of(end).2, number);
            assert_eq!(mapping_of(end).0, end);
            end += mapping_of(end).1;
            assert_eq!(mapping_of(end - 1).2, number);
        }
    }

    #[test]
    fn a_range_over_two_mappings_is_copied_whole() {
        let fd = crate::os::memfd("test").unwrap();
        rustix::io::pwrite(&fd, b"left and right", FIRST - 4).unwrap();
        let mappings = Mappings::new();
        let mut into = [MaybeUninit::uninit(); 14];
        // SAFETY: written before.
        assert!(unsafe { mappings.copy_out(|| Ok(fd.as_fd()), &mut into, FIRST - 4) });
        // SAFETY: `copy_out` has written them.
        assert_eq!(into.map(|byte| unsafe { byte.assume_init() }), *b"left and right");
    }
}
