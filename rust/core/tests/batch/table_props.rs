//! Random tables, legal ones, others, and damaged ones.

use crate::table_model::*;
use proptest::prelude::*;
use ringloader_core::batch::wire::{STORAGE_ALIGN, check_tensor};
use ringloader_core::batch::{ArrayFlags, Dtype, Meta, StorageRecord, Token};

fn dtype() -> impl Strategy<Value = Dtype> {
    prop::sample::select(Dtype::ALL)
}

/// Numbers at which an unchecked sum or product goes wrong, and small ones.
fn size() -> impl Strategy<Value = i64> {
    prop_oneof![
        20 => 0..5i64,
        1 => prop::sample::select(vec![-1, i64::MIN, i64::MAX, i64::MAX - 1, 1 << 31, 1 << 32, 1 << 61, 1 << 62]),
    ]
}

fn length() -> impl Strategy<Value = u64> {
    prop_oneof![
        12 => (0..64u64).prop_map(|n| n * 64),
        6 => 0..600u64,
        1 => prop::sample::select(vec![PAYLOAD, u64::MAX, u64::MAX - 63, 1 << 63, (1 << 63) - 64]),
    ]
}

fn any_storage() -> impl Strategy<Value = StorageRecord> {
    let offset = prop_oneof![12 => (0..64u64).prop_map(|n| n * 64), 1 => length()];
    (offset, length()).prop_map(|(offset, nbytes)| StorageRecord { offset, nbytes })
}

/// Leaves of which about half are legal.
fn any_leaf() -> impl Strategy<Value = Given> {
    let storage = 0..4u32;
    let byte_offset = prop_oneof![4 => (0..8u64).prop_map(|n| n * 16), 1 => 0..70u64, 1 => length()];
    prop_oneof![
        (storage.clone(), byte_offset.clone(), dtype(), prop::collection::vec((size(), size()), 0..5))
            .prop_map(|(storage, byte_offset, dtype, dims)| Given::Tensor {
                storage,
                byte_offset,
                dtype,
                dims
            }),
        (
            storage.clone(),
            byte_offset,
            prop_oneof![4 => 0..20u64, 1 => length()],
            prop::collection::vec(any::<u8>(), 0..6),
            any::<(bool, bool)>(),
            prop::collection::vec(size(), 0..5),
        )
            .prop_map(|(storage, byte_offset, itemsize, tag, (fortran, read_only), shape)| {
                let flags = ArrayFlags { fortran, read_only };
                Given::Array { storage, byte_offset, itemsize, tag, flags, shape }
            }),
        storage.clone().prop_map(Given::Storage),
        storage.prop_map(Given::Bytes),
    ]
}

/// Storages, one after another as a sender places them, and leaves, of which only the legal ones are kept.
pub(crate) fn legal_table() -> impl Strategy<Value = (Vec<StorageRecord>, Vec<Given>)> {
    let storages = prop::collection::vec((0..2000u64).prop_map(|n| n * 3), 4).prop_map(|sizes| {
        let mut offset = 0;
        let place = |nbytes: u64| {
            let record = StorageRecord { offset, nbytes };
            offset += nbytes.next_multiple_of(STORAGE_ALIGN);
            record
        };
        sizes.into_iter().map(place).collect::<Vec<_>>()
    });
    (storages, prop::collection::vec(any_leaf(), 0..60)).prop_map(|(storages, mut leaves)| {
        leaves.retain(|leaf| leaf_is_legal(leaf, &storages));
        (storages, leaves)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn legal_tables_round_trip((storages, leaves) in legal_table()) {
        let block = write(&storages, &leaves);
        let meta = Meta::parse(&block, GENERATION, PAYLOAD).unwrap();
        prop_assert!((0..meta.storage_count()).filter_map(|number| meta.storage(number)).eq(storages.iter().copied()));
        prop_assert_eq!(meta.leaf_count() as usize, leaves.len());
        for (leaf, given) in meta.leaves().zip(&leaves) {
            assert_reads_back(leaf, given);
        }
        let tokens: Vec<_> = meta.skeleton().map(Result::unwrap).collect();
        let expected = (0..leaves.len() as u32).map(Token::Leaf);
        prop_assert!(tokens.into_iter().eq(std::iter::once(Token::List(leaves.len() as u32)).chain(expected)));
        assert_bounds(&meta, PAYLOAD);
    }

    #[test]
    fn a_table_is_accepted_exactly_if_it_is_legal(
        storages in prop::collection::vec(any_storage(), 1..4),
        leaf in any_leaf(),
    ) {
        let legal_storages = storages.iter().all(|&record| storage_is_legal(record, PAYLOAD));
        let legal_leaf = leaf_is_legal(&leaf, &storages);
        let block = write(&storages, std::slice::from_ref(&leaf));
        prop_assert_eq!(Meta::parse(&block, GENERATION, PAYLOAD).is_ok(), legal_storages && legal_leaf);
        if let Given::Tensor { storage, byte_offset, dtype, dims } = &leaf
            && let Some(record) = storages.get(*storage as usize)
        {
            let (shape, strides): (Vec<_>, Vec<_>) = dims.iter().copied().unzip();
            let said = check_tensor(*dtype, &shape, &strides, *byte_offset, record.nbytes);
            prop_assert_eq!(said.is_ok(), legal_leaf);
        }
    }

    #[test]
    fn damaged_blocks_never_panic_nor_break_a_bound(
        (storages, leaves) in legal_table(),
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..4u8, size()), 1..4),
        payload in prop_oneof![Just(PAYLOAD), 0..20_000u64],
    ) {
        let mut block = write(&storages, &leaves);
        for (place, byte, how, number) in damage {
            if block.is_empty() {
                break;
            }
            let at = place.index(block.len());
            match how {
                0 => block[at] ^= 1 << (byte & 7),
                1 => block[at] = byte,
                2 => {
                    let end = block.len().min(at / 8 * 8 + 8);
                    let start = at / 8 * 8;
                    block[start..end].copy_from_slice(&number.to_le_bytes()[..end - start]);
                }
                _ if byte < 40 => block.truncate(at),
                _ => block.insert(at, byte),
            }
        }
        if let Ok(meta) = Meta::parse(&block, GENERATION, payload) {
            assert_bounds(&meta, payload);
        }
    }

    #[test]
    fn random_bytes_behind_a_true_header_never_panic(
        counts in [0..3u32, 0..3u32, 0..8u32, 0..10u32],
        body in prop::collection::vec(prop_oneof![3 => Just(0u8), 2 => 0..4u8, 1 => any::<u8>()], 200),
    ) {
        let mut block = write(&[], &[]);
        block.truncate(16);
        counts.iter().for_each(|count| block.extend_from_slice(&count.to_le_bytes()));
        let [storages, leaves, dims, tags] = counts.map(|count| count as usize);
        let table = storages * 16 + leaves * 32 + dims * 8 + tags;
        block.extend_from_slice(&((body.len() - table) as u64).to_le_bytes());
        block.extend_from_slice(&body);
        if let Ok(meta) = Meta::parse(&block, GENERATION, 1 << 40) {
            assert_bounds(&meta, 1 << 40);
        }
    }

    #[test]
    fn random_bytes_are_refused(bytes: Vec<u8>) {
        // None of these begins with the magic, the version and the generation: 14 bytes by chance.
        prop_assert!(Meta::parse(&bytes, GENERATION, PAYLOAD).is_err());
    }
}
