//! Streams of distributed samplers: ranks that go on where others stopped, and any numbers of them.

use proptest::prelude::*;
use ringloader_core::Error;
use ringloader_core::plan::{Source, Step, Stream};

use crate::generators::{Distributed, Rng};
use crate::streams::{Outcome, Sampler, request};

#[test]
fn a_distributed_sampler_over_another_length_is_refused() {
    let source = |len, num_samples, num_replicas, rank, drop_last| Source::Distributed {
        len,
        num_samples,
        num_replicas,
        rank,
        shuffle: false,
        drop_last,
        start: 0,
    };
    for (len, num_samples, num_replicas, rank, drop_last) in [
        (10, 4, 2, 0, false),
        (7, 4, 2, 0, true),
        (0, 1, 2, 0, false),
        (4, 2, 2, 2, false),
        (4, 0, 0, 0, true),
        (4, u64::MAX, 2, 0, false),
        (u64::MAX, u64::MAX, 1, 0, false),
    ] {
        let stream = Stream::new(source(len, num_samples, num_replicas, rank, drop_last), None);
        assert!(
            matches!(stream, Err(Error::Config(_))),
            "{len} {num_samples} {num_replicas} {rank} {drop_last}"
        );
    }
    let huge = u64::MAX;
    let mut stream =
        Stream::new(source(2, 1, huge, huge - 1, false), None).expect("more replicas than indices");
    assert_eq!(stream.next(), Ok(Step::Index(0)));
    assert_eq!(stream.next(), Ok(Step::End));
}

fn distributed(sampler: Distributed, start: u64, seed: u64) -> Vec<i64> {
    let Source::Distributed { len, num_samples, num_replicas, rank, shuffle, drop_last, .. } =
        Sampler::Distributed(sampler).source()
    else {
        unreachable!("it stands for a DistributedSampler")
    };
    let source = Source::Distributed { len, num_samples, num_replicas, rank, shuffle, drop_last, start };
    let mut rng = Rng::new(seed, usize::MAX, vec![0]);
    let mut stream = Stream::new(source, None).expect("a sampler that torch accepts");
    let indices = std::iter::from_fn(|| match request(&mut stream, &mut rng, seed.is_multiple_of(2)) {
        Outcome::Index(index) => Some(index),
        end => {
            assert_eq!(end, Outcome::Stop);
            None
        }
    });
    indices.collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn ranks_go_on_where_others_stopped(
        len in 0..40_u64,
        num_replicas in prop_oneof![1..6_u64, 1..60_u64],
        shuffle in any::<bool>(),
        drop_last in any::<bool>(),
        start in 0..60_u64,
        seed in any::<u64>(),
    ) {
        let own = |rank| Distributed { len, num_replicas, rank, shuffle, drop_last };
        let order = distributed(Distributed { num_replicas: 1, ..own(0) }, 0, seed);
        // What torch's sampler makes of the rest, but padded from the head of the epoch.
        let mut rest: Vec<i64> = order.iter().copied().skip(start as usize).collect();
        let uneven = rest.len() % num_replicas as usize;
        if drop_last {
            rest.truncate(rest.len() - uneven);
        } else if uneven > 0 {
            rest.extend(order.iter().cycle().take(num_replicas as usize - uneven));
        }
        for rank in 0..num_replicas {
            let found = distributed(own(rank), start, seed);
            let expected: Vec<i64> =
                rest.iter().copied().skip(rank as usize).step_by(num_replicas as usize).collect();
            prop_assert_eq!(&found, &expected, "rank {} of {:?}", rank, rest);
            if start.is_multiple_of(num_replicas) {
                let mut whole = distributed(own(rank), 0, seed);
                prop_assert_eq!(found, whole.split_off(whole.len().min((start / num_replicas) as usize)));
            }
        }
    }
}

#[test]
fn any_numbers_of_ranks_and_samples_are_within_range() {
    let huge = i64::MAX as u64;
    for (len, num_replicas, rank, start, expected) in [
        (huge, 1, 0, huge - 1, vec![huge - 1]),
        (huge, 2, 1, huge - 1, vec![0]),
        (huge, u64::MAX, u64::MAX - 1, huge - 1, vec![(huge - 1 + (u64::MAX - 1) % huge) % huge]),
        (huge, 2, 1, huge, vec![]),
        (3, u64::MAX, 5, u64::MAX, vec![]),
    ] {
        let num_samples = len.div_ceil(num_replicas);
        let source = Source::Distributed {
            len,
            num_samples,
            num_replicas,
            rank,
            shuffle: false,
            drop_last: false,
            start,
        };
        let mut stream = Stream::new(source, None).expect("a sampler that torch accepts");
        for index in expected {
            assert_eq!(stream.next(), Ok(Step::Index(index as i64)), "{num_replicas} {start}");
        }
        assert_eq!(stream.next(), Ok(Step::End), "{num_replicas} {start}");
    }
}
