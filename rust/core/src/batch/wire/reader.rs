#![forbid(unsafe_code)]
//! Checking and reading a block.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::extent::{array_extent, tensor_extent};
use super::{
    ArrayFlags, DIM_BYTES, KIND_ARRAY, KIND_BYTES, KIND_STORAGE, KIND_TENSOR, LAYOUT_VERSION, LeafKind,
    MAGIC, MAX_NDIM, STORAGE_ALIGN, StorageRecord, WireHeader, WireLeaf, WireStorage,
};
use crate::batch::{Dtype, SkeletonReader};
use crate::number::u32_from;
use crate::{Error, Result};

/// The block of one batch, checked.
///
/// INVARIANT: for every storage, `offset + nbytes` is at most the payload's length; and `offset` is a multiple of
/// [`STORAGE_ALIGN`], unless `nbytes` is zero. For every leaf, the storage exists; shape and strides are not negative
/// and at most [`MAX_NDIM`] long; `numel` fits an `i64`; each element lies inside the storage; a tensor's byte offset
/// is a multiple of its itemsize. An array's tag and any leaf's dims lie inside the block.
///
/// `Meta` reads the bytes again at each access, so they must not change while it lives. A shared slice promises this.
#[derive(Debug, Clone, Copy)]
pub struct Meta<'a> {
    storages: &'a [WireStorage],
    leaves: &'a [WireLeaf],
    dims: &'a [[u8; DIM_BYTES]],
    tags: &'a [u8],
    skeleton: &'a [u8],
}

impl<'a> Meta<'a> {
    /// Checks all of a block but its skeleton, whose reader checks as it goes. No allocation; one pass.
    ///
    /// `payload_len` is the length of the memory that the storages' offsets count in.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if the block is none, of another version or generation, not whole, or breaks the invariant.
    pub fn parse(bytes: &'a [u8], expected_generation: u64, payload_len: u64) -> Result<Self> {
        let meta = Self::sections(bytes, expected_generation)?;
        for (index, record) in meta.storages.iter().enumerate() {
            check_storage(index, record.into(), payload_len)?;
        }
        let mut next_dim = 0;
        for (index, record) in meta.leaves.iter().enumerate() {
            next_dim = meta.check_leaf(index, record, next_dim)?;
        }
        if next_dim != meta.dims.len() {
            return Err(corrupt(format!(
                "{} dims follow those of the last leaf",
                meta.dims.len() - next_dim
            )));
        }
        Ok(meta)
    }

    fn sections(bytes: &'a [u8], expected_generation: u64) -> Result<Self> {
        let Ok((header, body)) = WireHeader::ref_from_prefix(bytes) else {
            let least = size_of::<WireHeader>();
            return Err(corrupt(format!("{} bytes are too few for a header of {least}", bytes.len())));
        };
        let &WireHeader { magic, version, zero, generation, storages, leaves, dims, tags, skeleton } = header;
        if magic != MAGIC || version.get() != LAYOUT_VERSION || zero.get() != 0 {
            return Err(corrupt(format!(
                "magic {magic:?}, version {version}, reserved {zero}: expected {MAGIC:?}, {LAYOUT_VERSION}, 0"
            )));
        }
        if generation.get() != expected_generation {
            return Err(corrupt(format!("generation {generation}: expected {expected_generation}")));
        }
        let [storages, leaves, dims, tags] = [storages, leaves, dims, tags].map(|count| count.get() as usize);
        let skeleton = skeleton.get();
        let mut rest = body;
        let meta = (|| {
            Some(Self {
                storages: take_records(&mut rest, storages)?,
                leaves: take_records(&mut rest, leaves)?,
                dims: take_records(&mut rest, dims)?,
                tags: rest.split_off(..tags)?,
                skeleton: rest.split_off(..usize::try_from(skeleton).ok()?)?,
            })
        })();
        meta.filter(|_| rest.is_empty()).ok_or_else(|| {
            corrupt(format!(
                "{} bytes after the header, which claims {storages} storages, {leaves} leaves, {dims} dims, {tags} \
                 bytes of tags and {skeleton} of skeleton",
                body.len()
            ))
        })
    }

