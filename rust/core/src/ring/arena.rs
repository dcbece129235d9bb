//! Places the bytes of tasks: ranges of a sparse region next to the ring, freed in the order of the ring.
//!
//! The allocator is private state of the producer; only its offsets reach shared memory. A range is
//! the lowest that is free, so a stream of small tasks keeps touching the same few pages of a
//! region that is far larger.

use std::collections::VecDeque;

use super::cursor;

/// All offsets are multiples of this.
const ALIGN: u64 = 8;

/// Bytes `start .. end` of the region.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Range {
    start: u64,
    end: u64,
}

/// An allocator of byte ranges that are freed first in, first out, as the consumer of a ring moves
/// on.
///
/// One reservation is open at a time: [`reserve`](Self::reserve), write the bytes, push the
/// descriptor, then [`commit`](Self::commit) with its position. A reservation that is not committed
/// is given up by the next one.
#[derive(Debug)]
pub struct ByteFifo {
    region_len: u64,
    /// Committed ranges with the ring position that frees each. INVARIANT: no position precedes the
    /// one before it.
    by_position: VecDeque<(u64, Range)>,
    /// All ranges of `by_position`, by offset. INVARIANT: ascending, disjoint, not empty, within the region.
    by_offset: Vec<Range>,
    /// The last reservation, if it was not committed: disjoint from all ranges above.
    open: Option<Range>,
}

impl ByteFifo {
    /// An allocator of the bytes `0 .. region_len`.
    pub fn new(region_len: u64) -> Self {
        Self { region_len, by_position: VecDeque::new(), by_offset: Vec::new(), open: None }
    }

    /// Returns true if `len` bytes can ever be reserved. They can be once nothing is outstanding.
    pub fn fits(&self, len: u64) -> bool {
        rounded(len).is_some_and(|len| len <= self.region_len)
    }

    /// The offset of `len` bytes that no other task has, aligned to 8, or `None` without room at
    /// present.
    pub fn reserve(&mut self, len: u64) -> Option<u64> {
        self.open = None;
        let len = rounded(len)?;
        let mut start = 0;
        for range in &self.by_offset {
            if range.start - start >= len {
                break;
            }
            start = range.end;
        }
        if self.region_len.checked_sub(start)? < len {
            return None;
        }
        self.open = Some(Range { start, end: start + len });
        Some(start)
    }

    /// Keeps the open reservation until the consumer has passed `position`, which does not precede
    /// that of an earlier commit. Without an open reservation nothing is kept: a task without
    /// bytes.
    pub fn commit(&mut self, position: u64) {
        debug_assert!(!self.by_position.back().is_some_and(|(last, _)| cursor::precedes(position, *last)));
        let Some(range) = self.open.take() else {
            return;
        };
        let at = self.by_offset.partition_point(|other| other.start < range.start);
        self.by_offset.insert(at, range);
        self.by_position.push_back((position, range));
    }

    /// Frees all that was committed with a position before `head`, the consumer's position as the
    /// ring's producer has read it.
    pub fn reclaim(&mut self, head: u64) {
        while let Some((position, range)) = self.by_position.front() {
            if !cursor::precedes(*position, head) {
                break;
            }
            let at = self.by_offset.partition_point(|other| other.start < range.start);
            self.by_offset.remove(at);
            self.by_position.pop_front();
        }
    }

    /// Returns true if the bytes of the task at `position` were not reclaimed.
    pub fn holds(&self, position: u64) -> bool {
        self.by_position.iter().any(|(committed, _)| *committed == position)
    }
}

/// The bytes that `len` bytes take: no range is empty, so that every offset belongs to one range.
fn rounded(len: u64) -> Option<u64> {
    len.max(1).checked_next_multiple_of(ALIGN)
}

