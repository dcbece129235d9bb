//! Streams that pass over some of their indices, and the sum over them.

use proptest::prelude::*;
use ringloader_core::Error;
use ringloader_core::plan::{BatchRule, Chunk, OrdinalSet, Step, Stream, fingerprint_of};

use crate::generators::{Draws, Outcome, Passed, sampler};
use crate::streams::{counting, rule};

/// All indices of a stream, its batches' sizes, and what it passed over.
fn read(stream: &mut Stream, draws: &mut Draws) -> (Vec<i64>, Vec<usize>, Passed) {
    let (mut indices, mut sizes, mut passed) = (Vec::new(), Vec::new(), Passed::default());
    loop {
        let batch = match draws.request(stream, &mut passed) {
            Outcome::Batch(batch) => batch,
            Outcome::Index(index) => vec![index],
            Outcome::Stop | Outcome::Raised => return (indices, sizes, passed),
        };
        sizes.push(batch.len());
        indices.extend(batch);
    }
}

fn contains(set: &OrdinalSet, ordinal: u64) -> bool {
    set.ranges().any(|(start, stop)| (start..stop).contains(&ordinal))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn what_remains_is_regrouped(
        sampler in sampler(),
        rule in rule(),
        may_roll_over in any::<bool>(),
        first in prop::collection::vec(100..200_i64, 0..9),
        base in prop::collection::vec((0..80_u64, 0..30_u64), 0..8),
        place in any::<u64>(),
        step in any::<u64>(),
    ) {
        let rolls_over = rule.is_some_and(|rule| rule.drop_last) && may_roll_over;
        let first = if rolls_over { first } else { vec![] };
        let whole = [first.clone(), sampler.whole()].concat();

        let mut delivered = OrdinalSet::new();
        base.iter().for_each(|&(start, many)| delivered.insert(start, start + many));
        let mut stream = Stream::new(rule).expect("a good rule");
        if rolls_over {
            stream.roll_over(first).expect("a fresh stream");
        }
        stream.skip(delivered.clone(), place, step).expect("a fresh stream");
        let mut draws = Draws::of(&sampler);
        let (after, sizes, passed) = read(&mut stream, &mut draws);
        let numbered = || (0_u64..).zip(whole.iter().copied());
        let mut expected = Passed::default();
        for (ordinal, index) in numbered().filter(|&(ordinal, _)| contains(&delivered, ordinal)) {
            expected.add(place.wrapping_add(ordinal.wrapping_mul(step)), index);
        }
        prop_assert_eq!(passed, expected);
        let mut remains: Vec<i64> =
            numbered().filter(|&(ordinal, _)| !contains(&delivered, ordinal)).map(|(_, index)| index).collect();
        let size = rule.map_or(1, |rule| rule.size) as usize;
        let left = match rule {
            Some(BatchRule { drop_last: true, .. }) => remains.split_off(remains.len() / size * size),
            _ => vec![],
        };
        prop_assert_eq!(stream.take_rest(), if rolls_over { left } else { vec![] });
        prop_assert_eq!(sizes, remains.chunks(size).map(<[_]>::len).collect::<Vec<_>>());
        prop_assert_eq!(after, remains);
        prop_assert_eq!(draws.drawn, sampler.draws.len());
    }

    #[test]
    fn ranks_add_up_in_any_order(
        indices in prop::collection::vec(any::<i64>(), 0..60),
        ranks in 1..7_usize,
        cut in 0..60_usize,
    ) {
        let (mut sum, mut expected) = (0_u64, Passed::default());
        (0..).zip(&indices).for_each(|(place, &index)| expected.add(place, index));
        for rank in (0..ranks).rev() {
            let own: Vec<i64> = indices.iter().copied().skip(rank).step_by(ranks).collect();
            let (head, tail) = own.split_at(cut.min(own.len()));
            for (first, part) in [(head.len(), tail), (0, head)] {
                let place = (rank + first * ranks) as u64;
                sum = sum.wrapping_add(fingerprint_of(place, ranks as u64, part.iter().copied()));
            }
        }
        prop_assert_eq!(sum, expected.sum);
    }

    #[test]
    fn another_order_has_another_sum(
        mut indices in prop::collection::vec(0..1000_i64, 2..60),
        one in any::<prop::sample::Index>(),
        other in any::<prop::sample::Index>(),
    ) {
        let sum = |indices: &[i64]| fingerprint_of(0, 1, indices.iter().copied());
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
        assert_eq!(fingerprint_of(place, 1, [index]), hash, "{place} {index}");
    }
}

#[test]
fn blocks_are_handed_over_with_their_places() {
    let base = OrdinalSet::from_ranges([(1, 3), (4, 5 + Stream::PASS)]).expect("in order");
    let rule = Some(BatchRule { size: 3, drop_last: false });
    let mut stream = Stream::new(rule).expect("a good rule");
    stream.skip(base, 100, 10).expect("a fresh stream");
    assert_eq!(stream.next(), Step::Need);
    stream.supply(Some(Chunk::Range { start: 0, step: 1, len: Stream::PASS + 10 }));
    assert_eq!(stream.next(), Step::Passed { place: 110, step: 10, indices: &[1, 2] });
    let block: Vec<i64> = (4..4 + Stream::PASS as i64).collect();
    assert_eq!(stream.next(), Step::Passed { place: 140, step: 10, indices: &block });
    let last = Stream::PASS as i64 + 4;
    assert_eq!(stream.next(), Step::Passed { place: 100 + 10 * last as u64, step: 10, indices: &[last] });
    assert_eq!(stream.next(), Step::Batch(&[0, 3, last + 1]));
    assert_eq!(stream.next(), Step::Batch(&[last + 2, last + 3, last + 4]));
    assert_eq!(stream.next(), Step::Need);
    stream.supply(None);
    assert_eq!(stream.next(), Step::Batch(&[last + 5]));
    assert_eq!(stream.next(), Step::End);
}

#[test]
fn only_a_fresh_stream_of_indices_skips() {
    let mut begun = counting(3, None);
    assert_eq!(begun.next(), Step::Index(0));
    assert!(matches!(begun.skip(OrdinalSet::from_ranges([(0, 1)]).unwrap(), 0, 1), Err(Error::Config(_))));
    let mut nones = Stream::nones(None).expect("a good rule");
    assert!(matches!(nones.skip(OrdinalSet::from_ranges([(0, 1)]).unwrap(), 0, 1), Err(Error::Config(_))));
    let mut short = Stream::new(None).expect("a good rule");
    short.skip(OrdinalSet::from_ranges([(0, 9)]).unwrap(), 0, 1).expect("a fresh stream");
    assert_eq!(short.next(), Step::Need);
    short.supply(Some(Chunk::Range { start: 0, step: 1, len: 3 }));
    assert_eq!(short.next(), Step::Passed { place: 0, step: 1, indices: &[0, 1, 2] });
    assert_eq!(short.next(), Step::Need);
    short.supply(None);
    assert_eq!(short.next(), Step::End);
}
