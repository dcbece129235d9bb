//! Streams against the generators: every request's outcome, and which draws it makes.

use std::cell::RefCell;
use std::rc::Rc;

use proptest::prelude::*;
use ringloader_core::plan::{BatchRule, Draw, Source, Step, Stream, Supply, fingerprint_of};
use ringloader_core::{Error, Result};

use crate::generators::{self, Batches, Distributed, Items, Raised, Rng, Shared};

#[derive(Clone, Debug)]
pub(crate) enum Sampler {
    Sequential(u64),
    Random { n: u64, replacement: bool, private_generator: bool },
    Subset(u64),
    Weighted { categories: u64, num_samples: u64 },
    Distributed(Distributed),
}

impl Sampler {
    pub(crate) fn items(&self, rng: &Shared) -> Items {
        match self.clone() {
            Self::Sequential(len) => generators::sequential(len),
            Self::Random { n, replacement, private_generator } => {
                generators::random(rng, n, replacement, private_generator)
            }
            Self::Subset(len) => generators::permuted(rng, len),
            Self::Weighted { categories, num_samples } => generators::weighted(rng, categories, num_samples),
            Self::Distributed(sampler) => sampler.items(rng),
        }
    }

    pub(crate) fn source(&self) -> Source {
        match self.clone() {
            Self::Sequential(len) => Source::Sequential { len },
            Self::Random { n, replacement, private_generator } => {
                Source::Random { n, replacement, private_generator }
            }
            Self::Subset(len) => Source::Subset { len },
            Self::Weighted { categories, num_samples } => Source::Weighted { categories, num_samples },
            Self::Distributed(sampler) => Source::Distributed {
                len: sampler.len,
                num_samples: sampler.num_samples(),
                num_replicas: sampler.num_replicas,
                rank: sampler.rank,
                shuffle: sampler.shuffle,
                drop_last: sampler.drop_last,
                start: 0,
            },
        }
    }
}

#[derive(PartialEq, Debug)]
pub(crate) enum Outcome {
    Batch(Vec<i64>),
    Index(i64),
    Raised(Raised),
    Stop,
}

/// How many samples a stream has passed over, and the sum of their hashes.
#[derive(PartialEq, Debug, Default)]
pub(crate) struct Passed {
    pub(crate) count: u64,
    pub(crate) sum: u64,
}

impl Passed {
    pub(crate) fn add(&mut self, place: u64, index: i64) {
        self.count += 1;
        self.sum = self.sum.wrapping_add(fingerprint_of(place, 1, [index]));
    }
}

/// A request to a stream that passes over nothing, as [`request_past`].
pub(crate) fn request(stream: &mut Stream, rng: &mut Rng, word_by_word: bool) -> Outcome {
    let mut passed = Passed::default();
    let outcome = request_past(stream, rng, word_by_word, &mut passed);
    assert_eq!(passed.count, 0);
    outcome
}

/// One request as a binding serves it, permutations whole or word by word: a draw that raises leaves the need
/// unanswered. Adds what was passed over.
pub(crate) fn request_past(
    stream: &mut Stream,
    rng: &mut Rng,
    word_by_word: bool,
    passed: &mut Passed,
) -> Outcome {
    loop {
        let need = match stream.next() {
            Ok(Step::Batch(batch)) => return Outcome::Batch(batch.to_vec()),
            Ok(Step::Index(index)) => return Outcome::Index(index),
            Ok(Step::End) => return Outcome::Stop,
            Ok(Step::Passed { mut place, step, indices }) => {
                assert!(!indices.is_empty() && indices.len() as u64 <= Stream::PASS);
                for &index in indices {
                    passed.add(place, index);
                    place = place.wrapping_add(step);
                }
                continue;
            }
            Ok(Step::Need(need)) => need,
            Err(Error::EmptySource) => return Outcome::Raised(Raised::Division),
            other => panic!("{other:?}"),
        };
        let Some(supply) = answer(need, rng, word_by_word) else { return Outcome::Raised(Raised::Draw) };
        stream.supply(supply).expect("what was asked for");
    }
}

/// The answer to a need; `None` if the draw raises.
fn answer(need: Draw, rng: &mut Rng, word_by_word: bool) -> Option<Supply> {
    Some(match need {
        Draw::NumSamples => Supply::NumSamples(rng.read_num_samples()),
        Draw::Words { count } => Supply::Indices(Box::new(rng.words(count))),
        draw => match (draw, rng.draw(draw)?) {
            (Draw::Seed, _) => Supply::Seeded,
            (Draw::Permutation { .. }, _) if word_by_word => Supply::WordByWord,
            (_, indices) => Supply::Indices(Box::new(indices)),
        },
    })
}

