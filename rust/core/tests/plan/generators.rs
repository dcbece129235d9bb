//! Torch's samplers and batch samplers as Python writes them, in lazy iterators.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::iter;
use std::rc::Rc;

use proptest::prelude::*;
use ringloader_core::plan::{Chunk, Step, Stream, fingerprint_of};

/// A sampler: the indices of each of its draws, and the draw that raises.
#[derive(Clone, Debug)]
pub(crate) struct Sampler {
    pub(crate) draws: Vec<Vec<i64>>,
    pub(crate) fails_at: usize,
}

impl Sampler {
    pub(crate) fn new(draws: Vec<Vec<i64>>) -> Self {
        Self { draws, fails_at: usize::MAX }
    }

    pub(crate) fn whole(&self) -> Vec<i64> {
        self.draws.concat()
    }

    /// `for draw in draws: yield from draw()`; counts the draws.
    pub(crate) fn items(&self, drawn: &Rc<RefCell<usize>>) -> impl Iterator<Item = Option<i64>> + 'static {
        let (sampler, drawn) = (self.clone(), drawn.clone());
        (0..sampler.draws.len()).flat_map(move |draw| {
            *drawn.borrow_mut() += 1;
            if draw == sampler.fails_at {
                return vec![None];
            }
            sampler.draws[draw].iter().copied().map(Some).collect()
        })
    }
}

/// Draws of any lengths, also of none.
pub(crate) fn sampler() -> impl Strategy<Value = Sampler> {
    let draw = prop_oneof![4 => prop::collection::vec(-9..90_i64, 0..40), 1 => Just(vec![])];
    prop::collection::vec(draw, 0..5).prop_map(Sampler::new)
}

#[derive(PartialEq, Debug)]
pub(crate) enum Outcome {
    Batch(Vec<i64>),
    Index(i64),
    Raised,
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

/// The draws that are left of a sampler, as a binding asks for them.
pub(crate) struct Draws {
    left: VecDeque<Vec<i64>>,
    pub(crate) drawn: usize,
    fails_at: usize,
}

impl Draws {
    pub(crate) fn of(sampler: &Sampler) -> Self {
        Self { left: sampler.draws.clone().into(), drawn: 0, fails_at: sampler.fails_at }
    }

    /// One request as a binding serves it: a draw that raises leaves the need unanswered. Adds what was passed over.
    pub(crate) fn request(&mut self, stream: &mut Stream, passed: &mut Passed) -> Outcome {
        loop {
            match stream.next() {
                Step::Batch(batch) => return Outcome::Batch(batch.to_vec()),
                Step::Index(index) => return Outcome::Index(index),
                Step::End => return Outcome::Stop,
                Step::Passed { mut place, step, indices } => {
                    assert!(!indices.is_empty() && indices.len() as u64 <= Stream::PASS);
                    for &index in indices {
                        passed.add(place, index);
                        place = place.wrapping_add(step);
                    }
                    continue;
                }
                Step::Need => {}
                other => panic!("{other:?}"),
            }
            let found = self.left.pop_front();
            if found.is_some() && self.drawn == self.fails_at {
                self.drawn += 1;
                return Outcome::Raised;
            }
            self.drawn += usize::from(found.is_some());
            stream.supply(found.map(as_chunk));
        }
    }
}

/// A range where the indices are one.
fn as_chunk(indices: Vec<i64>) -> Chunk {
    match indices[..] {
        [start, second, ..] if indices.windows(2).all(|pair| pair[1] - pair[0] == second - start) => {
            Chunk::Range { start, step: second - start, len: indices.len() as u64 }
        }
        _ => Chunk::Drawn(Box::new(indices)),
    }
}

/// `BatchSampler.__iter__`
pub(crate) struct Batches<I: Iterator<Item = Option<i64>>> {
    items: iter::Fuse<I>,
    size: usize,
    drop_last: bool,
    finished: bool,
}

impl<I: Iterator<Item = Option<i64>>> Batches<I> {
    pub(crate) fn new(items: I, size: u64, drop_last: bool) -> Self {
        Self { items: items.fuse(), size: size as usize, drop_last, finished: false }
    }
}

impl<I: Iterator<Item = Option<i64>>> Iterator for Batches<I> {
    type Item = Outcome;

    fn next(&mut self) -> Option<Outcome> {
        if self.finished {
            return None;
        }
        let batch: Option<Vec<i64>> = self.items.by_ref().take(self.size).collect();
        match batch {
            None => {
                self.finished = true;
                Some(Outcome::Raised)
            }
            // `zip` ends within the tuple, `islice` only if it is empty.
            Some(batch) if batch.is_empty() || self.drop_last && batch.len() < self.size => {
                self.finished = true;
                None
            }
            Some(batch) => Some(Outcome::Batch(batch)),
        }
    }
}
