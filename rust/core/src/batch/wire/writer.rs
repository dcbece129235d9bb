#![forbid(unsafe_code)]
//! Building a block.

use super::{
    ArrayFlags, DIM_BYTES, HEADER_BYTES, KIND_ARRAY, KIND_BYTES, KIND_STORAGE, KIND_TENSOR, LAYOUT_VERSION,
    LEAF_BYTES, MAGIC, STORAGE_BYTES, StorageRecord,
};
use crate::batch::{Dtype, SkeletonWriter};

/// Builds the block of one batch after another. [`clear`](Self::clear) keeps the memory, so that a steady stream of
/// similar batches allocates nothing.
///
/// The writer does not check what is added to it. A block with a leaf that is not possible is refused by its reader.
#[derive(Debug, Default)]
pub struct MetaWriter {
    storages: Vec<StorageRecord>,
    leaves: Vec<u8>,
    dims: Vec<u8>,
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
    /// An empty block.
    pub fn new() -> Self {
        Self::default()
    }

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
        let leaf = self.push_leaf(KIND_TENSOR, dtype.code(), shape.len(), storage, byte_offset, 0, 0);
        self.push_dims(shape);
        self.push_dims(strides);
        leaf
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
        let tag = self.push_tag(dtype_tag);
        let leaf = self.push_leaf(KIND_ARRAY, flags.code(), shape.len(), storage, byte_offset, tag, itemsize);
        self.push_dims(shape);
        leaf
    }

    /// Adds a whole storage as a leaf of its own and returns the leaf's index.
    pub fn add_storage_leaf(&mut self, storage: u32) -> u32 {
        self.push_leaf(KIND_STORAGE, 0, 0, storage, 0, 0, 0)
    }

    /// Adds a `bytes` object whose content is the whole storage and returns the leaf's index.
    pub fn add_bytes(&mut self, storage: u32) -> u32 {
        self.push_leaf(KIND_BYTES, 0, 0, storage, 0, 0, 0)
    }

    /// The tree around the leaves.
    pub fn skeleton(&mut self) -> &mut SkeletonWriter {
        &mut self.skeleton
    }

    /// Length of the block that [`finish`](Self::finish) would return now.
    pub fn encoded_len(&self) -> usize {
        HEADER_BYTES
            + self.storages.len() * STORAGE_BYTES
            + self.leaves.len()
            + self.dims.len()
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
        block.extend_from_slice(&MAGIC);
        block.extend_from_slice(&LAYOUT_VERSION.to_le_bytes());
        block.extend_from_slice(&0u16.to_le_bytes());
        block.extend_from_slice(&generation.to_le_bytes());
        for n in [
            self.storages.len(),
            self.leaves.len() / LEAF_BYTES,
            self.dims.len() / DIM_BYTES,
            self.tags.len(),
        ] {
            block.extend_from_slice(&count(n).to_le_bytes());
        }
        block.extend_from_slice(&(skeleton.len() as u64).to_le_bytes());
        for record in &self.storages {
            block.extend_from_slice(&record.offset.to_le_bytes());
            block.extend_from_slice(&record.nbytes.to_le_bytes());
        }
        for section in [&self.leaves[..], &self.dims, &self.tags, skeleton] {
            block.extend_from_slice(section);
        }
        block
    }

    #[expect(clippy::too_many_arguments, reason = "the fields of one record, in their order")]
    fn push_leaf(
        &mut self,
        kind: u8,
        detail: u8,
        ndim: usize,
        storage: u32,
        byte_offset: u64,
        tag: u32,
        itemsize: u64,
    ) -> u32 {
        let index = count(self.leaves.len() / LEAF_BYTES);
        let first_dim = count(self.dims.len() / DIM_BYTES);
        let mut record = [0; LEAF_BYTES];
        record[0] = kind;
        record[1] = detail;
        record[2] = u8::try_from(ndim).unwrap_or(u8::MAX);
        record[4..8].copy_from_slice(&storage.to_le_bytes());
        record[8..16].copy_from_slice(&byte_offset.to_le_bytes());
        record[16..20].copy_from_slice(&first_dim.to_le_bytes());
        record[20..24].copy_from_slice(&tag.to_le_bytes());
        record[24..32].copy_from_slice(&itemsize.to_le_bytes());
        self.leaves.extend_from_slice(&record);
        index
    }

    fn push_dims(&mut self, dims: &[i64]) {
        for dim in dims {
            self.dims.extend_from_slice(&dim.to_le_bytes());
        }
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
