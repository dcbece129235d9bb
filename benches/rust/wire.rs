//! A batch as bytes: write and parse blocks of 1, 40 and 400 small leaves, each a dict entry.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use ringloader_core::batch::{Dtype, LeafKind, Meta, MetaWriter, StorageRecord, Token};
use std::hint::black_box;

const GENERATION: u64 = 3;
const SHAPE: [i64; 2] = [32, 8];
const STRIDES: [i64; 2] = [8, 1];
const NBYTES: u64 = 1024;

fn write<'w>(writer: &'w mut MetaWriter, keys: &[String]) -> &'w [u8] {
    writer.clear();
    writer.skeleton().dict(keys.len() as u32);
    for (index, key) in keys.iter().enumerate() {
        let record = StorageRecord { offset: NBYTES * index as u64, nbytes: NBYTES };
        let storage = writer.add_storage(record);
        let leaf = writer.add_tensor(storage, 0, Dtype::F32, &SHAPE, &STRIDES);
        writer.skeleton().str(key);
        writer.skeleton().leaf(leaf);
    }
    writer.finish(GENERATION)
}

fn parse(block: &[u8], leaves: usize) -> Meta<'_> {
    Meta::parse(block, GENERATION, NBYTES * leaves as u64).expect("a block that was just written")
}

/// Visits every leaf and every dim as a walker does, and sums what it reads.
fn visit_leaves(meta: &Meta<'_>) -> u64 {
    let dims = |leaf: &ringloader_core::batch::Leaf<'_>| {
        leaf.shape().iter().chain(leaf.strides().iter()).sum::<i64>()
    };
    meta.leaves().map(|leaf| leaf.byte_offset() + leaf.itemsize() + dims(&leaf).unsigned_abs()).sum()
}

fn visit_tokens(meta: &Meta<'_>) -> usize {
    meta.skeleton().map(|token| matches!(token.expect("a written token"), Token::Leaf(_)) as usize).sum()
}

fn check(block: &[u8], keys: &[String]) {
    let meta = parse(block, keys.len());
    assert_eq!(meta.leaf_count() as usize, keys.len());
    for (index, leaf) in meta.leaves().enumerate() {
        assert_eq!((leaf.kind(), leaf.storage() as usize), (LeafKind::Tensor(Dtype::F32), index));
        assert!(leaf.shape().iter().eq(SHAPE) && leaf.strides().iter().eq(STRIDES));
    }
    assert_eq!(visit_leaves(&meta), keys.len() as u64 * (4 + 32 + 8 + 8 + 1));
    assert_eq!(visit_tokens(&meta), keys.len());
    let names = meta.skeleton().filter_map(|token| match token {
        Ok(Token::Str(name)) => Some(name),
        _ => None,
    });
    assert!(names.eq(keys.iter().map(String::as_bytes)));
}

fn wire(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("wire");
    for leaves in [1, 40, 400] {
        let keys: Vec<String> = (0..leaves).map(|index| format!("feature_{index}")).collect();
        let mut writer = MetaWriter::default();
        let block = write(&mut writer, &keys).to_vec();
        check(&block, &keys);
        group.throughput(Throughput::Elements(leaves));
        group.bench_function(BenchmarkId::new("write", leaves), |bencher| {
            bencher.iter(|| write(&mut writer, black_box(&keys)).len());
        });
        group.bench_function(BenchmarkId::new("parse", leaves), |bencher| {
            bencher.iter(|| parse(black_box(&block), keys.len()).leaf_count());
        });
        let meta = parse(&block, keys.len());
        group.bench_function(BenchmarkId::new("visit_leaves", leaves), |bencher| {
            bencher.iter(|| visit_leaves(black_box(&meta)));
        });
        group.bench_function(BenchmarkId::new("visit_tokens", leaves), |bencher| {
            bencher.iter(|| visit_tokens(black_box(&meta)));
        });
    }
    group.finish();
}

criterion_group!(benches, wire);
criterion_main!(benches);