pub(crate) fn sampler() -> impl Strategy<Value = Sampler> {
    let random =
        |n| {
            (n, any::<bool>(), any::<bool>()).prop_map(|(n, replacement, private_generator)| {
                Sampler::Random { n, replacement, private_generator }
            })
        };
    prop_oneof![
        2 => (0..60_u64).prop_map(Sampler::Sequential),
        6 => random(0..60_u64),
        2 => random(0..6_u64),
        3 => (0..60_u64).prop_map(Sampler::Subset),
        2 => (1..40_u64, 0..60_u64)
            .prop_map(|(categories, num_samples)| Sampler::Weighted { categories, num_samples }),
        4 => (0..40_u64, 1..50_u64, any::<u64>(), any::<bool>(), any::<bool>()).prop_map(
            |(len, num_replicas, rank, shuffle, drop_last)| {
                Sampler::Distributed(Distributed { len, num_replicas, rank: rank % num_replicas, shuffle, drop_last })
            }
        ),
    ]
}

pub(crate) fn rule() -> impl Strategy<Value = Option<BatchRule>> {
    prop::option::weighted(
        0.8,
        (prop_oneof![1..12_u64, 1..70_u64], any::<bool>())
            .prop_map(|(size, drop_last)| BatchRule { size, drop_last }),
    )
}

/// Multiples of the length and of a chunk, and anything; growing while the epoch runs, or not.
pub(crate) fn num_samples() -> impl Strategy<Value = Vec<u64>> {
    let one = prop_oneof![0..130_u64, Just(32), Just(64), Just(12), Just(30), Just(60)];
    prop_oneof![3 => one.clone().prop_map(|count| vec![count]), 1 => (one.clone(), one).prop_map(|(a, b)| vec![a, b])]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4000))]

    #[test]
    fn every_request_is_torchs(
        sampler in sampler(),
        rule in rule(),
        num_samples in num_samples(),
        seed in any::<u64>(),
        word_by_word in any::<bool>(),
        fails_at in prop_oneof![9 => Just(usize::MAX), 1 => 0..5_usize],
    ) {
        let torch: Shared = Rc::new(RefCell::new(Rng::new(seed, fails_at, num_samples)));
        let mut ours = torch.borrow().clone();
        let mut generator: Box<dyn Iterator<Item = std::result::Result<Outcome, Raised>>> = match rule {
            Some(BatchRule { size, drop_last }) => Box::new(
                Batches::new(sampler.items(&torch), size, drop_last).map(|batch| batch.map(Outcome::Batch)),
            ),
            None => Box::new(sampler.items(&torch).fuse().map(|index| index.map(Outcome::Index))),
        };
        let mut stream = Stream::new(sampler.source(), rule).expect("a sampler that torch accepts");
        let (mut finished, mut raised) = (0, false);
        while finished < 3 {
            let expected = match if finished == 0 { generator.next() } else { None } {
                Some(Ok(outcome)) => outcome,
                Some(Err(raised)) => Outcome::Raised(raised),
                None => Outcome::Stop,
            };
            finished += u8::from(matches!(expected, Outcome::Stop | Outcome::Raised(_)));
            let outcome = request(&mut stream, &mut ours, word_by_word);
            let mut torch = torch.borrow_mut();
            // Torch reads after a permutation what this reads before it, and not at all if the draw raises.
            raised |= expected == Outcome::Raised(Raised::Draw);
            if !raised {
                prop_assert_eq!(ours.readings, torch.readings);
            }
            if ours.draws.len() < torch.draws.len() {
                // The one draw that is left out: a private generator's last, of which nothing is used.
                let Sampler::Random { private_generator: true, replacement: false, n } = sampler else {
                    panic!("{sampler:?} left a draw out");
                };
                let last = *torch.num_samples.last().expect("never empty");
                prop_assert_eq!((last % n, ours.readings), (0, 2));
                prop_assert_eq!(torch.draws.pop(), Some(Draw::Permutation { n }));
                if expected == Outcome::Raised(Raised::Draw) {
                    // A draw that is left out cannot raise.
                    return Ok(());
                }
            }
            prop_assert_eq!(outcome, expected);
            prop_assert_eq!(&ours.draws, &torch.draws);
        }
    }

    #[test]
    fn refuses_what_was_not_asked_for(
        sampler in sampler(),
        rule in rule(),
        answers in prop::collection::vec((any::<u8>(), 0..40_usize, -1..40_i64, any::<u64>()), 0..40),
    ) {
        let mut stream = Stream::new(sampler.source(), rule).expect("a sampler that torch accepts");
        let mut rng = Rng::new(7, usize::MAX, vec![33]);
        for (kind, len, value, number) in answers {
            let step = stream.next();
            let need = match step {
                Ok(Step::Need(need)) => Some(need),
                Ok(Step::End) | Err(Error::EmptySource | Error::Indices(_)) => None,
                Ok(Step::Batch(_) | Step::Index(_)) => None,
                other => panic!("{other:?}"),
            };
            let supply = match kind % 5 {
                0 => Supply::Seeded,
                1 => Supply::NumSamples(number),
                2 => Supply::Indices(Box::new(vec![value; len])),
                // The right number of indices, perhaps out of range.
                _ => match need {
                    Some(Draw::Seed) => Supply::Seeded,
                    Some(Draw::NumSamples) => Supply::NumSamples(number % 200),
                    Some(draw) => {
                        let mut indices = rng.draw(draw).unwrap_or_default();
                        if let (Some(index), 4) = (indices.first_mut(), kind % 5) {
                            *index = value;
                        }
                        Supply::Indices(Box::new(indices))
                    }
                    None => Supply::Seeded,
                },
            };
            let fits = match (need, &supply) {
                (Some(Draw::Seed), Supply::Seeded) | (Some(Draw::NumSamples), Supply::NumSamples(_)) => true,
                (Some(Draw::Permutation { n: count }), Supply::Indices(indices))
                | (
                    Some(Draw::Integers { count, .. } | Draw::Multinomial { count, .. }), Supply::Indices(indices)
                ) => indices.as_slice().len() as u64 == count,
                _ => false,
            };
            let accepted: Result<()> = stream.supply(supply);
            prop_assert_eq!(accepted.is_ok(), fits);
            if let Err(error) = accepted {
                prop_assert!(matches!(error, Error::Indices(_)));
            }
        }
    }
}

