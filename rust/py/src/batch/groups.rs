//! Which leaves share memory, and where it goes.
//!
//! Tensors of one storage that overlap become one storage, so that they overlap on the other side too. A
//! tensor that is alone carries its own elements, not its whole storage. As with torch, the storage counts:
//! tensors over the same memory by way of arrays arrive apart.

use std::cmp::Reverse;

use pyo3::prelude::*;
use ringloader_core::batch::wire::STORAGE_ALIGN;
use ringloader_core::batch::{MetaWriter, StorageRecord};
use ringloader_core::transport::port::Commit;

use super::leaves::{Drafts, LeafKind};
use super::write::CopyRange;
use crate::gil::DETACH;
use crate::torch::names::Torch;

/// Memory that becomes one storage.
struct Group {
    start: usize,
    len: u64,
    aliases: bool,
    /// Whether the memory stays while what has it is held: an array may be resized by others that have it.
    keeps: bool,
    /// Which of torch's storages it is part of, if any; known once another leaf overlaps it.
    identity: Option<Option<usize>>,
    /// The leaf that it began with.
    first: u32,
    /// Whether it must be copied: it begins within one of another storage.
    is_apart: bool,
    /// Where it already lies in the slot.
    in_place: Option<u64>,
}

/// The storages of a batch. Cleared, it keeps its memory for the next one.
#[derive(Default)]
pub(crate) struct Groups {
    groups: Vec<Group>,
    copies: Vec<CopyRange>,
    /// Each leaf's group; [`NONE`] without bytes.
    group_of: Vec<u32>,
    /// Leaves with bytes, in the order of their addresses, a longer one before those that it covers.
    order: Vec<(usize, Reverse<u64>, u32)>,
    /// The number that each group gets, in the order of their first leaves: wherever malloc put the tensors this
    /// time, storages of the same batch lie at the same places, and its table repeats.
    numbers: Vec<u32>,
    has_large: bool,
}

const NONE: u32 = u32::MAX;

impl Groups {
    /// Groups the leaves of `drafts` and adds storages and leaves to `meta`.
    ///
    /// # Errors
    /// What torch raises when it is asked for a storage.
    pub(crate) fn form(
        &mut self,
        py: Python<'_>,
        drafts: &mut Drafts,
        commit: &Commit<'_>,
        meta: &mut MetaWriter,
    ) -> PyResult<()> {
        self.clear();
        drafts.forget_moves();
        self.join(py, drafts)?;
        self.number();
        let filled = commit.filled();
        for group in &mut self.groups {
            let end = group.start + group.len as usize;
            if group.aliases && !group.is_apart && filled.start <= group.start && end <= filled.end {
                // Storages begin at multiples of 64. What lies before, in the same chunk, comes along.
                let offset = (group.start - filled.start) as u64;
                let before = offset % STORAGE_ALIGN;
                group.start -= before as usize;
                group.len += before;
                group.in_place = Some(offset - before);
            }
            meta.add_storage(StorageRecord { offset: 0, nbytes: group.len });
        }
        let empty =
            (self.group_of.contains(&NONE)).then(|| meta.add_storage(StorageRecord { offset: 0, nbytes: 0 }));
        for (leaf, &group) in drafts.leaves.iter().zip(&self.group_of) {
            let (storage, offset) = match self.groups.get(group as usize) {
                Some(found) => (group, (leaf.address - found.start) as u64),
                None => (empty.unwrap_or(0), 0),
            };
            match &leaf.kind {
                &LeafKind::Tensor { dtype, dims } => {
                    meta.add_tensor(storage, offset, dtype, drafts.shape(dims), drafts.strides(dims))
                }
                LeafKind::Array { flags, itemsize, tag, shape } => {
                    meta.add_array(storage, offset, *itemsize, tag, *flags, shape)
                }
                LeafKind::Storage => meta.add_storage_leaf(storage),
                LeafKind::Bytes => meta.add_bytes(storage),
            };
        }
        Ok(())
    }

    /// Lets go of the batch.
    pub(crate) fn clear(&mut self) {
        self.groups.clear();
        self.copies.clear();
        self.group_of.clear();
        self.order.clear();
        self.numbers.clear();
    }

