//! Tables as the tests give them, and their bounds said anew, in wider numbers than the code under test uses.

use ringloader_core::batch::wire::{MAX_NDIM, STORAGE_ALIGN};
use ringloader_core::batch::{ArrayFlags, Dtype, Leaf, LeafKind, Meta, MetaWriter, StorageRecord};

pub(crate) const GENERATION: u64 = 0x0102_0304_0506_0708;
pub(crate) const PAYLOAD: u64 = 1 << 20;

/// A leaf as the tests give it, which need not be a legal one.
#[derive(Debug, Clone)]
pub(crate) enum Given {
    Tensor { storage: u32, byte_offset: u64, dtype: Dtype, dims: Vec<(i64, i64)> },
    Array { storage: u32, byte_offset: u64, itemsize: u64, tag: Vec<u8>, flags: ArrayFlags, shape: Vec<i64> },
    Storage(u32),
    Bytes(u32),
}

pub(crate) fn write(storages: &[StorageRecord], leaves: &[Given]) -> Vec<u8> {
    let mut writer = MetaWriter::default();
    for &record in storages {
        writer.add_storage(record);
    }
    for (index, leaf) in leaves.iter().enumerate() {
        let returned = match leaf {
            Given::Tensor { storage, byte_offset, dtype, dims } => {
                let (shape, strides): (Vec<_>, Vec<_>) = dims.iter().copied().unzip();
                writer.add_tensor(*storage, *byte_offset, *dtype, &shape, &strides)
            }
            Given::Array { storage, byte_offset, itemsize, tag, flags, shape } => {
                writer.add_array(*storage, *byte_offset, *itemsize, tag, *flags, shape)
            }
            Given::Storage(storage) => writer.add_storage_leaf(*storage),
            Given::Bytes(storage) => writer.add_bytes(*storage),
        };
        assert_eq!(returned as usize, index);
    }
    writer.skeleton().list(leaves.len() as u32);
    for index in 0..leaves.len() as u32 {
        writer.skeleton().leaf(index);
    }
    let length = writer.encoded_len();
    let block = writer.finish(GENERATION).to_vec();
    assert_eq!(block.len(), length);
    block
}

pub(crate) fn assert_reads_back(leaf: Leaf<'_>, given: &Given) {
    let shape: Vec<i64> = leaf.shape().iter().collect();
    let strides: Vec<i64> = leaf.strides().iter().collect();
    assert_eq!(leaf.ndim(), shape.len());
    assert!(leaf.all_dims().iter().eq(shape.iter().chain(&strides).copied()));
    let little_endian: Vec<[u8; 8]> = shape.iter().map(|size| size.to_le_bytes()).collect();
    assert_eq!(leaf.shape().as_bytes(), little_endian);
    match given {
        Given::Tensor { storage, byte_offset, dtype, dims } => {
            assert_eq!(leaf.kind(), LeafKind::Tensor(*dtype));
            assert_eq!((leaf.storage(), leaf.byte_offset()), (*storage, *byte_offset));
            assert!(shape.iter().copied().zip(strides.iter().copied()).eq(dims.iter().copied()));
            assert_eq!(strides.len(), dims.len());
            assert_eq!(leaf.itemsize(), dtype.itemsize() as u64);
            assert_eq!(leaf.dtype_tag(), b"");
        }
        Given::Array { storage, byte_offset, itemsize, tag, flags, shape: given } => {
            assert_eq!(leaf.kind(), LeafKind::Array(*flags));
            assert_eq!((leaf.storage(), leaf.byte_offset()), (*storage, *byte_offset));
            assert_eq!((&shape, strides.len()), (given, 0));
            assert_eq!((leaf.itemsize(), leaf.dtype_tag()), (*itemsize, tag.as_slice()));
        }
        Given::Storage(storage) | Given::Bytes(storage) => {
            let kind = if matches!(given, Given::Storage(_)) { LeafKind::Storage } else { LeafKind::Bytes };
            assert_eq!((leaf.kind(), leaf.storage(), leaf.byte_offset()), (kind, *storage, 0));
            assert_eq!((shape.len(), strides.len(), leaf.itemsize()), (0, 0, 1));
        }
    }
}

