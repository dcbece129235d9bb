#![forbid(unsafe_code)]
//! Building a block.

use zerocopy::{FromZeros, IntoBytes};

use super::{
    ArrayFlags, DIM_BYTES, KIND_ARRAY, KIND_BYTES, KIND_STORAGE, KIND_TENSOR, LAYOUT_VERSION, MAGIC,
    StorageRecord, WireHeader, WireLeaf, WireStorage,
};
use crate::batch::{Dtype, SkeletonWriter};

/// Builds the block of one batch after another. [`clear`](Self::clear) keeps the memory, so that a steady stream of
/// similar batches allocates nothing.
///
/// The writer does not check what is added to it. A block with a leaf that is not possible is refused by its reader.
#[derive(Debug, Default)]
pub struct MetaWriter {
    storages: Vec<StorageRecord>,
    leaves: Vec<WireLeaf>,
    dims: Vec<[u8; DIM_BYTES]>,
    tags: Vec<u8>,
    /// Start of the last array's tag: the arrays of one batch mostly share their dtype.
    last_tag: Option<u32>,
    skeleton: SkeletonWriter,
    block: Vec<u8>,
}

/// A count as the block stores it. What exceeds 32 bits saturates, and then does not match the block's length.
fn count(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

impl MetaWriter {
    /// Forgets the batch and keeps the memory.
    pub fn clear(&mut self) {
        self.storages.clear();
        self.leaves.clear();
        self.dims.clear();
        self.tags.clear();
        self.last_tag = None;
        self.skeleton.clear();
    }

    /// Adds a storage and returns its index.
    pub fn add_storage(&mut self, record: StorageRecord) -> u32 {
        let index = count(self.storages.len());
        self.storages.push(record);
        index
    }

    /// Replaces a storage's record, for senders that learn places last.
    ///
    /// # Panics
    /// If no storage has this index.
    pub fn set_storage(&mut self, index: u32, record: StorageRecord) {
        self.storages[index as usize] = record;
    }

    /// Adds a tensor, with strides in elements, and returns the leaf's index.
    ///
    /// # Panics
    /// If `shape` and `strides` differ in length.
    pub fn add_tensor(
        &mut self,
        storage: u32,
        byte_offset: u64,
        dtype: Dtype,
        shape: &[i64],
        strides: &[i64],
    ) -> u32 {
        assert_eq!(shape.len(), strides.len(), "a tensor needs one stride for each dimension");
        let byte_offset = byte_offset.into();
        let leaf = self.leaf(KIND_TENSOR, dtype.code(), storage, shape);
        self.push(WireLeaf { byte_offset, ..leaf }, [shape, strides])
    }

    /// Adds a contiguous array whose dtype is `dtype_tag`, bytes that mean something to both ends only, and returns
    /// the leaf's index.
    pub fn add_array(
        &mut self,
        storage: u32,
        byte_offset: u64,
        itemsize: u64,
        dtype_tag: &[u8],
        flags: ArrayFlags,
        shape: &[i64],
    ) -> u32 {
        let (tag, byte_offset, itemsize) =
            (self.push_tag(dtype_tag).into(), byte_offset.into(), itemsize.into());
        let leaf = self.leaf(KIND_ARRAY, flags.code(), storage, shape);
        self.push(WireLeaf { byte_offset, tag, itemsize, ..leaf }, [shape])
    }

    /// Adds a whole storage as a leaf of its own and returns the leaf's index.
    pub fn add_storage_leaf(&mut self, storage: u32) -> u32 {
        let leaf = self.leaf(KIND_STORAGE, 0, storage, &[]);
        self.push(leaf, [])
    }

    /// Adds a `bytes` object whose content is the whole storage and returns the leaf's index.
    pub fn add_bytes(&mut self, storage: u32) -> u32 {
        let leaf = self.leaf(KIND_BYTES, 0, storage, &[]);
        self.push(leaf, [])
    }

    /// The tree around the leaves.
    pub fn skeleton(&mut self) -> &mut SkeletonWriter {
        &mut self.skeleton
    }

    /// Length of the block that [`finish`](Self::finish) would return now.
    pub fn encoded_len(&self) -> usize {
        size_of::<WireHeader>()
            + self.storages.len() * size_of::<WireStorage>()
            + size_of_val(&self.leaves[..])
            + size_of_val(&self.dims[..])
            + self.tags.len()
            + self.skeleton.as_bytes().len()
    }

    /// The block of this batch, for a slot of this generation. May be called again after further changes.
    pub fn finish(&mut self, generation: u64) -> &[u8] {
        let length = self.encoded_len();
        let skeleton = self.skeleton.as_bytes();
        let block = &mut self.block;
        block.clear();
        block.reserve(length);
        let header = WireHeader {
            magic: MAGIC,
            version: LAYOUT_VERSION.into(),
            zero: 0.into(),
            generation: generation.into(),
            storages: count(self.storages.len()).into(),
            leaves: count(self.leaves.len()).into(),
            dims: count(self.dims.len()).into(),
            tags: count(self.tags.len()).into(),
            skeleton: (skeleton.len() as u64).into(),
        };
        block.extend_from_slice(header.as_bytes());
        for &StorageRecord { offset, nbytes } in &self.storages {
            let record = WireStorage { offset: offset.into(), nbytes: nbytes.into() };
            block.extend_from_slice(record.as_bytes());
        }
        for section in [self.leaves.as_bytes(), self.dims.as_flattened(), &self.tags, skeleton] {
            block.extend_from_slice(section);
        }
        block
    }

    /// Returns a record of the next leaf.
    fn leaf(&self, kind: u8, detail: u8, storage: u32, shape: &[i64]) -> WireLeaf {
        let ndim = u8::try_from(shape.len()).unwrap_or(u8::MAX);
        let first_dim = count(self.dims.len()).into();
        WireLeaf { kind, detail, ndim, storage: storage.into(), first_dim, ..WireLeaf::new_zeroed() }
    }

    /// Adds a leaf with its dims, and returns its index.
    fn push<const N: usize>(&mut self, leaf: WireLeaf, dims: [&[i64]; N]) -> u32 {
        let index = count(self.leaves.len());
        self.leaves.push(leaf);
        for dims in dims {
            self.dims.extend(dims.iter().map(|dim| dim.to_le_bytes()));
        }
        index
    }

    fn push_tag(&mut self, tag: &[u8]) -> u32 {
        if let Some(start) = self.last_tag
            && &self.tags[start as usize + 4..] == tag
        {
            return start;
        }
        let start = count(self.tags.len());
        self.tags.extend_from_slice(&count(tag.len()).to_le_bytes());
        self.tags.extend_from_slice(tag);
        self.last_tag = Some(start);
        start
    }
}
