//! Groups leaves that share memory into storages, and gives each storage a place in the batch.
//!
//! Tensors of one storage that overlap become one storage, so that they overlap on the other side too. A
//! tensor that is alone carries its own elements, not its whole storage. As with torch, the storage counts:
//! tensors over the same memory by way of arrays arrive apart.
#![forbid(unsafe_code)]

use crate::number::{u32_from, usize_from};
use std::cmp::Reverse;
use std::ops::Range;

use super::wire::STORAGE_ALIGN;

/// The ways in which a leaf may share memory with others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sharing {
    /// Shares nothing, as torch does not keep such sharing: arrays and `bytes`.
    Never,
    /// Shares a part of its storage: tensors.
    Part,
    /// Shares a whole storage, which cannot begin inside another.
    Whole,
}

/// The leaves of a batch, and the memory that each of them covers.
pub trait Leaves {
    /// The error for a storage that cannot be found.
    type Error;

    /// Returns the number of leaves.
    fn count(&self) -> u32;

    /// Returns the address of a leaf's bytes, and their number.
    fn bytes(&self, leaf: u32) -> (usize, u64);

    /// Returns the way in which a leaf may share its bytes.
    fn sharing(&self, leaf: u32) -> Sharing;

    /// Returns the number that a leaf's offset in a storage must be a multiple of.
    fn alignment(&self, leaf: u32) -> usize;

    /// Returns the number of the storage that a leaf lies in, if it lies in any. Called only for leaves that may share
    /// memory and overlap others.
    ///
    /// # Errors
    /// Fails if the storage cannot be found.
    fn storage(&mut self, leaf: u32) -> Result<Option<usize>, Self::Error>;
}

/// Memory that becomes one storage.
#[derive(Debug)]
pub struct Group {
    /// Address of the memory.
    pub start: usize,
    /// Length in bytes.
    pub len: u64,
    /// The first leaf of the group.
    pub first: u32,
    shares: bool,
    /// Number of the storage that the group is part of, if any. Known once another leaf overlaps the group.
    identity: Option<Option<usize>>,
    /// True if the group must be copied, because it begins inside a group of another storage.
    is_apart: bool,
    /// Offset in the slot, if the memory lies there already.
    in_place: Option<u64>,
}

/// One storage's place in the batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StorageOffset {
    /// Offset of the storage's first byte.
    pub offset: u64,
    /// True if the storage's bytes must be copied there.
    pub is_copied: bool,
}

/// The storages of a batch. Cleared, it keeps its memory for the next one.
#[derive(Debug, Default)]
pub struct Groups {
    groups: Vec<Group>,
    /// Each leaf's group; [`NONE`] without bytes.
    group_of: Vec<u32>,
    /// Leaves with bytes, in the order of their addresses; a longer leaf comes before the leaves that it covers.
    order: Vec<(usize, Reverse<u64>, u32)>,
    /// The number that each group gets, in the order of their first leaves: wherever malloc put the tensors this
    /// time, storages of the same batch lie at the same places, and its table repeats.
    numbers: Vec<u32>,
}

const NONE: u32 = u32::MAX;

impl Groups {
    /// Groups `leaves`. Shared memory inside `filled`, the part of a slot that was allocated, stays in place.
    ///
    /// # Errors
    /// The errors of [`Leaves::storage`].
    pub fn form<L: Leaves>(&mut self, leaves: &mut L, filled: Range<usize>) -> Result<(), L::Error> {
        self.clear();
        self.join(leaves)?;
        self.number();
        for group in &mut self.groups {
            let end = group.start + usize_from(group.len);
            if group.shares && !group.is_apart && filled.start <= group.start && end <= filled.end {
                // Storages begin at multiples of 64. What lies before, in the same chunk, comes along.
                let offset = (group.start - filled.start) as u64;
                let before = offset % STORAGE_ALIGN;
                group.start -= before as usize;
                group.len += before;
                group.in_place = Some(offset - before);
            }
        }
        Ok(())
    }

    /// Lets go of the batch.
    pub fn clear(&mut self) {
        self.groups.clear();
        self.group_of.clear();
        self.order.clear();
        self.numbers.clear();
    }

    /// The storages, by their numbers.
    #[must_use]
    pub fn groups(&self) -> &[Group] {
        &self.groups
    }

    /// The number of each leaf's storage, in the order of the leaves; `None` without bytes.
    pub fn of_leaves(&self) -> impl Iterator<Item = Option<u32>> {
        self.group_of.iter().map(|&group| (group != NONE).then_some(group))
    }

