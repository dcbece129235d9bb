//! The table's bytes, and each of its bounds by name.

use crate::table_model::*;
use ringloader_core::batch::ArrayFlags;
use ringloader_core::batch::wire::{LAYOUT_VERSION, repeats};
use ringloader_core::batch::{Dtype, Meta, MetaWriter, StorageRecord};

fn small_block() -> Vec<u8> {
    let mut writer = MetaWriter::default();
    let first = writer.add_storage(StorageRecord { offset: 0, nbytes: 0 });
    let second = writer.add_storage(StorageRecord { offset: 64, nbytes: 40 });
    writer.set_storage(first, StorageRecord { offset: 128, nbytes: 24 });
    let tensor = writer.add_tensor(first, 4, Dtype::F32, &[2, 2], &[2, 1]);
    let array = writer.add_array(second, 8, 2, b"<i2", ArrayFlags { fortran: true, read_only: false }, &[3]);
    let bytes = writer.add_bytes(second);
    let skeleton = writer.skeleton();
    skeleton.dict(2);
    let key = skeleton.str("x");
    skeleton.leaf(tensor);
    skeleton.int(-3);
    skeleton.named_tuple(6);
    skeleton.str("m");
    skeleton.str("P");
    skeleton.leaf(array);
    skeleton.leaf(bytes);
    skeleton.memo(key);
    skeleton.float(1.5);
    writer.finish(GENERATION).to_vec()
}

/// If this fails, the format has changed: raise `LAYOUT_VERSION` and set the bytes anew.
#[test]
fn the_format_is_the_one_of_this_version() {
    assert_eq!(LAYOUT_VERSION, 2);
    #[rustfmt::skip]
    let expected: &[&[u8]] = &[
        b"RLmb", &[2, 0, 0, 0], &[8, 7, 6, 5, 4, 3, 2, 1],
        &[2, 0, 0, 0], &[3, 0, 0, 0], &[5, 0, 0, 0], &[7, 0, 0, 0], &[32, 0, 0, 0, 0, 0, 0, 0],
        // storages
        &[128, 0, 0, 0, 0, 0, 0, 0], &[24, 0, 0, 0, 0, 0, 0, 0],
        &[64, 0, 0, 0, 0, 0, 0, 0], &[40, 0, 0, 0, 0, 0, 0, 0],
        // tensor
        &[0, 11, 2, 0], &[0; 4], &[4, 0, 0, 0, 0, 0, 0, 0], &[0; 4], &[0; 4], &[0; 8],
        // array
        &[1, 1, 1, 0], &[1, 0, 0, 0], &[8, 0, 0, 0, 0, 0, 0, 0], &[4, 0, 0, 0], &[0; 4], &[2, 0, 0, 0, 0, 0, 0, 0],
        // bytes
        &[3, 0, 0, 0], &[1, 0, 0, 0], &[0; 8], &[5, 0, 0, 0], &[0; 4], &[0; 8],
        // dims
        &[2, 0, 0, 0, 0, 0, 0, 0], &[2, 0, 0, 0, 0, 0, 0, 0], &[2, 0, 0, 0, 0, 0, 0, 0], &[1, 0, 0, 0, 0, 0, 0, 0],
        &[3, 0, 0, 0, 0, 0, 0, 0],
        // tags
        &[3, 0, 0, 0], b"<i2",
        // skeleton
        &[9, 2], &[5, 1, b'x'], &[12, 0], &[3, 5], &[10, 6], &[5, 1, b'm'], &[5, 1, b'P'], &[12, 1], &[12, 2], &[13, 1],
        &[4, 0, 0, 0, 0, 0, 0, 0xf8, 0x3f],
    ];
    let block = small_block();
    assert_eq!(block, expected.concat());
    assert_bounds(&Meta::parse(&block, GENERATION, 152).unwrap(), 152);
}

#[test]
fn every_truncation_is_refused_and_every_changed_byte_keeps_the_bounds() {
    let block = small_block();
    for length in 0..block.len() {
        assert!(Meta::parse(&block[..length], GENERATION, 152).is_err(), "{length}");
    }
    let mut accepted = 0;
    for at in 0..block.len() {
        for value in 0..=u8::MAX {
            let mut changed = block.clone();
            changed[at] = value;
            if let Ok(meta) = Meta::parse(&changed, GENERATION, 152) {
                assert_bounds(&meta, 152);
                accepted += usize::from(value != block[at]);
            }
        }
    }
    // Skeleton bytes, other dtypes of the same size, smaller sizes and the like: damage that the bounds allow.
    assert!(accepted > 1000, "{accepted}");
}

