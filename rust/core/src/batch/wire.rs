#![forbid(unsafe_code)]
//! The block that describes a batch: a table of storages and leaves, and the skeleton.
//!
//! All numbers are little endian; nothing in the block is aligned, and nothing follows the skeleton.
//!
//! | section | bytes | holds |
//! |---|---|---|
//! | header | 40 | see below |
//! | storages | 16 each | offset from the start of the window `u64`, nbytes `u64` |
//! | leaves | 32 each | see below |
//! | dims | 8 each | `i64`: shape, then for tensors strides, of each leaf in turn |
//! | tags | | dtype tags of arrays, each as length `u32` and bytes |
//! | skeleton | | tokens, see [`skeleton`](super::skeleton) |
//!
//! Header: magic `[u8; 4]`, version `u16`, zero `u16`, generation `u64`, then the number of storages, leaves and dims
//! and the bytes of tags (`u32` each), and the bytes of the skeleton `u64`.
//!
//! Leaf: kind `u8` (0 tensor, 1 array, 2 storage, 3 bytes), detail `u8` (a tensor's dtype code; of an array, 1 for
//! Fortran order, and 2 more if it is read-only), ndim `u8`, zero `u8`, storage `u32`, byte offset in the storage
//! `u64`, index of its first dim `u32`, start of its tag `u32`, itemsize `u64` (arrays only). Fields that a kind does
//! not have are zero. A leaf's dims begin where the dims of the leaf before it end, so that one pass can check the
//! whole table.

mod extent;
mod reader;
mod writer;

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::Dtype;

pub use extent::check_tensor;
pub use reader::{Dims, Leaf, Meta, repeats};
pub use writer::MetaWriter;

/// Version of the block, skeleton included: both ends must agree.
pub const LAYOUT_VERSION: u16 = 2;

/// Alignment of every storage in the window that has any bytes.
pub const STORAGE_ALIGN: u64 = 64;

/// Most dimensions of a leaf: more than torch's iterators or numpy take.
pub const MAX_NDIM: usize = 64;

const MAGIC: [u8; 4] = *b"RLmb";
const DIM_BYTES: usize = 8;

/// The header, as it is in the block.
#[derive(FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct WireHeader {
    magic: [u8; 4],
    version: U16,
    zero: U16,
    generation: U64,
    storages: U32,
    leaves: U32,
    dims: U32,
    tags: U32,
    skeleton: U64,
}

/// A storage, as it is in the block.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct WireStorage {
    offset: U64,
    nbytes: U64,
}

/// A leaf, as it is in the block.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct WireLeaf {
    kind: u8,
    detail: u8,
    ndim: u8,
    zero: u8,
    storage: U32,
    byte_offset: U64,
    first_dim: U32,
    tag: U32,
    itemsize: U64,
}

const KIND_TENSOR: u8 = 0;
const KIND_ARRAY: u8 = 1;
const KIND_STORAGE: u8 = 2;
const KIND_BYTES: u8 = 3;

/// The place of one storage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StorageRecord {
    /// From the start of the slot's window, a multiple of [`STORAGE_ALIGN`] unless the storage is empty.
    pub offset: u64,
    /// Length in bytes.
    pub nbytes: u64,
}

impl From<&WireStorage> for StorageRecord {
    #[inline]
    fn from(record: &WireStorage) -> Self {
        Self { offset: record.offset.get(), nbytes: record.nbytes.get() }
    }
}

/// The flags that numpy keeps for an array.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ArrayFlags {
    /// Column-major: the first index varies fastest.
    pub fortran: bool,
    /// The array must not be written to.
    pub read_only: bool,
}

impl ArrayFlags {
    fn code(self) -> u8 {
        u8::from(self.fortran) | u8::from(self.read_only) << 1
    }

    fn from_code(code: u8) -> Option<Self> {
        (code < 4).then_some(Self { fortran: code & 1 != 0, read_only: code & 2 != 0 })
    }
}

/// The kind of a leaf.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeafKind {
    /// A tensor: shape, strides, part of a storage.
    Tensor(Dtype),
    /// A contiguous numpy array, whose dtype is an opaque tag.
    Array(ArrayFlags),
    /// A whole storage as an object of its own.
    Storage,
    /// A `bytes` object whose content is a whole storage.
    Bytes,
}