fn drawn(source: Source, size: u64, supplies: Vec<Supply>) -> (Result<Vec<i64>>, bool) {
    let mut stream = Stream::new(source, Some(BatchRule { size, drop_last: false })).expect("a good source");
    for supply in supplies {
        assert!(matches!(stream.next(), Ok(Step::Need(_))));
        stream.supply(supply).expect("what was asked for");
    }
    let batch = stream.next().map(|step| match step {
        Step::Batch(batch) => batch.to_vec(),
        other => panic!("{other:?}"),
    });
    (batch, matches!(stream.next(), Ok(Step::End)))
}

#[test]
fn an_index_out_of_range_is_an_error_and_the_end() {
    let source = |kind| match kind {
        0 => Source::Subset { len: 3 },
        1 => Source::Weighted { categories: 3, num_samples: 3 },
        _ => Source::Distributed {
            len: 3,
            num_samples: 3,
            num_replicas: 1,
            rank: 0,
            shuffle: true,
            drop_last: false,
            start: 0,
        },
    };
    for kind in 0..3 {
        for wrong in [3, -1, i64::MIN] {
            let supply = Supply::Indices(Box::new(vec![0, wrong, 1]));
            let (batch, ended) = drawn(source(kind), 3, vec![supply]);
            let Err(Error::Indices(text)) = batch else { panic!("{batch:?}") };
            assert!(text.contains(&wrong.to_string()) && text.contains("range of 3"), "{text}");
            assert!(ended);
        }
    }
    for replacement in [false, true] {
        let source = Source::Random { n: 3, replacement, private_generator: true };
        let len = if replacement { 32 } else { 3 };
        let mut indices = vec![0; len];
        indices[2] = 3;
        let supplies = vec![Supply::Seeded, Supply::NumSamples(40), Supply::Indices(Box::new(indices))];
        assert!(matches!(drawn(source, 3, supplies), (Err(Error::Indices(_)), true)));
    }
}

#[test]
fn an_error_does_not_print_the_indices() {
    let mut stream = Stream::new(Source::Sequential { len: 3 }, None).expect("a good source");
    let error = stream.supply(Supply::Indices(Box::new(vec![0; 1000]))).expect_err("nothing was asked for");
    assert!(error.to_string().len() < 150, "{error}");
    assert!(error.to_string().contains("1000"), "{error}");
}