    /// Checks one leaf, whose dims begin at `first_dim`, and returns where the next leaf's begin.
    #[inline]
    fn check_leaf(&self, index: usize, record: &WireLeaf, first_dim: usize) -> Result<usize> {
        let &WireLeaf { kind, detail, ndim, zero, storage, byte_offset, tag, itemsize, .. } = record;
        let refuse = |what: &str| {
            Err(corrupt(format!("leaf {index} has {what}; its record is {:?}", record.as_bytes())))
        };
        let Some(storage) = self.storages.get(storage.get() as usize).map(StorageRecord::from) else {
            return refuse("no such storage");
        };
        if zero != 0 || usize::from(ndim) > MAX_NDIM || record.first_dim.get() as usize != first_dim {
            return refuse(
                "a reserved byte, too many dimensions, or dims not next to those of the leaf before",
            );
        }
        let (ndim, byte_offset) = (usize::from(ndim), byte_offset.get());
        let (tag, itemsize) = (tag.get(), itemsize.get());
        let used = if kind == KIND_TENSOR { 2 * ndim } else { ndim };
        let Some(dims) = self.dims.get(first_dim..first_dim + used) else {
            return refuse("dims beyond the end of the block");
        };
        let (shape, strides) = dims.split_at(ndim);
        let (shape, strides) = (Dims(shape).iter(), Dims(strides).iter());
        let extent = match kind {
            KIND_TENSOR => match Dtype::from_code(detail) {
                Some(dtype) if tag == 0 && itemsize == 0 => {
                    tensor_extent(dtype, shape, strides, byte_offset, storage.nbytes)
                }
                _ => Err("no known dtype, or fields of an array"),
            },
            KIND_ARRAY if ArrayFlags::from_code(detail).is_none() || self.tag(tag).is_none() => {
                Err("no such flags or tag")
            }
            KIND_ARRAY => array_extent(itemsize, shape, byte_offset, storage.nbytes),
            KIND_STORAGE | KIND_BYTES
                if byte_offset == 0 && tag == 0 && itemsize == 0 && detail == 0 && ndim == 0 =>
            {
                Ok(())
            }
            _ => Err("no known kind, or fields of another kind"),
        };
        match extent {
            Ok(()) => Ok(first_dim + used),
            Err(what) => refuse(what),
        }
    }

    fn tag(&self, start: u32) -> Option<&'a [u8]> {
        let (length, rest) = self.tags.get(start as usize..)?.split_first_chunk::<4>()?;
        rest.get(..u32::from_le_bytes(*length) as usize)
    }

    /// Number of storages.
    pub fn storage_count(&self) -> u32 {
        u32_from(self.storages.len() as u64)
    }

    /// Number of leaves.
    pub fn leaf_count(&self) -> u32 {
        u32_from(self.leaves.len() as u64)
    }

    /// One storage.
    pub fn storage(&self, index: u32) -> Option<StorageRecord> {
        self.storages.get(index as usize).map(StorageRecord::from)
    }

    /// One leaf.
    pub fn leaf(&self, index: u32) -> Option<Leaf<'a>> {
        self.leaves.get(index as usize).map(|record| Leaf { meta: *self, record })
    }

    /// All leaves, in the order of their indices.
    pub fn leaves(&self) -> impl ExactSizeIterator<Item = Leaf<'a>> + Clone + use<'a> {
        let meta = *self;
        self.leaves.iter().map(move |record| Leaf { meta, record })
    }

    /// The tree around the leaves, from its start.
    pub fn skeleton(&self) -> SkeletonReader<'a> {
        SkeletonReader::new(self.skeleton, self.leaf_count())
    }
}

/// Returns true if `block` has this generation and otherwise equals an earlier block.
pub fn repeats(block: &[u8], expected_generation: u64, earlier: &[u8]) -> bool {
    let split = WireHeader::ref_from_prefix;
    let (Ok((header, body)), Ok((before, body_before))) = (split(block), split(earlier)) else {
        return false;
    };
    let generation = header.generation.get();
    let (header, before) = (header.as_bytes(), before.as_bytes());
    generation == expected_generation
        && header[..8] == before[..8]
        && header[16..] == before[16..]
        && body == body_before
}

/// One leaf of a checked block.
#[derive(Debug, Clone, Copy)]
pub struct Leaf<'a> {
    meta: Meta<'a>,
    record: &'a WireLeaf,
}

