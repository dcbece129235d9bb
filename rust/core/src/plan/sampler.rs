//! Torch's samplers as streams of indices, over random numbers that torch drew.
//!
//! A stream is the generator that torch's `__iter__` returns, turned inside out: where the generator's body would draw,
//! [`Stream::next`] returns [`Step::Need`], and after [`Stream::supply`] it continues at that point. So every draw
//! belongs to the same request as in torch, an epoch that is abandoned leaves the generators where torch leaves them,
//! and there is never a list of all indices.
//!
//! MIRRORS torch sampler.py and distributed.py, of 2.6 to 2.15: the classes' `__iter__`
//!
//! - A stream is made when torch's body would run: at the first request, except for what `DistributedSampler` and
//!   `SequentialSampler` read inside `iter` when they are iterated without a `BatchSampler`.
//! - A request that follows an unanswered need finds the stream ended: so does a generator whose body raised.
//! - A stream that has ended stays so, and needs nothing more.
#![forbid(unsafe_code)]

mod drawn;
mod once;
mod random;
mod shuffle;
mod supply;

use std::vec;

pub use self::supply::{Draw, Indices, Supply};

use self::once::Once;
use self::random::Random;
use self::supply::check;
use super::ordinals::{OrdinalSet, Stretch, Walk};
use crate::{Error, Result};

/// One request's outcome.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step<'a> {
    /// The indices of one batch.
    Batch(&'a [i64]),
    /// One index, from a stream without batches.
    Index(i64),
    /// One batch for an iterable dataset: a list of this number of `None`.
    Nones(u64),
    /// `None`, from a stream without batches.
    None,
    /// Indices that a [skip](Stream::skip) passed over, at least one and no more than [`Stream::PASS`]. Ask again: they
    /// may come while a batch is being read.
    Passed {
        /// The place of the first.
        place: u64,
        /// The step from each place to the next.
        step: u64,
        /// The indices.
        indices: &'a [i64],
    },
    /// Supply this, and ask again.
    Need(Draw),
    /// There are no more: `StopIteration`, now and ever after.
    End,
}

/// The torch sampler that a stream stands for, with what the sampler reads before it draws.
#[derive(Debug)]
pub enum Source {
    /// `SequentialSampler`
    Sequential {
        /// `len(data_source)`
        len: u64,
    },
    /// `RandomSampler`
    Random {
        /// `len(data_source)`
        n: u64,
        /// With replacement.
        replacement: bool,
        /// The sampler has no generator of its own: it seeds one from the global generator.
        private_generator: bool,
    },
    /// `SubsetRandomSampler`: positions in its `indices`, which torch reads one by one, for the user may change them.
    Subset {
        /// `len(indices)`
        len: u64,
    },
    /// `WeightedRandomSampler`
    Weighted {
        /// `len(weights)`
        categories: u64,
        /// The sampler's `num_samples`.
        num_samples: u64,
    },
    /// `DistributedSampler`. Its permutation comes from a generator of its own, seeded with `seed + epoch`.
    Distributed {
        /// `len(dataset)`
        len: u64,
        /// The sampler's `num_samples`: indices of a whole epoch for this rank.
        num_samples: u64,
        /// The sampler's `num_replicas`.
        num_replicas: u64,
        /// The sampler's `rank`.
        rank: u64,
        /// Permuted, or in order.
        shuffle: bool,
        /// Cuts off the rest that would make the ranks unequal, instead of repeating indices to fill them up.
        drop_last: bool,
        /// Samples of the epoch that all ranks together consumed before, perhaps another number of ranks: 0 for torch's
        /// own order. The indices after them are padded from the epoch's first, or cut, as torch does with a whole
        /// epoch; and rank `r` of `W` has `start + r`, `start + r + W`, ... of them. With the number of ranks that
        /// consumed them, as torch itself continues.
        start: u64,
    },
    /// `_InfiniteConstantSampler`: `None`, without end.
    InfiniteNone,
}

/// `BatchSampler`'s arguments.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BatchRule {
    /// Indices in a batch; not 0, at first.
    pub size: u64,
    /// An incomplete last batch is read and dropped.
    pub drop_last: bool,
}

