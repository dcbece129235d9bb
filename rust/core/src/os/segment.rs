//! One sealed, sparse memfd, mapped once: bytes and lengths, nothing of what lies in them.
//!
//! INVARIANT I1: `base .. base + len` is one shared mapping of the memfd for as long as the `Segment` lives.
//! INVARIANT I2: the memfd is at least `len` long and can never shrink (sealed), so that no access
//! inside the mapping raises SIGBUS.
//!
//! Another process may write any byte of this memory at any time. Workers are trusted to follow the protocol of rings
//! and slots, and may die at any instruction. The parent validates what they wrote before it believes it.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::SealFlags;
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use super::mapping::map;
use super::page::page_size;
use crate::error::{Error, Result};
use crate::number::usize_from;
use crate::sync::AtomicU64;

/// A mapped memfd. Unmapped when dropped; pages that no process maps go back to the system. It keeps no
/// descriptor: a batch that the user keeps costs none.
#[derive(Debug)]
pub struct Segment {
    base: NonNull<u8>,
    len: u64,
    /// True if it stays mapped until the process ends.
    stays: bool,
}

// SAFETY: the mapping is shared memory without a thread of its own (I1); all access goes through
// raw pointers, whose users give their own reasons.
unsafe impl Send for Segment {}
// SAFETY: as for `Send`; `&Segment` gives out pointers and copies, never references into the mapping.
unsafe impl Sync for Segment {}

impl Segment {
    /// Creates a memfd of `len` bytes, none of them resident, seals its size and maps it. The descriptor
    /// is for other processes that shall map it.
    ///
    /// # Errors
    /// [`Error::Os`] when the system refuses: too many open files, a low `RLIMIT_AS` or `RLIMIT_FSIZE`.
    pub fn create(name: &str, len: u64) -> Result<(Self, OwnedFd)> {
        let fd = super::memfd(name)?;
        rustix::fs::ftruncate(&fd, len).map_err(|errno| Error::os("ftruncate of the memfd", errno))?;
        rustix::fs::fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
            .map_err(|errno| Error::os("sealing the memfd", errno))?;
        Ok((Self::map(fd.as_fd(), len)?, fd))
    }

    /// Maps a memfd that another process created.
    ///
    /// # Errors
    /// [`Error::Corrupt`] when it is not sealed against shrinking, [`Error::Os`] when it cannot be mapped.
    pub fn attach(fd: BorrowedFd<'_>) -> Result<Self> {
        let seals = rustix::fs::fcntl_get_seals(fd).map_err(|errno| Error::os("reading seals", errno))?;
        if !seals.contains(SealFlags::SHRINK) {
            return Err(Error::Corrupt("the descriptor is no memfd that is sealed against shrinking".into()));
        }
        let len = rustix::fs::fstat(fd).map_err(|errno| Error::os("fstat of the memfd", errno))?.st_size;
        Self::map(fd, len as u64)
    }

    fn map(fd: BorrowedFd<'_>, len: u64) -> Result<Self> {
        let bytes = usize::try_from(len).map_err(|_| Error::os("mmap", Errno::NOMEM))?;
        let flags = MapFlags::SHARED | MapFlags::NORESERVE;
        let base = map(fd, 0, bytes, ProtFlags::READ | ProtFlags::WRITE, flags)?;
        Ok(Self { base, len, stays: false })
    }

    /// Bytes mapped.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// The address of byte 0. The bytes there are shared with other processes.
    #[must_use]
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// The address of `offset`, from where `len` bytes are inside the mapping.
    ///
    /// # Errors
    /// [`Error::Corrupt`] when the range does not lie in the segment.
    pub fn pointer(&self, offset: u64, len: u64) -> Result<NonNull<u8>> {
        match offset.checked_add(len) {
            Some(end) if end <= self.len => {
                // SAFETY: `offset <= len` of the mapping (I1), so the sum stays inside one allocation.
                Ok(unsafe { self.base.add(usize_from(offset)) })
            }
            _ => Err(Error::Corrupt(format!(
                "a range of {len} bytes at {offset} lies outside the segment of {} bytes",
                self.len
            ))),
        }
    }

    /// The last word, which other processes may change at any time.
    ///
    /// # Errors
    /// [`Error::Corrupt`] when the segment has no whole words.
    pub fn last_word(&self) -> Result<&AtomicU64> {
        const WORD: u64 = size_of::<AtomicU64>() as u64;
        if !self.len.is_multiple_of(WORD) {
            return Err(Error::Corrupt(format!("a segment of {} bytes", self.len)));
        }
        let at = self.pointer(self.len.saturating_sub(WORD), WORD)?;
        // SAFETY: the range was checked, and is aligned since the mapping begins with a page; it lives as long as `self`
        // (I1); every value of an atomic is valid.
        Ok(unsafe { at.cast().as_ref() })
    }