    /// Returns true if any leaf has no bytes.
    #[must_use]
    pub fn has_empty(&self) -> bool {
        self.group_of.contains(&NONE)
    }

    /// Assigns offsets to the storages and calls `each` with them. Storages that are not in place follow at `bump` of
    /// the slot. If `bump` is `None`, all storages go into a segment of their own, from its start. Returns their end.
    #[inline]
    pub fn assign_offsets(&self, bump: Option<u64>, mut each: impl FnMut(u32, &Group, StorageOffset)) -> u64 {
        let mut end = bump.unwrap_or(0);
        for (number, group) in (0..).zip(&self.groups) {
            let assigned = match group.in_place {
                Some(offset) if bump.is_some() => StorageOffset { offset, is_copied: false },
                _ => {
                    let offset = end.next_multiple_of(STORAGE_ALIGN);
                    end = offset + group.len;
                    StorageOffset { offset, is_copied: true }
                }
            };
            each(number, group, assigned);
        }
        end
    }

    /// Returns the number of storages that lie in the slot already.
    #[must_use]
    pub fn in_place(&self) -> u64 {
        self.groups.iter().filter(|group| group.in_place.is_some()).count() as u64
    }

    /// Makes the groups, in the order of their addresses.
    fn join<L: Leaves>(&mut self, leaves: &mut L) -> Result<(), L::Error> {
        let count = leaves.count();
        let with_bytes = (0..count).map(|leaf| (leaves.bytes(leaf), leaf)).filter(|((_, len), _)| *len > 0);
        self.order.extend(with_bytes.map(|((address, len), leaf)| (address, Reverse(len), leaf)));
        self.order.sort_unstable();
        self.group_of.resize(count as usize, NONE);
        // The end of the groups so far that tensors may join.
        let mut reach = 0;
        for at in 0..self.order.len() {
            let (start, Reverse(len), leaf) = self.order[at];
            let shares = leaves.sharing(leaf) != Sharing::Never;
            let end = start + usize_from(len);
            let overlaps = shares && start < reach;
            let joined = if overlaps { self.overlapped(leaves, start, leaf)? } else { None };
            if shares {
                reach = reach.max(end);
            }
            if let Some(joined) = joined {
                self.group_of[leaf as usize] = joined;
                let group = &mut self.groups[joined as usize];
                group.len = group.len.max((end - group.start) as u64);
                continue;
            }
            self.group_of[leaf as usize] = u32_from(self.groups.len() as u64);
            let (identity, first, is_apart, in_place) = (None, leaf, overlaps, None);
            self.groups.push(Group { start, len, first, shares, identity, is_apart, in_place });
        }
        Ok(())
    }

    /// The group of the same storage that a leaf begins inside of.
    fn overlapped<L: Leaves>(
        &mut self,
        leaves: &mut L,
        start: usize,
        leaf: u32,
    ) -> Result<Option<u32>, L::Error> {
        let (alignment, is_whole) = (leaves.alignment(leaf), leaves.sharing(leaf) == Sharing::Whole);
        let mut identity = None;
        for (at, group) in self.groups.iter_mut().enumerate().rev() {
            let may_join = group.shares
                && start < group.start + usize_from(group.len)
                && (start - group.start).is_multiple_of(alignment)
                // A whole storage is its group: it cannot begin inside one.
                && (!is_whole || start == group.start);
            if !may_join {
                continue;
            }
            let mine = match identity {
                Some(known) => known,
                None => *identity.insert(leaves.storage(leaf)?),
            };
            let theirs = match group.identity {
                Some(known) => known,
                None => *group.identity.insert(leaves.storage(group.first)?),
            };
            if mine.is_some() && mine == theirs {
                return Ok(Some(u32_from(at as u64)));
            }
        }
        Ok(None)
    }

    /// Puts the groups in the order of their first leaves.
    fn number(&mut self) {
        self.numbers.resize(self.groups.len(), NONE);
        let mut next = 0;
        for group in self.group_of.iter_mut().filter(|group| **group != NONE) {
            let number = &mut self.numbers[*group as usize];
            if *number == NONE {
                *number = next;
                next += 1;
            }
            *group = *number;
        }
        // Each swap puts one group where it belongs.
        for at in 0..self.groups.len() {
            while self.numbers[at] as usize != at {
                let to = self.numbers[at] as usize;
                self.groups.swap(at, to);
                self.numbers.swap(at, to);
            }
        }
    }
}

#[cfg(all(test, not(ringloader_loom)))]
mod tests;