/// A sampler's iterator, or its `BatchSampler`'s.
#[derive(Debug)]
pub struct Stream {
    /// The indices that an earlier stream left, before all that the generator gives.
    first: vec::IntoIter<i64>,
    generator: Generator,
    /// Past the indices that are not handed out.
    walk: Option<Walk>,
    rule: Option<BatchRule>,
    /// Indices of the batch that is being read; after it was handed out, until the next request.
    batch: Vec<i64>,
    state: StreamState,
    /// The incomplete last batch of a stream with rollover, once the end was reached.
    rest: Option<Vec<i64>>,
    /// Indices that were just passed over.
    passed: Vec<i64>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StreamState {
    /// Nothing of the next batch has been read.
    Ready,
    /// A need was answered, or indices were passed over, while the batch was being read.
    Answered,
    /// A need was told.
    Needs(Draw),
    Ended,
}

#[derive(Debug)]
enum Generator {
    Random(Random),
    Once(Once),
    InfiniteNone,
}

/// The outcome of a request to a generator for some indices.
enum Pull {
    /// The generator appended at least one index.
    Some,
    Need(Draw),
    End,
}

impl Stream {
    /// The most indices that are passed over in one step.
    pub const PASS: u64 = 1 << 12;

    /// A stream that has not been asked yet; `rule` is `None` for `batch_size=None`.
    ///
    /// # Errors
    /// [`Error::Config`] for a batch size of 0. Also for a distributed sampler that would fail in torch, because its
    /// dataset no longer has the length that it was made for: iterate such a sampler in Python.
    pub fn new(source: Source, rule: Option<BatchRule>) -> Result<Self> {
        if rule.is_some_and(|rule| rule.size == 0) {
            return Err(Error::Config("a batch needs a size of at least 1, not 0".into()));
        }
        let generator = match source {
            Source::Random { n, replacement, private_generator } => {
                Generator::Random(Random::new(n, replacement, private_generator))
            }
            Source::InfiniteNone => Generator::InfiniteNone,
            source => Generator::Once(Once::new(source)?),
        };
        Ok(Self {
            first: Vec::new().into_iter(),
            generator,
            walk: None,
            rule,
            batch: Vec::new(),
            state: StreamState::Ready,
            rest: None,
            passed: Vec::new(),
        })
    }

    /// The next batch or index, or what is needed for it. Costs what the batch has indices; allocates only while the
    /// largest batch grows.
    ///
    /// # Errors
    /// [`Error::EmptySource`] where torch divides by zero, [`Error::Indices`] for a supplied index that is out of
    /// range. The stream has then ended.
    #[expect(clippy::should_implement_trait, reason = "it lends the batch, which an iterator cannot")]
    pub fn next(&mut self) -> Result<Step<'_>> {
        match std::mem::replace(&mut self.state, StreamState::Ended) {
            StreamState::Ready => self.batch.clear(),
            StreamState::Answered => {}
            StreamState::Needs(_) | StreamState::Ended => return Ok(self.end()),
        }
        if let Generator::InfiniteNone = self.generator {
            self.state = StreamState::Ready;
            return Ok(self.rule.map_or(Step::None, |rule| Step::Nones(rule.size)));
        }
        let size = self.rule.map_or(1, |rule| rule.size);
        loop {
            let missing = size - self.batch.len() as u64;
            if missing == 0 {
                self.state = StreamState::Ready;
                return Ok(match self.rule {
                    Some(_) => Step::Batch(&self.batch),
                    None => Step::Index(self.batch[0]),
                });
            }
            let run = self.walk.as_ref().map_or(Stretch::Out(missing), Walk::stretch);
            let (limit, out) = match run {
                Stretch::Out(run) => (run.min(missing), &mut self.batch),
                Stretch::In(run) => {
                    self.passed.clear();
                    (run.min(Self::PASS), &mut self.passed)
                }
            };
            let before = out.len();
            let read = match pull(&mut self.first, &mut self.generator, limit, out)? {
                Pull::Some => (out.len() - before) as u64,
                Pull::Need(draw) => {
                    self.state = StreamState::Needs(draw);
                    return Ok(Step::Need(draw));
                }
                Pull::End => return Ok(self.last()),
            };
            if let Some(walk) = &mut self.walk {
                let (place, step) = walk.place();
                walk.advance(read);
                if let Stretch::In(_) = run {
                    self.state = StreamState::Answered;
                    return Ok(Step::Passed { place, step, indices: &self.passed });
                }
            }
        }
    }

    /// Sets the size of the batches that are still to be read; 0 ends the stream. Torch looks at it before each
    /// batch, unless it drops the last one.
    pub fn resize(&mut self, size: u64) {
        match &mut self.rule {
            Some(BatchRule { drop_last: false, .. }) if size == 0 => self.close(),
            Some(rule) if !rule.drop_last => rule.size = size,
            _ => {}
        }
    }