    /// Replaces `into` by a private copy of `len` bytes at `offset`: parsed there, it cannot change meanwhile.
    ///
    /// # Errors
    /// [`Error::Corrupt`] when the range does not lie in the segment.
    pub fn copy_out(&self, offset: u64, len: u64, into: &mut Vec<u8>) -> Result<()> {
        let source = self.pointer(offset, len)?;
        into.clear();
        into.try_reserve(usize_from(len)).map_err(|_| Error::allocation(len))?;
        // SAFETY: `source` has `len` mapped bytes (I1, I2) and `into` room for them; they are private
        // memory and a mapping, so they do not overlap. A peer that breaks the protocol and writes
        // meanwhile can only make the copied bytes arbitrary, and every u8 is valid.
        unsafe {
            std::ptr::copy_nonoverlapping(source.as_ptr(), into.as_mut_ptr(), usize_from(len));
            into.set_len(usize_from(len));
        }
        Ok(())
    }

    /// Copies the bytes at `offset` to `into`.
    ///
    /// # Errors
    /// [`Error::Corrupt`] when the range does not lie in the segment.
    pub fn fill(&self, offset: u64, into: &mut [MaybeUninit<u8>]) -> Result<()> {
        let source = self.pointer(offset, into.len() as u64)?;
        // SAFETY: as in `copy_out`; `into` is this borrow's alone.
        unsafe { std::ptr::copy_nonoverlapping(source.as_ptr().cast(), into.as_mut_ptr(), into.len()) };
        Ok(())
    }

    /// Copies `bytes` to `offset`.
    ///
    /// # Errors
    /// [`Error::Corrupt`] when the range does not lie in the segment.
    pub fn copy_in(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let target = self.pointer(offset, bytes.len() as u64)?;
        // SAFETY: `target` has room inside the mapping (I1, I2); a slice of private memory cannot overlap it.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), target.as_ptr(), bytes.len()) };
        Ok(())
    }

    /// Reads from a socket into `offset..`, at most `len` bytes. Returns how many came: none at the end of the stream.
    ///
    /// # Errors
    /// [`Error::Corrupt`] when the range does not lie in the segment; else the system's error, in the inner result.
    pub fn receive(&self, socket: BorrowedFd<'_>, offset: u64, len: u64) -> Result<std::io::Result<usize>> {
        let target = self.pointer(offset, len)?;
        // SAFETY: `target` has room for `len` bytes inside the mapping (I1, I2), to which the kernel writes; no
        // reference to them is made.
        let read = unsafe { libc::recv(socket.as_raw_fd(), target.as_ptr().cast(), usize_from(len), 0) };
        Ok(usize::try_from(read).map_err(|_| std::io::Error::last_os_error()))
    }

    /// Writes to a socket `before` and then what lies at `offset`, at most `len` bytes of it. Returns how many went,
    /// those of `before` among them.
    ///
    /// # Errors
    /// As [`receive`](Self::receive).
    pub fn send(
        &self,
        socket: BorrowedFd<'_>,
        before: &[u8],
        offset: u64,
        len: u64,
    ) -> Result<std::io::Result<usize>> {
        let source = self.pointer(offset, len)?;
        let mut parts = [
            libc::iovec { iov_base: before.as_ptr().cast_mut().cast(), iov_len: before.len() },
            libc::iovec { iov_base: source.as_ptr().cast(), iov_len: usize_from(len) },
        ];
        // SAFETY: a structure of integers and pointers, for which zeros say that there is nothing.
        let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
        message.msg_iov = parts.as_mut_ptr();
        message.msg_iovlen = parts.len() as _;
        // SAFETY: the parts live; the kernel reads them: `source` has `len` mapped bytes (I1, I2), to which no
        // reference is made.
        let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL) };
        Ok(usize::try_from(sent).map_err(|_| std::io::Error::last_os_error()))
    }

    /// Gives the pages that lie wholly inside `offset .. offset + len` back to the system; they read as zero after.
    ///
    /// # Errors
    /// [`Error::Os`] when the system refuses, as for locked memory: some of the pages, or all, are still there.
    pub fn punch(&self, offset: u64, len: u64) -> Result<()> {
        let page = page_size();
        let start = offset.next_multiple_of(page);
        // The last page of the segment is its alone.
        let end = match offset.saturating_add(len) {
            end if end >= self.len => self.len.next_multiple_of(page),
            end => end / page * page,
        };
        if end <= start {
            return Ok(());
        }
        // SAFETY: the range lies in the mapping (I1), which ends with a page, and stays mapped; callers give back what
        // is not used.
        unsafe {
            let at = self.base.add(usize_from(start)).as_ptr().cast();
            rustix::mm::madvise(at, usize_from(end - start), Advice::LinuxRemove)
        }
        .map_err(|errno| Error::os("giving memory back by madvise", errno))
    }

    /// Leaves the mapping in place until the process ends.
    pub(crate) fn keep_mapped(&mut self) {
        self.stays = true;
    }
}

/// Returns true if this system takes pages of shared memory back. An emulator may not: gVisor answers `ENOSYS`.
#[must_use]
pub fn takes_pages_back() -> bool {
    Segment::create("ringloader-trial", page_size())
        .is_ok_and(|(trial, _)| trial.punch(0, trial.len()).is_ok())
}