#[test]
fn an_infinite_sampler_counts_nones() {
    let rule = BatchRule { size: 4, drop_last: true };
    let mut batches = Stream::new(Source::InfiniteNone, Some(rule)).expect("a good source");
    let mut single = Stream::new(Source::InfiniteNone, None).expect("a good source");
    for _ in 0..100 {
        assert_eq!(batches.next(), Ok(Step::Nones(4)));
        assert_eq!(single.next(), Ok(Step::None));
    }
}

#[test]
fn a_batch_without_indices_is_refused() {
    let rule = BatchRule { size: 0, drop_last: false };
    assert!(matches!(Stream::new(Source::Sequential { len: 3 }, Some(rule)), Err(Error::Config(_))));
}

#[test]
fn a_long_permutation_is_the_same_word_by_word() {
    for n in [33_000_u64, 33_001] {
        let sources = || {
            [
                Source::Random { n, replacement: false, private_generator: false },
                Source::Subset { len: n },
                Source::Distributed {
                    len: n,
                    num_samples: n.div_ceil(3),
                    num_replicas: 3,
                    rank: 2,
                    shuffle: true,
                    drop_last: false,
                    start: 0,
                },
            ]
        };
        for size in [1, 1000, 20_000, 40_000] {
            let rule = Some(BatchRule { size, drop_last: false });
            for (whole, by_word) in sources().into_iter().zip(sources()) {
                let mut read = [(whole, false), (by_word, true)].map(|(source, word_by_word)| {
                    let mut rng = Rng::new(n, usize::MAX, vec![n]);
                    let mut stream = Stream::new(source, rule).expect("a good source");
                    let batches = std::iter::from_fn(|| match request(&mut stream, &mut rng, word_by_word) {
                        Outcome::Batch(batch) => Some(batch),
                        end => {
                            assert_eq!(end, Outcome::Stop);
                            None
                        }
                    });
                    batches.collect::<Vec<_>>()
                });
                let by_word = std::mem::take(&mut read[1]);
                assert!(read[0].len() as u64 >= n / 3 / size && read[0] == by_word, "{n} in {size}");
            }
        }
    }
}

#[test]
fn what_torch_permutes_in_another_way_is_refused_word_by_word() {
    let n = Supply::MOST_WORD_BY_WORD + 1;
    let source = Source::Random { n, replacement: false, private_generator: false };
    let mut stream = Stream::new(source, None).expect("a good source");
    assert_eq!(stream.next(), Ok(Step::Need(Draw::NumSamples)));
    stream.supply(Supply::NumSamples(n)).expect("it was asked for");
    assert_eq!(stream.next(), Ok(Step::Need(Draw::Permutation { n })));
    assert!(matches!(stream.supply(Supply::WordByWord), Err(Error::Indices(_))));
}

#[test]
fn too_few_words_are_refused() {
    let mut stream = Stream::new(Source::Subset { len: 10 }, None).expect("a good source");
    assert_eq!(stream.next(), Ok(Step::Need(Draw::Permutation { n: 10 })));
    stream.supply(Supply::WordByWord).expect("it was asked for");
    assert_eq!(stream.next(), Ok(Step::Need(Draw::Words { count: 9 })));
    assert!(stream.supply(Supply::Indices(Box::new(vec![0; 4]))).is_err());
    stream.supply(Supply::Indices(Box::new(vec![0; 5]))).expect("two words to each");
    assert!(matches!(stream.next(), Ok(Step::Index(0..10))));
}

#[test]
fn batches_change_their_size_unless_the_last_is_dropped() {
    for drop_last in [false, true] {
        let rule = BatchRule { size: 2, drop_last };
        let mut stream = Stream::new(Source::Sequential { len: 9 }, Some(rule)).expect("a good source");
        assert_eq!(stream.next(), Ok(Step::Batch(&[0, 1])));
        stream.resize(3);
        let batch: &[i64] = if drop_last { &[2, 3] } else { &[2, 3, 4] };
        assert_eq!(stream.next(), Ok(Step::Batch(batch)));
        assert!(!stream.has_ended());
        stream.resize(0);
        assert_eq!(stream.has_ended(), !drop_last);
        stream.close();
        assert_eq!(stream.next(), Ok(Step::End));
    }
}