#[cfg(all(test, not(ringloader_loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn outstanding(fifo: &ByteFifo) -> u64 {
        fifo.by_offset.iter().map(|range| range.end - range.start).sum()
    }

    #[test]
    fn a_stream_of_small_tasks_stays_in_the_same_bytes() {
        let mut fifo = ByteFifo::new(1 << 30);
        for position in 0..10_000 {
            let offset = fifo.reserve(1000).expect("room");
            assert!(offset + 1000 <= 3 * 1000, "position {position} went to {offset}");
            fifo.commit(position);
            fifo.reclaim(position.saturating_sub(1)); // two tasks stay outstanding, a third is on its way
        }
    }

    #[test]
    fn an_open_reservation_is_given_up_by_the_next() {
        let mut fifo = ByteFifo::new(64);
        assert_eq!(fifo.reserve(64), Some(0));
        assert_eq!(fifo.reserve(64), Some(0), "the first was never committed");
        fifo.commit(0);
        assert_eq!(fifo.reserve(1), None);
        fifo.commit(1);
        assert_eq!(outstanding(&fifo), 64, "nothing was reserved for position 1");
    }

    #[test]
    fn lengths_at_the_edge() {
        let mut fifo = ByteFifo::new(20);
        assert!(fifo.fits(0) && fifo.fits(16) && !fifo.fits(17) && !fifo.fits(u64::MAX));
        assert_eq!(fifo.reserve(u64::MAX), None);
        assert_eq!(fifo.reserve(17), None, "24 bytes rounded, 20 in the region");
        assert_eq!(fifo.reserve(0), Some(0));
        fifo.commit(0);
        assert_eq!(fifo.reserve(0), Some(8), "empty ranges have places of their own");
    }

    #[test]
    fn is_right_across_the_wrap_of_positions() {
        let mut fifo = ByteFifo::new(16);
        fifo.reserve(8);
        fifo.commit(u64::MAX);
        fifo.reserve(8);
        fifo.commit(0);
        fifo.reclaim(0);
        assert_eq!(fifo.reserve(8), Some(0), "the position before the wrap is free, the one after it is not");
    }

    #[derive(Debug, Clone)]
    enum Step {
        Reserve { len: u64, commit: bool },
        Consume(usize),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (prop_oneof![0..40_u64, 0..300_u64], prop::bool::weighted(0.9))
                .prop_map(|(len, commit)| Step::Reserve { len, commit }),
            (0..4_usize).prop_map(Step::Consume),
        ]
    }

    /// The lowest aligned offset at which `len` bytes touch none of the live ranges, by trying them
    /// all.
    fn lowest(live: &VecDeque<(u64, u64)>, region: u64, len: u64) -> Option<u64> {
        (0..region).step_by(8).find(|start| {
            start + len <= region
                && live.iter().all(|(other, taken)| start + len <= *other || other + taken <= *start)
        })
    }

    proptest! {
        #[test]
        fn agrees_with_trying_every_offset(
            region in 0..600_u64, first in prop_oneof![Just(0), Just(u64::MAX - 5)],
            steps in prop::collection::vec(step(), 0..120),
        ) {
            let mut fifo = ByteFifo::new(region);
            let mut live = VecDeque::new();
            let (mut tail, mut head): (u64, u64) = (first, first);
            for step in steps {
                match step {
                    Step::Reserve { len, commit } => {
                        let taken = len.max(1).next_multiple_of(8);
                        let offset = fifo.reserve(len);
                        prop_assert_eq!(offset, lowest(&live, region, taken));
                        prop_assert!(fifo.fits(len) || offset.is_none());
                        prop_assert!(!fifo.fits(len) || offset.is_some() || !live.is_empty());
                        if let (Some(offset), true) = (offset, commit) {
                            fifo.commit(tail);
                            live.push_back((offset, taken));
                            tail = tail.wrapping_add(1);
                        }
                    }
                    Step::Consume(count) => {
                        let count = count.min(live.len());
                        live.drain(..count);
                        head = head.wrapping_add(count as u64);
                        fifo.reclaim(head);
                    }
                }
                prop_assert_eq!(outstanding(&fifo), live.iter().map(|(_, taken)| taken).sum::<u64>());
            }
        }
    }
}