#[test]
fn a_block_longer_or_for_another_slot_is_refused() {
    let mut block = small_block();
    assert!(Meta::parse(&block, GENERATION + 1, 152).unwrap_err().to_string().contains("generation"));
    assert!(Meta::parse(&block, GENERATION, 151).unwrap_err().to_string().contains("storage 0"));
    block.push(0);
    assert!(Meta::parse(&block, GENERATION, 152).is_err());
}

#[test]
fn a_block_repeats_if_nothing_but_its_generation_is_another() {
    let earlier = small_block();
    let mut next = earlier.clone();
    next[8..16].copy_from_slice(&(GENERATION + 1).to_le_bytes());
    assert!(repeats(&next, GENERATION + 1, &earlier));
    assert!(!repeats(&next, GENERATION, &earlier), "it is what an earlier filling left");
    for at in 0..next.len() {
        let mut changed = next.clone();
        changed[at] ^= 1;
        assert!(!repeats(&changed, GENERATION + 1, &earlier), "{at}");
        assert!(!repeats(&next[..at], GENERATION + 1, &earlier), "{at}");
    }
    assert!(!repeats(&[], 0, &[]));
}

#[test]
fn each_bound_has_its_refusal() {
    let storages = [StorageRecord { offset: 64, nbytes: 64 }];
    let tensor = |byte_offset, dtype, dims: &[(i64, i64)]| Given::Tensor {
        storage: 0,
        byte_offset,
        dtype,
        dims: dims.to_vec(),
    };
    let array = |itemsize, shape: &[i64]| Given::Array {
        storage: 0,
        byte_offset: 1,
        itemsize,
        tag: vec![1],
        flags: ArrayFlags::default(),
        shape: shape.to_vec(),
    };
    let refused = [
        (tensor(0, Dtype::F32, &[(17, 1)]), "beyond the end"),
        (tensor(64, Dtype::U8, &[]), "beyond the end"),
        (tensor(128, Dtype::U8, &[(0, 1)]), "beyond the end"),
        (tensor(2, Dtype::F32, &[(1, 1)]), "no multiple of its itemsize"),
        (tensor(8, Dtype::C128, &[(1, 1)]), "no multiple of its itemsize"),
        (tensor(0, Dtype::U8, &[(2, -1)]), "a negative stride"),
        (tensor(0, Dtype::U8, &[(0, -1)]), "a negative stride"),
        (tensor(0, Dtype::U8, &[(-1, 1)]), "a negative size"),
        (tensor(0, Dtype::U8, &[(0, 0), (-1, 1)]), "a negative size"),
        (tensor(0, Dtype::U8, &[(1 << 32, 0), (1 << 31, 0)]), "more elements"),
        (tensor(0, Dtype::U8, &[(1 << 32, 0), (1 << 31, 0), (0, 1)]), "more elements"),
        (tensor(0, Dtype::U8, &[(0, 1), (1 << 32, 0), (1 << 31, 0)]), "more elements"),
        (tensor(0, Dtype::U8, &[(3, i64::MAX), (3, i64::MAX)]), "span above 64 bits"),
        (tensor(0, Dtype::F64, &[(2, 1 << 62)]), "span above 64 bits"),
        (tensor(0, Dtype::U8, &[(1, 1); 65]), "too many dimensions"),
        (array(8, &[8]), "beyond the end"),
        (array(1 << 33, &[1 << 31]), "span above 64 bits"),
        (array(0, &[1 << 62, 2]), "more elements"),
        (array(1, &[1; 65]), "too many dimensions"),
        (Given::Storage(1), "no such storage"),
        (Given::Bytes(u32::MAX), "no such storage"),
    ];
    for (leaf, reason) in refused {
        let block = write(&storages, std::slice::from_ref(&leaf));
        let error = Meta::parse(&block, GENERATION, 128).expect_err(&format!("{leaf:?}")).to_string();
        assert!(error.contains(reason), "{leaf:?}: {error}");
    }
    let accepted = [
        tensor(64, Dtype::F64, &[(0, i64::MAX), (5, i64::MAX)]),
        tensor(0, Dtype::F32, &[(1, i64::MAX), (16, 1)]),
        tensor(60, Dtype::F32, &[(1 << 62, 0)]),
        tensor(0, Dtype::U8, &[(1, 1); 64]),
        array(63, &[]),
        array(0, &[1 << 62]),
        Given::Storage(0),
    ];
    let block = write(&storages, &accepted);
    assert_bounds(&Meta::parse(&block, GENERATION, 128).unwrap(), 128);
}

