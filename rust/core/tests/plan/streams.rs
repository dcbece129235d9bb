//! Streams against the generators: every request's outcome, and which draws it makes.

use std::cell::RefCell;
use std::rc::Rc;

use proptest::prelude::*;
use ringloader_core::Error;
use ringloader_core::plan::{BatchRule, Chunk, Shuffle, Step, Stream};

use crate::generators::{Batches, Draws, Outcome, Passed, Sampler, sampler};

pub(crate) fn rule() -> impl Strategy<Value = Option<BatchRule>> {
    prop::option::weighted(
        0.8,
        (prop_oneof![1..12_u64, 1..70_u64], any::<bool>())
            .prop_map(|(size, drop_last)| BatchRule { size, drop_last }),
    )
}

/// A stream over the indices from 0 to `len`, in batches of `rule`.
pub(crate) fn counting(len: u64, rule: Option<BatchRule>) -> Stream {
    let mut stream = Stream::new(rule).expect("a good rule");
    assert_eq!(stream.next(), Step::Need);
    stream.supply(Some(Chunk::Range { start: 0, step: 1, len }));
    stream
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn every_request_is_torchs(
        sampler in sampler(),
        rule in rule(),
        fails_at in prop_oneof![9 => Just(usize::MAX), 1 => 0..5_usize],
    ) {
        let sampler = Sampler { fails_at, ..sampler };
        let drawn = Rc::new(RefCell::new(0));
        let items = sampler.items(&drawn);
        let mut generator: Box<dyn Iterator<Item = Outcome>> = match rule {
            Some(BatchRule { size, drop_last }) => Box::new(Batches::new(items, size, drop_last)),
            None => Box::new(items.map(|index| index.map_or(Outcome::Raised, Outcome::Index))),
        };
        let (mut stream, mut draws) = (Stream::new(rule).expect("a good rule"), Draws::of(&sampler));
        let mut finished = 0;
        while finished < 3 {
            let expected = if finished == 0 { generator.next() } else { None }.unwrap_or(Outcome::Stop);
            finished += u8::from(matches!(expected, Outcome::Stop | Outcome::Raised));
            let mut passed = Passed::default();
            prop_assert_eq!(draws.request(&mut stream, &mut passed), expected);
            prop_assert_eq!(passed.count, 0);
            prop_assert_eq!(draws.drawn, *drawn.borrow());
        }
    }
}

#[test]
fn an_infinite_sampler_counts_nones() {
    let rule = BatchRule { size: 4, drop_last: true };
    let mut batches = Stream::nones(Some(rule)).expect("a good rule");
    let mut single = Stream::nones(None).expect("a good rule");
    for _ in 0..100 {
        assert_eq!(batches.next(), Step::Nones(4));
        assert_eq!(single.next(), Step::None);
    }
}

#[test]
fn a_batch_without_indices_is_refused() {
    assert!(matches!(Stream::new(Some(BatchRule { size: 0, drop_last: false })), Err(Error::Config(_))));
}

#[test]
fn a_chunk_that_nobody_asked_for_is_left_out() {
    let mut stream = counting(1, None);
    stream.supply(Some(Chunk::Range { start: 7, step: 0, len: 9 }));
    assert_eq!(stream.next(), Step::Index(0));
    assert_eq!(stream.next(), Step::Need);
    stream.supply(None);
    assert_eq!(stream.next(), Step::End);
}

#[test]
fn batches_change_their_size_unless_the_last_is_dropped() {
    for drop_last in [false, true] {
        let mut stream = counting(9, Some(BatchRule { size: 2, drop_last }));
        assert_eq!(stream.next(), Step::Batch(&[0, 1]));
        stream.resize(3);
        let batch: &[i64] = if drop_last { &[2, 3] } else { &[2, 3, 4] };
        assert_eq!(stream.next(), Step::Batch(batch));
        assert!(!stream.has_ended());
        stream.resize(0);
        assert_eq!(stream.has_ended(), !drop_last);
        stream.close();
        assert_eq!(stream.next(), Step::End);
    }
}

/// Torch's `randperm`, of the same words.
fn permuted(words: &[u32]) -> Vec<i64> {
    let n = words.len() + 1;
    let mut elements: Vec<i64> = (0..n as i64).collect();
    for (at, word) in words.iter().enumerate() {
        elements.swap(at, at + *word as usize % (n - at));
    }
    elements
}

#[test]
fn a_permutation_is_the_same_in_any_parts() {
    for n in [1_u64, 2, 3, 1000, 1001] {
        let words: Vec<u32> = (1..n).map(|word| (word as u32).wrapping_mul(0x9E37_79B9)).collect();
        let expected = permuted(&words);
        for part in [1, 2, 7, 64, 5000] {
            let mut shuffle = Shuffle::new(n).expect("there is memory");
            let mut taken = 0;
            for (position, &element) in (0..n).zip(&expected) {
                let count =
                    shuffle.missing(if position % part == 0 { position + part } else { position + 1 });
                let pairs = words[taken..][..count as usize].chunks(2);
                let pairs = pairs
                    .map(|pair| (u64::from(pair[0]) << 32 | u64::from(*pair.get(1).unwrap_or(&0))) as i64);
                shuffle.supply(&pairs.collect::<Vec<_>>(), count).expect("as many as are missing");
                taken += count as usize;
                assert!(taken % 2 == 0 || taken == words.len(), "the last word alone is a half");
                assert_eq!(shuffle.get(position), Some(element), "{position} of {n}");
            }
            assert_eq!(shuffle.get(n), None);
        }
    }
}

#[test]
fn words_that_are_not_missing_are_refused() {
    let mut shuffle = Shuffle::new(10).expect("there is memory");
    assert_eq!((shuffle.missing(1), shuffle.missing(u64::MAX), shuffle.get(0)), (2, 9, None));
    for (pairs, count) in [(4, 9), (5, 10), (6, 9)] {
        assert!(shuffle.supply(&vec![0; pairs], count).is_err(), "{pairs} {count}");
    }
    shuffle.supply(&[0; 5], 9).expect("two words to each");
    assert_eq!((shuffle.missing(10), shuffle.get(9)), (0, Some(9)));
}