    /// Makes a stream roll over that was not asked yet and drops its last batch: it begins with `first`, which an
    /// earlier one left, and keeps what it would drop for [`take_rest`](Self::take_rest).
    ///
    /// # Errors
    /// [`Error::Config`] for a stream of another kind.
    pub fn roll_over(&mut self, first: Vec<i64>) -> Result<()> {
        let fits = self.rule.is_some_and(|rule| rule.drop_last) && self.rest.is_none();
        if !fits || !self.is_fresh() {
            return Err(Error::Config(format!("a stream that cannot begin with {} indices", first.len())));
        }
        self.first = first.into_iter();
        self.rest = Some(Vec::new());
        Ok(())
    }

    /// Makes a stream that was not asked yet give only the indices whose ordinals are not in `base`: batches are made
    /// of these, as if there were no others, and the last batch is dropped or rolls over as such a batch. What is in
    /// `base` is read when it is reached, and handed over as [`Step::Passed`], so that each draw belongs to the request
    /// to which it belongs in torch. What rolls over from an earlier stream has the first ordinals.
    ///
    /// The sample of ordinal `k` has the place `place + k * step`.
    ///
    /// # Errors
    /// [`Error::Config`] for a stream that was asked, and one without indices.
    pub fn skip(&mut self, base: OrdinalSet, place: u64, step: u64) -> Result<()> {
        if !self.is_fresh() {
            return Err(Error::Config(
                "only a stream of indices, from its beginning, can pass over some".into(),
            ));
        }
        self.walk = Some(Walk::new(base, place, step));
        Ok(())
    }

    /// Returns the indices that a stream with rollover has left. Empty before the stream's end, and after they were
    /// taken.
    pub fn take_rest(&mut self) -> Vec<i64> {
        self.rest.as_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Returns true if the next request finds the end.
    pub fn has_ended(&self) -> bool {
        matches!(self.state, StreamState::Needs(_) | StreamState::Ended)
    }

    /// Ends the stream, as a generator ends when its code raised.
    pub fn close(&mut self) {
        self.state = StreamState::Ended;
    }

    /// Answers the need that the last request told.
    ///
    /// # Errors
    /// [`Error::Indices`] if nothing is needed, something else is, or the indices are not as many as were asked for;
    /// [`Error::Memory`] when there is no memory to permute word by word. The need then stays unanswered.
    pub fn supply(&mut self, supply: Supply) -> Result<()> {
        let StreamState::Needs(draw) = self.state else {
            return Err(Error::Indices(format!("{} supplied and nothing was asked for", supply.what())));
        };
        check(draw, &supply)?;
        self.generator.supply(draw, supply)?;
        self.state = StreamState::Answered;
        Ok(())
    }

    /// The generator has ended within a batch.
    fn last(&mut self) -> Step<'_> {
        match self.rule {
            Some(BatchRule { drop_last: false, .. }) if !self.batch.is_empty() => {
                // `islice` hands it out, and finds the ended generator with the next request.
                self.generator = Generator::Once(Once::empty());
                Step::Batch(&self.batch)
            }
            _ => {
                if let Some(rest) = &mut self.rest {
                    *rest = std::mem::take(&mut self.batch);
                }
                self.end()
            }
        }
    }

    /// Returns true if nothing was asked for, and there are indices.
    fn is_fresh(&self) -> bool {
        let has_indices = !matches!(self.generator, Generator::InfiniteNone);
        self.state == StreamState::Ready && self.batch.is_empty() && self.passed.is_empty() && has_indices
    }

    /// Gives the memory of draws and indices back.
    fn end(&mut self) -> Step<'_> {
        self.first = Vec::new().into_iter();
        self.generator = Generator::Once(Once::empty());
        self.batch = Vec::new();
        self.passed = Vec::new();
        Step::End
    }
}

/// Appends 1 to `limit` indices, in order: what an earlier stream left, and then what the generator gives.
fn pull(
    first: &mut vec::IntoIter<i64>,
    generator: &mut Generator,
    limit: u64,
    out: &mut Vec<i64>,
) -> Result<Pull> {
    if first.as_slice().is_empty() {
        return generator.pull(limit, out);
    }
    out.extend(first.take(usize::try_from(limit).unwrap_or(usize::MAX)));
    Ok(Pull::Some)
}

impl Generator {
    /// Appends 1 to `limit` indices, in order.
    fn pull(&mut self, limit: u64, out: &mut Vec<i64>) -> Result<Pull> {
        match self {
            Self::Random(random) => random.pull(limit, out),
            Self::Once(once) => once.pull(limit, out),
            Self::InfiniteNone => Ok(Pull::End),
        }
    }

    /// Takes the checked answer to its last need.
    fn supply(&mut self, draw: Draw, supply: Supply) -> Result<()> {
        match self {
            Self::Random(random) => random.supply(draw, supply),
            Self::Once(once) => once.supply(draw, supply),
            Self::InfiniteNone => Ok(()),
        }
    }
}