impl<'a> Leaf<'a> {
    /// Returns the kind of the leaf.
    pub fn kind(&self) -> LeafKind {
        match self.record.kind {
            // The codes were checked: the defaults are never taken.
            KIND_TENSOR => LeafKind::Tensor(Dtype::from_code(self.record.detail).unwrap_or(Dtype::U8)),
            KIND_ARRAY => LeafKind::Array(ArrayFlags::from_code(self.record.detail).unwrap_or_default()),
            KIND_STORAGE => LeafKind::Storage,
            _ => LeafKind::Bytes,
        }
    }

    /// Index of its storage.
    pub fn storage(&self) -> u32 {
        self.record.storage.get()
    }

    /// The record of its storage.
    pub fn storage_record(&self) -> StorageRecord {
        // The storage was checked to exist: the default is never taken.
        self.meta.storage(self.storage()).unwrap_or(StorageRecord { offset: 0, nbytes: 0 })
    }

    /// Returns the offset of the leaf's first byte in its storage.
    pub fn byte_offset(&self) -> u64 {
        self.record.byte_offset.get()
    }

    /// Bytes of one element; 1 for whole storages and `bytes`.
    pub fn itemsize(&self) -> u64 {
        match self.kind() {
            LeafKind::Tensor(dtype) => dtype.itemsize() as u64,
            LeafKind::Array { .. } => self.record.itemsize.get(),
            LeafKind::Storage | LeafKind::Bytes => 1,
        }
    }

    /// Number of dimensions.
    pub fn ndim(&self) -> usize {
        usize::from(self.record.ndim)
    }

    /// Shape; empty for whole storages and `bytes`.
    pub fn shape(&self) -> Dims<'a> {
        self.dims(0, self.ndim())
    }

    /// Strides in elements; empty for all but tensors.
    pub fn strides(&self) -> Dims<'a> {
        let ndim = if self.record.kind == KIND_TENSOR { self.ndim() } else { 0 };
        self.dims(self.ndim(), ndim)
    }

    /// A tensor's shape, then its strides; the shape of any other leaf.
    pub fn all_dims(&self) -> Dims<'a> {
        self.dims(0, if self.record.kind == KIND_TENSOR { 2 * self.ndim() } else { self.ndim() })
    }

    /// An array's dtype, as the sender gave it; empty for the other kinds.
    pub fn dtype_tag(&self) -> &'a [u8] {
        if self.record.kind == KIND_ARRAY {
            self.meta.tag(self.record.tag.get()).unwrap_or_default()
        } else {
            &[]
        }
    }

    fn dims(&self, skip: usize, length: usize) -> Dims<'a> {
        let start = self.record.first_dim.get() as usize + skip;
        Dims(self.meta.dims.get(start..start + length).unwrap_or_default())
    }
}

/// Sizes or strides, read from unaligned bytes on demand.
#[derive(Debug, Clone, Copy)]
pub struct Dims<'a>(&'a [[u8; DIM_BYTES]]);

impl<'a> Dims<'a> {
    /// All of them, as they are in the block: little endian.
    pub fn as_bytes(&self) -> &'a [[u8; DIM_BYTES]] {
        self.0
    }

    /// All of them, in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = i64> + DoubleEndedIterator + Clone + use<'a> {
        self.0.iter().map(|bytes| i64::from_le_bytes(*bytes))
    }
}

fn check_storage(index: usize, record: StorageRecord, payload_len: u64) -> Result<()> {
    let StorageRecord { offset, nbytes } = record;
    let inside = offset.checked_add(nbytes).is_some_and(|end| end <= payload_len);
    if inside && (nbytes == 0 || offset % STORAGE_ALIGN == 0) {
        return Ok(());
    }
    Err(corrupt(format!(
        "storage {index} of {nbytes} bytes at {offset} is not aligned to {STORAGE_ALIGN} or not inside a payload of \
         {payload_len} bytes"
    )))
}

/// Takes `count` records off the front.
fn take_records<'a, T>(bytes: &mut &'a [u8], count: usize) -> Option<&'a [T]>
where
    T: FromBytes + Immutable + KnownLayout + Unaligned,
{
    let (records, rest) = <[T]>::ref_from_prefix_with_elems(bytes, count).ok()?;
    *bytes = rest;
    Some(records)
}

#[cold]
fn corrupt(what: String) -> Error {
    Error::Corrupt(format!("batch table: {what}"))
}