    /// Makes the groups, in the order of their addresses.
    fn join(&mut self, py: Python<'_>, drafts: &mut Drafts) -> PyResult<()> {
        let leaves = &drafts.leaves;
        let with_bytes = leaves.iter().zip(0..).filter(|(leaf, _)| leaf.len > 0);
        self.order.extend(with_bytes.map(|(leaf, number)| (leaf.address, Reverse(leaf.len), number)));
        self.order.sort_unstable();
        self.group_of.resize(leaves.len(), NONE);
        // Where the groups that tensors may join end.
        let mut reach = 0;
        for at in 0..self.order.len() {
            let (start, Reverse(len), number) = self.order[at];
            let aliases = drafts.leaves[number as usize].kind.aliases();
            let end = start + len as usize;
            let overlaps = aliases && start < reach;
            let joined = if overlaps { self.overlapped(py, drafts, start, number)? } else { None };
            if aliases {
                reach = reach.max(end);
            }
            if let Some(joined) = joined {
                self.group_of[number as usize] = joined;
                let group = &mut self.groups[joined as usize];
                group.len = group.len.max((end - group.start) as u64);
                continue;
            }
            self.group_of[number as usize] = self.groups.len() as u32;
            let (identity, first, is_apart, in_place) = (None, number, overlaps, None);
            let keeps = !matches!(drafts.leaves[number as usize].kind, LeafKind::Array { .. });
            self.groups.push(Group { start, len, aliases, keeps, identity, first, is_apart, in_place });
        }
        Ok(())
    }

    /// The group of the same storage that a leaf begins inside of.
    fn overlapped(
        &mut self,
        py: Python<'_>,
        drafts: &mut Drafts,
        start: usize,
        number: u32,
    ) -> PyResult<Option<u32>> {
        let leaf = &drafts.leaves[number as usize];
        let (alignment, is_storage) = (leaf.alignment, matches!(leaf.kind, LeafKind::Storage));
        let mut identity = None;
        for (at, group) in self.groups.iter_mut().enumerate().rev() {
            let may_join = group.aliases
                && start < group.start + group.len as usize
                && (start - group.start).is_multiple_of(alignment)
                // A storage object is its group: it cannot begin inside one.
                && (!is_storage || start == group.start);
            if !may_join {
                continue;
            }
            let mine = match identity {
                Some(known) => known,
                None => *identity.insert(drafts.storage(py, number)?),
            };
            let theirs = match group.identity {
                Some(known) => known,
                None => *group.identity.insert(drafts.storage(py, group.first)?),
            };
            if mine.is_some() && mine == theirs {
                return Ok(Some(at as u32));
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

    /// Puts the storages that are not in place behind `bump` of a slot, or all of them at the start of
    /// a segment of their own if `bump` is `None`. Returns where the table begins, which is behind
    /// everything else.
    pub(crate) fn place(&mut self, meta: &mut MetaWriter, bump: Option<u64>) -> u64 {
        let start = bump.unwrap_or(0);
        let mut end = start;
        self.copies.clear();
        for (number, group) in (0..).zip(&self.groups) {
            let offset = match group.in_place {
                Some(offset) if bump.is_some() => offset,
                _ => {
                    let to = end.next_multiple_of(STORAGE_ALIGN);
                    end = to + group.len;
                    let (from, len, keeps) = (group.start, group.len, group.keeps);
                    self.copies.push(CopyRange { from, to, len, keeps });
                    to
                }
            };
            meta.set_storage(number, StorageRecord { offset, nbytes: group.len });
        }
        self.has_large = end - start >= DETACH as u64;
        end.next_multiple_of(8)
    }

    /// Whether any of the copies may be one that is made without the interpreter.
    pub(crate) fn has_large(&self) -> bool {
        self.has_large
    }

    /// Holds the storages that are copied without the interpreter: their tensors may get others meanwhile. What else
    /// torch lets a thread do to a storage it lets it do while torch copies it, too.
    ///
    /// # Errors
    /// What torch raises when it is asked for a storage.
    pub(crate) fn hold_large(&self, py: Python<'_>, drafts: &mut Drafts) -> PyResult<()> {
        let torch = Torch::get(py)?;
        for group in self.groups.iter().filter(|group| group.len >= DETACH as u64) {
            drafts.anchor(torch, py, group.first)?;
        }
        Ok(())
    }

    /// What has to be copied, by the last [`place`](Self::place).
    pub(crate) fn copies(&self) -> &[CopyRange] {
        &self.copies
    }

    /// How many storages lie in the slot already.
    pub(crate) fn in_place(&self) -> u64 {
        self.groups.iter().filter(|group| group.in_place.is_some()).count() as u64
    }
}