/// The bound of a storage, said anew and in wider numbers than the code under test uses.
pub(crate) fn storage_is_legal(record: StorageRecord, payload: u64) -> bool {
    i128::from(record.offset) + i128::from(record.nbytes) <= i128::from(payload)
        && (record.nbytes == 0 || record.offset.is_multiple_of(STORAGE_ALIGN))
}

pub(crate) fn legal_numel(shape: &[i64]) -> Option<i128> {
    if shape.len() > MAX_NDIM || shape.iter().any(|&size| size < 0) {
        return None;
    }
    // At most 64 factors: floats tell an overflow that the exact product would not survive.
    let magnitude: f64 = shape.iter().filter(|&&size| size > 0).map(|&size| (size as f64).log2()).sum();
    if magnitude > 64.0 {
        return None;
    }
    let nonzero: i128 = shape.iter().filter(|&&size| size > 0).map(|&size| i128::from(size)).product();
    (nonzero <= i128::from(i64::MAX)).then(|| shape.iter().map(|&size| i128::from(size)).product())
}

/// The bounds of a leaf, likewise.
pub(crate) fn leaf_is_legal(given: &Given, storages: &[StorageRecord]) -> bool {
    let (Given::Tensor { storage, .. }
    | Given::Array { storage, .. }
    | Given::Storage(storage)
    | Given::Bytes(storage)) = given;
    let Some(record) = storages.get(*storage as usize) else {
        return false;
    };
    let nbytes = i128::from(record.nbytes);
    match given {
        Given::Tensor { byte_offset, dtype, dims, .. } => {
            let shape: Vec<i64> = dims.iter().map(|&(size, _)| size).collect();
            let Some(numel) = legal_numel(&shape) else {
                return false;
            };
            let itemsize = dtype.itemsize() as i128;
            let last = dims.iter().try_fold(0i128, |last, &(size, stride)| {
                last.checked_add(i128::from(size - 1) * i128::from(stride))
            });
            let length =
                if numel == 0 { Some(0) } else { last.and_then(|last| (last + 1).checked_mul(itemsize)) };
            dims.iter().all(|&(_, stride)| stride >= 0)
                && i128::from(*byte_offset) % itemsize == 0
                && length.is_some_and(|length| i128::from(*byte_offset) + length <= nbytes)
        }
        Given::Array { byte_offset, itemsize, shape, .. } => legal_numel(shape)
            .is_some_and(|numel| i128::from(*byte_offset) + numel * i128::from(*itemsize) <= nbytes),
        Given::Storage(_) | Given::Bytes(_) => true,
    }
}

/// Everything that code behind an accepted block relies on.
pub(crate) fn assert_bounds(meta: &Meta<'_>, payload: u64) {
    let storages: Vec<_> = (0..meta.storage_count()).filter_map(|number| meta.storage(number)).collect();
    assert_eq!(storages.len(), meta.storage_count() as usize);
    for &record in &storages {
        assert!(storage_is_legal(record, payload), "{record:?}");
    }
    assert_eq!(meta.leaves().len(), meta.leaf_count() as usize);
    for (index, leaf) in meta.leaves().enumerate() {
        let shape: Vec<i64> = leaf.shape().iter().collect();
        let given = match leaf.kind() {
            LeafKind::Tensor(dtype) => {
                assert_eq!(leaf.strides().iter().len(), shape.len());
                let dims = shape.iter().copied().zip(leaf.strides().iter()).collect();
                Given::Tensor { storage: leaf.storage(), byte_offset: leaf.byte_offset(), dtype, dims }
            }
            LeafKind::Array(flags) => Given::Array {
                storage: leaf.storage(),
                byte_offset: leaf.byte_offset(),
                itemsize: leaf.itemsize(),
                tag: leaf.dtype_tag().to_vec(),
                flags,
                shape,
            },
            LeafKind::Storage => Given::Storage(leaf.storage()),
            LeafKind::Bytes => Given::Bytes(leaf.storage()),
        };
        assert!(leaf_is_legal(&given, &storages), "leaf {index}: {given:?} in {storages:?}");
        assert_reads_back(meta.leaf(index as u32).unwrap(), &given);
        assert_eq!(leaf.storage_record(), storages[leaf.storage() as usize]);
    }
    assert!(meta.leaf(meta.leaf_count()).is_none());
    // The skeleton may be anything, but reading it must end.
    assert!(meta.skeleton().count() <= meta.skeleton().remaining() + 1);
}