#[test]
fn each_field_of_the_format_is_checked() {
    let (first, second, third, tags) = (72, 104, 136, 208);
    let changes = [
        (0, b'r', "magic"),
        (4, 1, "version 1"),
        (6, 1, "reserved 1"),
        (first + 1, 21, "no known dtype"),
        (first + 3, 1, "a reserved byte"),
        (first + 16, 1, "dims not next to"),
        (first + 20, 1, "fields of an array"),
        (first + 24, 4, "fields of an array"),
        (second, 4, "no known kind"),
        (second + 1, 4, "no such flags or tag"),
        (second + 2, 0, "dims not next to"),
        (second + 20, 4, "no such flags or tag"),
        (tags, 4, "no such flags or tag"),
        (third + 1, 1, "fields of another kind"),
        (third + 2, 1, "dims beyond the end"),
        (third + 8, 1, "fields of another kind"),
        (third + 20, 1, "fields of another kind"),
        (third + 24, 1, "fields of another kind"),
    ];
    for (at, value, reason) in changes {
        let mut block = small_block();
        assert_ne!(block[at], value);
        block[at] = value;
        let error = Meta::parse(&block, GENERATION, 152).expect_err(reason).to_string();
        assert!(error.contains(reason), "byte {at}: {error}");
    }
    let leaf = Given::Tensor { storage: 0, byte_offset: 0, dtype: Dtype::U8, dims: vec![(1, 1)] };
    let mut block = write(&[StorageRecord { offset: 0, nbytes: 1 }], &[leaf]);
    block[40 + 16 + 2] = 0;
    let error = Meta::parse(&block, GENERATION, 1).unwrap_err().to_string();
    assert!(error.contains("2 dims follow"), "{error}");
}

#[test]
fn a_cleared_writer_writes_as_a_new_one() {
    let mut writer = MetaWriter::default();
    let storage = writer.add_storage(StorageRecord { offset: 64, nbytes: 64 });
    writer.add_array(storage, 0, 4, b"<f4", ArrayFlags::default(), &[16]);
    writer.skeleton().named_tuple(0);
    let used = writer.finish(1).to_vec();
    writer.clear();
    assert_eq!(writer.finish(2), MetaWriter::default().finish(2));
    let storage = writer.add_storage(StorageRecord { offset: 64, nbytes: 64 });
    writer.add_array(storage, 0, 4, b"<f4", ArrayFlags::default(), &[16]);
    writer.skeleton().named_tuple(0);
    assert_eq!(writer.finish(1), used);
}

#[test]
fn equal_tags_in_a_row_are_written_once() {
    let block = |tags: &[&[u8]]| {
        let leaves = tags.iter().map(|tag| Given::Array {
            storage: 0,
            byte_offset: 0,
            itemsize: 1,
            tag: tag.to_vec(),
            flags: ArrayFlags::default(),
            shape: vec![1],
        });
        write(&[StorageRecord { offset: 0, nbytes: 1 }], &leaves.collect::<Vec<_>>())
    };
    let (same, other, empty) = (block(&[b"<f4", b"<f4"]), block(&[b"<f4", b"<i4"]), block(&[b"<f4", b""]));
    assert_eq!(other.len() - same.len(), 4 + 3);
    let meta = Meta::parse(&other, GENERATION, 64).unwrap();
    assert!(meta.leaves().map(|leaf| leaf.dtype_tag()).eq([b"<f4", b"<i4"]));
    let meta = Meta::parse(&empty, GENERATION, 64).unwrap();
    assert!(meta.leaves().map(|leaf| leaf.dtype_tag().len()).eq([3, 0]));
}