/// The start of a page that is this process's own: zero at first, and zero again in a child that is forked. It
/// stays for good. `None` where the system has no such pages.
pub(crate) fn page_wiped_at_fork() -> Option<NonNull<u8>> {
    // Shared memory is never wiped. An emulator that takes all advice, and follows none, says that it is.
    if advised_page(MapFlags::SHARED).is_some() { None } else { advised_page(MapFlags::PRIVATE) }
}

/// A new page to be wiped at a fork, if the system says that it will be.
fn advised_page(flags: MapFlags) -> Option<NonNull<u8>> {
    // Less than the page that it becomes, whatever the size of pages.
    const LEN: usize = 4096;
    // SAFETY: a new mapping at an address of the kernel's choice touches no existing memory, and the advice is
    // for that mapping alone.
    unsafe {
        let page =
            rustix::mm::mmap_anonymous(std::ptr::null_mut(), LEN, ProtFlags::READ | ProtFlags::WRITE, flags)
                .ok()?;
        if rustix::mm::madvise(page, LEN, Advice::LinuxWipeOnFork).is_err() {
            let _ = rustix::mm::munmap(page, LEN);
            return None;
        }
        NonNull::new(page.cast())
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        if self.stays {
            return;
        }
        // SAFETY: the mapping is ours (I1), and all that hold a pointer into it hold the `Segment` too.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), usize_from(self.len)) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_written_through_one_mapping_are_read_through_another() {
        let (ours, fd) = Segment::create("test", 1 << 30).unwrap();
        let theirs = Segment::attach(fd.as_fd()).unwrap();
        drop(fd);
        ours.copy_in(12_345, b"batch").unwrap();
        let mut read = Vec::new();
        theirs.copy_out(12_345, 5, &mut read).unwrap();
        assert_eq!(read, b"batch");
    }

    #[test]
    fn the_size_is_sealed() {
        let (_segment, fd) = Segment::create("test", 1 << 20).unwrap();
        assert_eq!(rustix::fs::ftruncate(&fd, 4096), Err(Errno::PERM));
        assert_eq!(rustix::fs::ftruncate(&fd, 1 << 21), Err(Errno::PERM));
    }

    #[test]
    fn a_range_outside_is_refused() {
        let (segment, _fd) = Segment::create("test", 4096).unwrap();
        assert!(segment.pointer(4096, 0).is_ok());
        assert!(segment.pointer(4096, 1).is_err());
        assert!(segment.pointer(u64::MAX, 2).is_err());
        assert!(segment.copy_in(4090, &[0; 7]).is_err());
    }

    #[test]
    fn punched_pages_are_given_back_and_read_as_zero() {
        let (segment, fd) = Segment::create("test", 1 << 20).unwrap();
        segment.copy_in(0, &vec![7; 1 << 20]).unwrap();
        let resident = || rustix::fs::fstat(&fd).unwrap().st_blocks * 512;
        assert_eq!(resident(), 1 << 20);
        segment.punch(0, 1 << 19).unwrap();
        segment.punch((1 << 20) - page_size() - 1, page_size()).unwrap();
        assert_eq!(resident(), 1 << 19, "only what lies wholly inside");
        let mut read = Vec::new();
        segment.copy_out(0, 1, &mut read).unwrap();
        assert_eq!(read, [0]);
    }

    #[test]
    fn this_system_takes_pages_back() {
        assert!(takes_pages_back());
    }

    #[test]
    fn the_last_page_goes_with_the_end() {
        let (segment, fd) = Segment::create("test", 5 * page_size() - 100).unwrap();
        segment.copy_in(0, &vec![7; segment.len() as usize]).unwrap();
        segment.punch(page_size(), segment.len() - page_size()).unwrap();
        assert_eq!(rustix::fs::fstat(&fd).unwrap().st_blocks as u64 * 512, page_size());
    }

    #[test]
    fn a_refusal_is_told() {
        let (segment, fd) = Segment::create("test", 1 << 20).unwrap();
        segment.copy_in(0, &vec![7; 1 << 20]).unwrap();
        let locked = page_size() as usize;
        // SAFETY: a page of the mapping; to lock it changes nothing in it.
        unsafe { rustix::mm::mlock(segment.base().as_ptr().cast(), locked) }.unwrap();
        assert!(matches!(segment.punch(0, 1 << 20), Err(Error::Os { .. })));
        let resident = rustix::fs::fstat(&fd).unwrap().st_blocks as usize * 512;
        assert!(resident >= locked, "{resident}");
        let mut read = Vec::new();
        segment.copy_out(0, 1, &mut read).unwrap();
        assert_eq!(read, [7]);
    }

    #[test]
    fn a_descriptor_that_is_no_sealed_memfd_is_refused() {
        let fd = rustix::fs::memfd_create("test", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
        assert!(Segment::attach(fd.as_fd()).is_err());
    }
}
