//! Which leaves share memory, and where it goes.
//!
//! Tensors that overlap become one storage, so that they overlap on the other side too. A tensor
//! that is alone carries its own elements, not its whole storage.

use ringloader_core::batch::wire::STORAGE_ALIGN;
use ringloader_core::batch::{MetaWriter, StorageRecord};
use ringloader_core::port::Commit;

use super::encode::{Drafts, LeafKind};
use super::objects::Copy;

/// Memory that becomes one storage.
struct Group {
    start: usize,
    len: u64,
    aliases: bool,
    /// Where it already lies in the slot.
    in_place: Option<u64>,
}

/// The storages of a batch.
pub(crate) struct Groups {
    groups: Vec<Group>,
}

/// Where a batch's bytes go: its storages, then the table.
pub(crate) struct Plan {
    pub(crate) copies: Vec<Copy>,
    /// Where the table begins, which is behind everything else.
    pub(crate) meta_at: u64,
}

impl Groups {
    /// Groups the leaves of `drafts` and adds storages and leaves to `meta`.
    pub(crate) fn new(drafts: &Drafts, commit: &Commit<'_>, meta: &mut MetaWriter) -> Self {
        let leaves = &drafts.leaves;
        let mut order: Vec<usize> = (0..leaves.len()).filter(|&i| leaves[i].len > 0).collect();
        order.sort_by_key(|&i| (leaves[i].address, std::cmp::Reverse(leaves[i].len)));

        let mut groups: Vec<Group> = Vec::with_capacity(order.len());
        let mut group_of = vec![usize::MAX; leaves.len()];
        // The group that tensors may join: others lie between in the order of addresses.
        let mut current: Option<usize> = None;
        for i in order {
            let leaf = &leaves[i];
            let end = leaf.address + leaf.len as usize;
            let joined = current.filter(|&at| {
                let group: &Group = &groups[at];
                leaf.kind.aliases()
                    && leaf.address < group.start + group.len as usize
                    && (leaf.address - group.start).is_multiple_of(leaf.alignment)
                    // A storage object is its group: it cannot begin inside one.
                    && (!matches!(leaf.kind, LeafKind::Storage) || leaf.address == group.start)
            });
            if let Some(at) = joined {
                let group = &mut groups[at];
                group.len = group.len.max((end - group.start) as u64);
                group_of[i] = at;
                continue;
            }
            group_of[i] = groups.len();
            if leaf.kind.aliases() {
                current = Some(groups.len());
            }
            groups.push(Group {
                start: leaf.address,
                len: leaf.len,
                aliases: leaf.kind.aliases(),
                in_place: None,
            });
        }

        for group in &mut groups {
            let Some(offset) = commit.locate(group.start, group.len).filter(|_| group.aliases) else {
                continue;
            };
            // Storages begin at multiples of 64. What lies before, in the same chunk, comes along.
            let before = offset % STORAGE_ALIGN;
            group.start -= before as usize;
            group.len += before;
            group.in_place = Some(offset - before);
        }
        for group in &groups {
            meta.add_storage(StorageRecord { offset: 0, nbytes: group.len });
        }
        let empty = (group_of.contains(&usize::MAX))
            .then(|| meta.add_storage(StorageRecord { offset: 0, nbytes: 0 }));
        for (leaf, group) in leaves.iter().zip(&group_of) {
            let (storage, offset) = match groups.get(*group) {
                Some(found) => (*group as u32, (leaf.address - found.start) as u64),
                None => (empty.unwrap_or(0), 0),
            };
            match &leaf.kind {
                &LeafKind::Tensor { dtype, dims } => {
                    meta.add_tensor(storage, offset, dtype, drafts.shape(dims), drafts.strides(dims))
                }
                LeafKind::Array { fortran, itemsize, tag, shape } => {
                    meta.add_array(storage, offset, *itemsize, tag, *fortran, shape)
                }
                LeafKind::Storage => meta.add_storage_leaf(storage),
                LeafKind::Bytes => meta.add_bytes(storage),
            };
        }
        Self { groups }
    }

    /// Puts the storages that are not in place behind `bump` of a slot, or all of them at the start of
    /// a segment of their own if `bump` is `None`.
    pub(crate) fn place(&self, meta: &mut MetaWriter, bump: Option<u64>) -> Plan {
        let mut end = bump.unwrap_or(0);
        let mut copies = Vec::new();
        for (number, group) in self.groups.iter().enumerate() {
            let offset = match group.in_place {
                Some(offset) if bump.is_some() => offset,
                _ => {
                    let to = end.next_multiple_of(STORAGE_ALIGN);
                    end = to + group.len;
                    copies.push(Copy { from: group.start, to, len: group.len });
                    to
                }
            };
            meta.set_storage(number as u32, StorageRecord { offset, nbytes: group.len });
        }
        Plan { copies, meta_at: end.next_multiple_of(8) }
    }

    /// How many storages lie in the slot already.
    pub(crate) fn in_place(&self) -> u64 {
        self.groups.iter().filter(|group| group.in_place.is_some()).count() as u64
    }
}
