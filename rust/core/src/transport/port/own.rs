//! The segments of a worker's oversize batches: on their way to the parent, and kept for later batches.
//!
//! All of it is private, so a worker that dies leaves nothing to repair: its successor begins with an empty ring, and the
//! system takes the memory once the parent has dropped the batch.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::error::Result;
use crate::os::Segment;
use crate::pool::Custody;
use crate::testing::planted;

/// The most segments that a worker keeps: the user has one batch when the worker sends the next.
const MOST_KEPT: usize = 2;

/// Bytes of the word after the batch.
const WORD: u64 = 8;

/// A segment that carries one batch at a time.
#[derive(Debug)]
pub(super) struct OwnSegment {
    segment: Segment,
    fd: OwnedFd,
    /// True if the worker uses it again after this batch.
    is_kept: bool,
}

impl OwnSegment {
    /// Returns the bytes that a segment needs for a batch of `len` bytes.
    pub(super) fn bytes_for(len: u64, page: u64) -> u64 {
        len.saturating_add(WORD).next_multiple_of(page)
    }

    pub(super) fn bytes(&self) -> u64 {
        self.segment.len()
    }

    pub(super) fn segment(&self) -> &Segment {
        &self.segment
    }

    pub(super) fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    fn custody(&self) -> Custody<'_> {
        Custody::new(self.segment.last_word().expect("its length is in whole pages"))
    }

    /// Notes that a batch is written, if the worker uses the segment again after it.
    pub(super) fn lend(&self) {
        if self.is_kept {
            self.custody().lend();
        }
    }

    /// Returns true if the parent has nothing of it any more.
    fn is_back(&self) -> bool {
        planted!("segment_used_while_lent" => return true);
        self.custody().is_back()
    }
}

/// All such segments of one worker.
#[derive(Debug, Default)]
pub(super) struct OwnSegments {
    /// Batches that the parent may not have taken: the position of each in the ring, and its bytes.
    sent: VecDeque<(u64, u64)>,
    /// INVARIANT: at most [`MOST_KEPT`], each within the worker's share.
    kept: Vec<OwnSegment>,
}

impl OwnSegments {
    /// Returns true if none counts against the share, now or later.
    pub(super) fn is_empty(&self) -> bool {
        self.sent.is_empty() && self.kept.is_empty()
    }

    /// Returns true if the parent has taken all, as of the last [`count`](Self::count).
    pub(super) fn are_taken(&self) -> bool {
        self.sent.is_empty()
    }

    /// Returns the bytes that count against the share: of batches that the parent has not taken, and of segments that came back.
    pub(super) fn count(&mut self, is_untaken: impl Fn(u64) -> bool) -> u64 {
        self.sent.retain(|&(at, _)| is_untaken(at));
        let back = self.kept.iter().filter(|own| own.is_back()).map(OwnSegment::bytes);
        back.chain(self.sent.iter().map(|&(_, bytes)| bytes)).sum()
    }

    /// Takes a kept segment that came back, if one has between `bytes` and twice as many.
    pub(super) fn take(&mut self, bytes: u64) -> Option<OwnSegment> {
        let fits =
            |own: &OwnSegment| (bytes..=bytes.saturating_mul(2)).contains(&own.bytes()) && own.is_back();
        let at = self.kept.iter().position(fits)?;
        Some(self.kept.swap_remove(at))
    }

    /// Makes a segment, which is kept if there is a place and it is within the share.
    ///
    /// # Errors
    /// As [`Segment::create`].
    pub(super) fn create(&self, bytes: u64, share: u64) -> Result<OwnSegment> {
        let (segment, fd) = Segment::create("ringloader-batch", bytes)?;
        let is_kept = self.kept.len() < MOST_KEPT && bytes <= share;
        Ok(OwnSegment { segment, fd, is_kept })
    }

    /// Keeps one that was not used.
    pub(super) fn put_back(&mut self, own: Option<OwnSegment>) {
        self.kept.extend(own);
    }

    /// Notes that a batch was committed at `at` of the ring.
    pub(super) fn sent(&mut self, at: u64, own: OwnSegment) {
        self.sent.push_back((at, own.bytes()));
        if own.is_kept {
            self.kept.push(own);
        }
    }

    /// Gives what came back to the system, but for `room` bytes. Returns true if that was anything.
    pub(super) fn give_back(&mut self, mut room: u64) -> bool {
        let before = self.kept.len();
        self.kept.retain(|own| {
            if !own.is_back() {
                return true;
            }
            if let Some(rest) = room.checked_sub(own.bytes()) {
                room = rest;
                return true;
            }
            // A child that the dataset has forked has a mapping, too. Refused, the pages go with the mappings.
            let _ = own.segment.punch(0, own.bytes());
            false
        });
        self.kept.len() < before
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::os::page::page_size;

    const MIB: u64 = 1 << 20;

    /// One after another: each is committed, at its number.
    fn sent(owns: &mut OwnSegments, bytes: u64, share: u64) -> OwnedFd {
        let own = owns.take(bytes).unwrap_or_else(|| owns.create(bytes, share).unwrap());
        own.segment.copy_in(0, &vec![7; own.bytes() as usize - 8]).unwrap();
        own.lend();
        let fd = own.fd.try_clone().unwrap();
        owns.sent(0, own);
        fd
    }

    /// The parent drops the batch.
    fn drop_batch(fd: &OwnedFd) -> bool {
        Custody::new(Segment::attach(fd.as_fd()).unwrap().last_word().unwrap()).give_back()
    }

    fn resident(fd: &OwnedFd) -> u64 {
        rustix::fs::fstat(fd).unwrap().st_blocks as u64 * 512
    }

    fn inode(fd: &OwnedFd) -> u64 {
        rustix::fs::fstat(fd).unwrap().st_ino
    }

    #[test]
    fn what_came_back_counts_until_it_is_used_or_given_back() {
        let mut owns = OwnSegments::default();
        let first = sent(&mut owns, MIB, 4 * MIB);
        assert_eq!(owns.count(|_| true), MIB);
        assert_eq!(owns.count(|_| false), 0, "the user's");
        assert!(owns.take(MIB).is_none() && !owns.give_back(0));
        assert!(drop_batch(&first));
        assert_eq!(owns.count(|_| false), MIB);
        assert_eq!(inode(&sent(&mut owns, MIB, 4 * MIB)), inode(&first));
        assert_eq!(owns.count(|_| false), 0);
        assert!(drop_batch(&first));
        assert!(!owns.give_back(MIB) && owns.give_back(MIB - 1) && !owns.give_back(0));
        assert_eq!((owns.count(|_| false), resident(&first)), (0, 0));
    }

    #[test]
    fn a_few_are_kept_that_the_share_holds() {
        for (bytes, kept) in [(MIB, MOST_KEPT), (4 * MIB, MOST_KEPT), (5 * MIB, 0)] {
            let mut owns = OwnSegments::default();
            let batches: Vec<_> = (0..5).map(|_| sent(&mut owns, bytes, 4 * MIB)).collect();
            assert_eq!(owns.kept.len(), kept);
            assert_eq!(batches.iter().filter(|fd| drop_batch(fd)).count(), kept);
        }
    }

    #[test]
    fn a_batch_goes_into_a_segment_of_about_its_size() {
        let mut owns = OwnSegments::default();
        let fd = sent(&mut owns, MIB, 4 * MIB);
        assert!(drop_batch(&fd));
        assert!(owns.take(MIB + page_size()).is_none() && owns.take(MIB / 2 - page_size()).is_none());
        assert!(owns.take(MIB / 2).is_some());
    }
}
