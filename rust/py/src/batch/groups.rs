//! The storages of a batch: the core decides which leaves share one and where it goes; here are the objects.

use std::ops::Range;

use pyo3::prelude::*;
use ringloader_core::batch::alias::{self, Leaves, Sharing};
use ringloader_core::batch::{MetaWriter, StorageRecord};
use ringloader_core::number::{u32_from, usize_from};
use ringloader_core::testing::fault::fault;

use super::leaves::{Drafts, LeafKind};
use super::write::CopyRange;
use crate::gil::runs_others;
use crate::objects::CollectorOff;
use crate::torch::names::Torch;

/// The leaves of a batch, as the core asks for them.
struct BatchLeaves<'a, 'py> {
    py: Python<'py>,
    drafts: &'a mut Drafts,
}

impl Leaves for BatchLeaves<'_, '_> {
    type Error = PyErr;

    #[inline]
    fn count(&self) -> u32 {
        u32_from(self.drafts.leaves.len() as u64)
    }

    #[inline]
    fn bytes(&self, leaf: u32) -> (usize, u64) {
        let leaf = &self.drafts.leaves[leaf as usize];
        (leaf.address, leaf.len)
    }

    #[inline]
    fn sharing(&self, leaf: u32) -> Sharing {
        match self.drafts.leaves[leaf as usize].kind {
            LeafKind::Tensor { .. } => Sharing::Part,
            LeafKind::Storage => Sharing::Whole,
            LeafKind::Array { .. } | LeafKind::Bytes => Sharing::Never,
        }
    }

    #[inline]
    fn alignment(&self, leaf: u32) -> usize {
        self.drafts.leaves[leaf as usize].alignment
    }

    fn storage(&mut self, leaf: u32) -> PyResult<Option<usize>> {
        self.drafts.storage(self.py, leaf)
    }
}

/// The storages of a batch. Cleared, it keeps its memory for the next one.
#[derive(Default)]
pub(crate) struct Groups {
    groups: alias::Groups,
    /// For each group, true if its memory stays where it is while its owner is held. An array's may move: other code
    /// may resize the array.
    keeps: Vec<bool>,
    copies: Vec<CopyRange>,
    has_held: bool,
    /// For each group, true if its bytes are copied, by the last [`lay_out`](Self::lay_out).
    is_copied: Vec<bool>,
}

impl Groups {
    /// Groups the leaves of `drafts` and adds storages and leaves to `meta`. What lies in `filled`, the part of a slot
    /// that was allocated, stays there.
    ///
    /// # Errors
    /// The error that torch raises when it is asked for a storage.
    pub(crate) fn form(
        &mut self,
        py: Python<'_>,
        drafts: &mut Drafts,
        filled: Range<usize>,
        meta: &mut MetaWriter,
    ) -> PyResult<()> {
        self.clear();
        self.groups.form(&mut BatchLeaves { py, drafts }, filled)?;
        for group in self.groups.groups() {
            let first = &drafts.leaves[group.first as usize];
            self.keeps.push(!matches!(first.kind, LeafKind::Array { .. }));
            meta.add_storage(StorageRecord { offset: 0, nbytes: group.len });
        }
        let empty = self.groups.has_empty().then(|| meta.add_storage(StorageRecord { offset: 0, nbytes: 0 }));
        for (leaf, group) in drafts.leaves.iter().zip(self.groups.of_leaves()) {
            let (storage, offset) = match group {
                Some(group) => (group, (leaf.address - self.groups.groups()[group as usize].start) as u64),
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
        self.keeps.clear();
        self.copies.clear();
    }

    /// Gives each storage that is not in the slot an offset after `bump` of the slot. If `bump` is `None`, all storages
    /// get offsets in a segment of their own. Returns the start of the table, which comes after all storages.
    #[inline]
    pub(crate) fn lay_out(&mut self, meta: &mut MetaWriter, bump: Option<u64>) -> u64 {
        let Self { groups, keeps, copies, is_copied, .. } = self;
        copies.clear();
        is_copied.clear();
        is_copied.resize(groups.groups().len(), false);
        let end = groups.assign_offsets(bump, |number, group, placed| {
            if placed.is_copied {
                let keeps = keeps[number as usize];
                is_copied[number as usize] = true;
                copies.push(CopyRange { from: group.start, to: placed.offset, len: group.len, keeps });
            }
            meta.set_storage(number, StorageRecord { offset: placed.offset, nbytes: group.len });
        });
        self.has_held = runs_others(usize_from(end - bump.unwrap_or(0)));
        end.next_multiple_of(8)
    }

    /// Returns true if other threads may run while any of the copies is made.
    pub(crate) fn has_held(&self) -> bool {
        self.has_held
    }

    /// Holds the storages that are copied while other threads may run, because their tensors may get other storages
    /// meanwhile. Other changes to a storage are not prevented: torch lets a thread make them while torch itself copies
    /// the storage, too.
    ///
    /// # Errors
    /// The error that torch raises when it is asked for a storage.
    pub(crate) fn hold(&self, py: Python<'_>, drafts: &mut Drafts) -> PyResult<()> {
        let torch = Torch::get(py)?;
        for (group, is_copied) in self.groups.groups().iter().zip(&self.is_copied) {
            if *is_copied && runs_others(usize_from(group.len)) {
                drafts.hold_storage(torch, py, group.first)?;
            }
        }
        Ok(())
    }

    /// Checks that the tensors which are copied lie within their storages. Tensors in the slot always do.
    ///
    /// # Errors
    /// `RuntimeError` if one does not.
    pub(crate) fn check_copied(&self, py: Python<'_>, drafts: &mut Drafts) -> PyResult<()> {
        if self.copies.is_empty() {
            return Ok(());
        }
        let torch = Torch::get(py)?;
        let _collector_off =
            (torch.collects_anywhere && !fault("collector_on")).then(|| CollectorOff::new(py));
        if !torch.is_storage_asked_directly(py) {
            drafts.disturb();
        }
        for (leaf, group) in self.groups.of_leaves().enumerate() {
            if group.is_some_and(|group| self.is_copied[group as usize]) {
                drafts.check_bounds(torch, py, u32_from(leaf as u64))?;
            }
        }
        Ok(())
    }

    /// Returns the ranges that have to be copied, by the last [`lay_out`](Self::lay_out).
    pub(crate) fn copies(&self) -> &[CopyRange] {
        &self.copies
    }

    /// Returns the number of storages that lie in the slot already.
    pub(crate) fn in_place(&self) -> u64 {
        self.groups.in_place()
    }
}
