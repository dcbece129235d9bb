//! Streams that begin in the middle, and the sum over what was passed.

use proptest::prelude::*;
use ringloader_core::Error;
use ringloader_core::plan::{BatchRule, Delivered, Fingerprint, Source, Step, Stream, sample_hash};

use crate::generators::Rng;
use crate::streams::{Outcome, Sampler, answer, num_samples, request, rule, sampler};

/// All indices that a stream still has, and its batches' sizes.
fn rest(stream: &mut Stream, rng: &mut Rng, word_by_word: bool) -> (Vec<i64>, Vec<usize>) {
    let (mut indices, mut sizes) = (Vec::new(), Vec::new());
    loop {
        let batch = match request(stream, rng, word_by_word) {
            Outcome::Batch(batch) => batch,
            Outcome::Index(index) => vec![index],
            Outcome::Stop | Outcome::Raised(_) => return (indices, sizes),
        };
        sizes.push(batch.len());
        indices.extend(batch);
    }
}

/// Passes over `count` indices, as a binding does. Returns them.
fn pass(stream: &mut Stream, count: u64, rng: &mut Rng, word_by_word: bool) -> Vec<i64> {
    let mut passed = Vec::new();
    loop {
        let need = match stream.pass(count - passed.len() as u64) {
            Ok(Step::Batch(indices)) => {
                assert!(!indices.is_empty() && indices.len() as u64 <= Stream::PASS);
                passed.extend(indices);
                continue;
            }
            Ok(Step::End) | Err(Error::EmptySource) => return passed,
            Ok(Step::Need(need)) => need,
            other => panic!("{other:?}"),
        };
        // torch refuses to draw from nothing.
        let Some(supply) = answer(need, rng, word_by_word) else { return passed };
        stream.supply(supply).expect("what was asked for");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn the_rest_is_the_rest_of_a_whole_epoch(
        sampler in sampler(),
        rule in rule(),
        num_samples in num_samples(),
        seed in any::<u64>(),
        word_by_word in any::<bool>(),
        passed in prop_oneof![0..150_u64, Just(u64::MAX)],
        read_before in 0..3_usize,
    ) {
        let mut rng = Rng::new(seed, usize::MAX, num_samples);
        let mut other = rng.clone();
        let whole = |rng: &mut Rng| {
            let keeps_all = rule.map(|BatchRule { size, .. }| BatchRule { size, drop_last: false });
            rest(&mut Stream::new(sampler.source(), keeps_all).expect("a good source"), rng, word_by_word).0
        };
        let whole = whole(&mut rng);
        let mut stream = Stream::new(sampler.source(), rule).expect("a good source");
        let mut before = Vec::new();
        for _ in 0..read_before {
            match request(&mut stream, &mut other, word_by_word) {
                Outcome::Batch(batch) => before.extend(batch),
                Outcome::Index(index) => before.push(index),
                Outcome::Stop | Outcome::Raised(_) => break,
            }
        }
        let skipped = pass(&mut stream, passed, &mut other, word_by_word);
        let (after, sizes) = rest(&mut stream, &mut other, word_by_word);
        if !rule.is_some_and(|rule| rule.drop_last) {
            prop_assert_eq!(skipped.len() as u64, passed.min((whole.len() - before.len()) as u64));
        }
        let all: Vec<i64> = before.into_iter().chain(skipped).chain(after).collect();
        match rule {
            Some(BatchRule { size, drop_last: true }) => {
                prop_assert!(whole.starts_with(&all));
                prop_assert!(((whole.len() - all.len()) as u64) < size);
                prop_assert!(sizes.iter().all(|&len| len as u64 == size));
            }
            _ => {
                prop_assert_eq!(&all, &whole);
                let full = rule.map_or(1, |rule| rule.size);
                prop_assert!(sizes.iter().rev().skip(1).all(|&len| len as u64 == full));
            }
        }
        // The generators are then where a whole epoch leaves them.
        prop_assert_eq!(rng.draws, other.draws);
        prop_assert!(stream.next().is_ok_and(|step| step == Step::End));
    }

    #[test]
    fn what_remains_is_regrouped(
        sampler in sampler(),
        rule in rule(),
        num_samples in num_samples(),
        seed in any::<u64>(),
        word_by_word in any::<bool>(),
        first in prop::collection::vec(100..200_i64, 0..9),
        base in prop::collection::vec((0..80_u64, 0..30_u64), 0..8),
        place in any::<u64>(),
        step in any::<u64>(),
    ) {
        let mut rng = Rng::new(seed, usize::MAX, num_samples);
        let mut other = rng.clone();
        let rolls_over = rule.is_some_and(|rule| rule.drop_last) && seed.is_multiple_of(2);
        let first = if rolls_over { first } else { vec![] };
        let keeps_all = rule.map(|BatchRule { size, .. }| BatchRule { size, drop_last: false });
        let mut uninterrupted = Stream::new(sampler.source(), keeps_all).expect("a good source");
        let mut whole = first.clone();
        whole.extend(rest(&mut uninterrupted, &mut rng, word_by_word).0);

        let mut delivered = Delivered::new();
        base.iter().for_each(|&(start, many)| delivered.insert(start, start + many));
        let mut stream = Stream::new(sampler.source(), rule).expect("a good source");
        if rolls_over {
            stream.roll_over(first).expect("a fresh stream");
        }
        stream.skip(delivered.clone(), place, step).expect("a fresh stream");
        let (after, sizes) = rest(&mut stream, &mut other, word_by_word);
        let numbered = || (0_u64..).zip(whole.iter().copied());
        let (mut count, mut sum) = (0, 0_u64);
        for (ordinal, index) in numbered().filter(|&(ordinal, _)| delivered.contains(ordinal)) {
            count += 1;
            sum = sum.wrapping_add(sample_hash(place.wrapping_add(ordinal.wrapping_mul(step)), index));
        }
        prop_assert_eq!(stream.passed(), (count, sum));
        let mut remains: Vec<i64> =
            numbered().filter(|&(ordinal, _)| !delivered.contains(ordinal)).map(|(_, index)| index).collect();
        let size = rule.map_or(1, |rule| rule.size) as usize;
        let left = match rule {
            Some(BatchRule { drop_last: true, .. }) => remains.split_off(remains.len() / size * size),
            _ => vec![],
        };
        // A sampler that raised, because it stands over nothing, leaves nothing.
        let leaves = rolls_over && !matches!(sampler, Sampler::Random { n: 0, .. });
        prop_assert_eq!(stream.take_rest(), if leaves { left } else { vec![] });
        prop_assert_eq!(sizes, remains.chunks(size).map(<[_]>::len).collect::<Vec<_>>());
        prop_assert_eq!(after, remains);
        prop_assert_eq!(rng.draws, other.draws);
    }

    #[test]
    fn what_was_kept_back_is_passed_first(
        first in prop::collection::vec(100..200_i64, 0..5),
        len in 0..20_u64,
        passed in 0..30_u64,
    ) {
        let rule = BatchRule { size: 5, drop_last: true };
        let mut stream = Stream::new(Source::Sequential { len }, Some(rule)).expect("a good source");
        stream.roll_over(first.clone()).expect("less than a batch");
        let mut rng = Rng::new(0, 0, vec![0]);
        let mut all = pass(&mut stream, passed, &mut rng, false);
        prop_assert_eq!(all.len() as u64, passed.min(first.len() as u64 + len));
        all.extend(rest(&mut stream, &mut rng, false).0);
        all.extend(stream.take_rest());
        let whole: Vec<i64> = first.into_iter().chain(0..len as i64).collect();
        prop_assert_eq!(all, whole);
    }

    #[test]
    fn ranks_add_up_in_any_order(
        indices in prop::collection::vec(any::<i64>(), 0..60),
        ranks in 1..7_usize,
        cut in 0..60_usize,
    ) {
        let mut whole = Fingerprint::new(0, 1);
        whole.add(&indices);
        let mut sum = 0_u64;
        for rank in (0..ranks).rev() {
            let own: Vec<i64> = indices.iter().copied().skip(rank).step_by(ranks).collect();
            let (head, tail) = own.split_at(cut.min(own.len()));
            let mut part = Fingerprint::new(rank as u64, ranks as u64);
            part.add(head);
            prop_assert_eq!(part.place(), (rank + head.len() * ranks) as u64);
            part.add(tail);
            sum = sum.wrapping_add(part.sum());
        }
        prop_assert_eq!(sum, whole.sum());
    }

    #[test]
    fn another_order_has_another_sum(
        mut indices in prop::collection::vec(0..1000_i64, 2..60),
        one in any::<prop::sample::Index>(),
        other in any::<prop::sample::Index>(),
    ) {
        let sum = |indices: &[i64]| {
            let mut all = Fingerprint::new(0, 1);
            all.add(indices);
            all.sum()
        };
        let (before, one, other) = (sum(&indices), one.index(indices.len()), other.index(indices.len()));
        let differ = indices[one] != indices[other];
        indices.swap(one, other);
        prop_assert_eq!(sum(&indices) != before, differ);
        indices.swap(one, other);
        indices[one] += 1;
        prop_assert_ne!(sum(&indices), before);
    }
}

#[test]
fn the_hash_is_the_documented_one() {
    // By Python, from the four lines of the documentation.
    let expected = [
        (0, 0, 0xe220_a839_7b1d_cdaf),
        (0, 1, 0x910a_2dec_8902_5cc1),
        (1, 0, 0x6e78_9e6a_a1b9_65f4),
        (7, 123_456, 0xe603_d868_bc30_e3e0),
        (1, -1, 0xe99f_f867_dbf6_82c9),
    ];
    for (place, index, hash) in expected {
        assert_eq!(sample_hash(place, index), hash, "{place} {index}");
    }
}

#[test]
fn blocks_are_handed_over_with_their_places() {
    let base = Delivered::from_ranges([(1, 3), (4, 5 + Stream::PASS)]).expect("in order");
    let rule = Some(BatchRule { size: 3, drop_last: false });
    let mut stream = Stream::new(Source::Sequential { len: Stream::PASS + 10 }, rule).expect("a good source");
    stream.skip(base.clone(), 100, 10).expect("a fresh stream");
    assert_eq!(stream.next(), Ok(Step::Passed { place: 110, indices: &[1, 2] }));
    let block: Vec<i64> = (4..4 + Stream::PASS as i64).collect();
    assert_eq!(stream.next(), Ok(Step::Passed { place: 140, indices: &block }));
    let last = Stream::PASS as i64 + 4;
    assert_eq!(stream.next(), Ok(Step::Passed { place: 100 + 10 * last as u64, indices: &[last] }));
    assert_eq!(stream.passed().0, base.count());
    assert_eq!(stream.next(), Ok(Step::Batch(&[0, 3, last + 1])));
    assert_eq!(stream.next(), Ok(Step::Batch(&[last + 2, last + 3, last + 4])));
    assert_eq!(stream.next(), Ok(Step::Batch(&[last + 5])));
    assert_eq!(stream.next(), Ok(Step::End));
}

#[test]
fn only_a_fresh_stream_of_indices_skips() {
    let mut begun = Stream::new(Source::Sequential { len: 3 }, None).expect("a good source");
    assert_eq!(begun.next(), Ok(Step::Index(0)));
    assert!(matches!(begun.skip(Delivered::first(1), 0, 1), Err(Error::Config(_))));
    let mut nones = Stream::new(Source::InfiniteNone, None).expect("a good source");
    assert!(matches!(nones.skip(Delivered::first(1), 0, 1), Err(Error::Config(_))));
    let mut short = Stream::new(Source::Sequential { len: 3 }, None).expect("a good source");
    short.skip(Delivered::first(9), 0, 1).expect("a fresh stream");
    assert_eq!(short.next(), Ok(Step::Passed { place: 0, indices: &[0, 1, 2] }));
    assert_eq!(short.next(), Ok(Step::End));
    assert_eq!(short.passed().0, 3);
}

#[test]
fn passing_a_long_way_takes_several_steps() {
    let sampler = Sampler::Sequential(3 * Stream::PASS);
    let mut stream = Stream::new(sampler.source(), None).expect("a good source");
    let passed = pass(&mut stream, 2 * Stream::PASS + 1, &mut Rng::new(0, 0, vec![0]), false);
    assert_eq!(passed.len() as u64, 2 * Stream::PASS + 1);
    assert_eq!(stream.next(), Ok(Step::Index(2 * Stream::PASS as i64 + 1)));
    let mut nones = Stream::new(Source::InfiniteNone, None).expect("a good source");
    assert_eq!(nones.pass(10), Ok(Step::Nones(10)));
}
