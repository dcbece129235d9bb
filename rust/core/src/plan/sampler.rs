//! Batches of a sampler's indices: torch's `BatchSampler`, over what torch draws.
//!
//! A sampler gives its indices in chunks, each of them one draw of torch's. Where `BatchSampler` asks its sampler for an
//! index and no chunk is left, [`Stream::next`] returns [`Step::Need`], and after [`Stream::supply`] it continues at that
//! point. So every draw belongs to the same request as in torch, and an epoch that is abandoned leaves the generators
//! where torch leaves them.
//!
//! MIRRORS torch sampler.py, of 2.6 to 2.15: `BatchSampler.__iter__`
//!
//! - A request that follows an unanswered need finds the stream ended: so does a generator whose body raised.
//! - A stream that has ended stays so, and needs nothing more.
#![forbid(unsafe_code)]

use std::fmt::Debug;

use super::ordinals::{OrdinalSet, Stretch, Walk};
use crate::number::usize_from;
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
    /// Supply the sampler's next chunk, and ask again.
    Need,
    /// There are no more: `StopIteration`, now and ever after.
    End,
}

/// Indices that were drawn.
pub trait Indices: Send + Debug {
    /// All of them.
    fn as_slice(&self) -> &[i64];
}

impl Indices for Vec<i64> {
    fn as_slice(&self) -> &[i64] {
        self
    }
}

/// Some of a sampler's indices, in order; perhaps none.
#[derive(Debug)]
pub enum Chunk {
    /// Indices that were drawn at once.
    Drawn(Box<dyn Indices>),
    /// Indices of a range.
    Range {
        /// The first.
        start: i64,
        /// The step from each to the next.
        step: i64,
        /// The number of them.
        len: u64,
    },
}

impl Chunk {
    /// A chunk without indices.
    #[must_use]
    pub fn empty() -> Self {
        Self::Range { start: 0, step: 0, len: 0 }
    }

    fn len(&self) -> u64 {
        match self {
            Self::Drawn(indices) => indices.as_slice().len() as u64,
            Self::Range { len, .. } => *len,
        }
    }

    /// Appends `count` indices, from that of number `at` on.
    fn read(&self, at: u64, count: u64, out: &mut Vec<i64>) {
        match *self {
            Self::Drawn(ref indices) => {
                out.extend_from_slice(&indices.as_slice()[usize_from(at)..usize_from(at + count)]);
            }
            Self::Range { start, step, .. } => {
                out.extend(
                    (at..at + count).map(|number| start.wrapping_add(step.wrapping_mul(number as i64))),
                );
            }
        }
    }
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
    /// The chunk that is being read.
    chunk: Chunk,
    /// The indices of it that were read.
    at: u64,
    /// True once the sampler has no chunk after this one.
    is_last: bool,
    /// True for `_InfiniteConstantSampler`, which gives `None`, without end.
    gives_none: bool,
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
    /// A chunk was supplied, or indices were passed over, while the batch was being read.
    Answered,
    /// A need was told.
    Needs,
    Ended,
}

impl Stream {
    /// The most indices that are passed over in one step.
    pub const PASS: u64 = 1 << 12;

    /// A stream that has not been asked yet; `rule` is `None` for `batch_size=None`.
    ///
    /// # Errors
    /// [`Error::Config`] for a batch size of 0.
    pub fn new(rule: Option<BatchRule>) -> Result<Self> {
        if rule.is_some_and(|rule| rule.size == 0) {
            return Err(Error::Config("a batch needs a size of at least 1, not 0".into()));
        }
        Ok(Self {
            chunk: Chunk::empty(),
            at: 0,
            is_last: false,
            gives_none: false,
            walk: None,
            rule,
            batch: Vec::new(),
            state: StreamState::Ready,
            rest: None,
            passed: Vec::new(),
        })
    }

    /// As [`new`](Self::new), of a sampler that gives `None`, without end.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn nones(rule: Option<BatchRule>) -> Result<Self> {
        Ok(Self { gives_none: true, ..Self::new(rule)? })
    }

    /// The next batch or index, or the need of a chunk. Costs what the batch has indices; allocates only while the
    /// largest batch grows.
    #[expect(clippy::should_implement_trait, reason = "it lends the batch, which an iterator cannot")]
    pub fn next(&mut self) -> Step<'_> {
        match std::mem::replace(&mut self.state, StreamState::Ended) {
            StreamState::Ready => self.batch.clear(),
            StreamState::Answered => {}
            StreamState::Needs | StreamState::Ended => return self.end(),
        }
        if self.gives_none {
            self.state = StreamState::Ready;
            return self.rule.map_or(Step::None, |rule| Step::Nones(rule.size));
        }
        let size = self.rule.map_or(1, |rule| rule.size);
        loop {
            let missing = size - self.batch.len() as u64;
            if missing == 0 {
                self.state = StreamState::Ready;
                return match self.rule {
                    Some(_) => Step::Batch(&self.batch),
                    None => Step::Index(self.batch[0]),
                };
            }
            let left = self.chunk.len() - self.at;
            if left == 0 {
                if self.is_last {
                    return self.last();
                }
                self.state = StreamState::Needs;
                return Step::Need;
            }
            let run = self.walk.as_ref().map_or(Stretch::Out(missing), Walk::stretch);
            let (limit, out) = match run {
                Stretch::Out(run) => (run.min(missing), &mut self.batch),
                Stretch::In(run) => {
                    self.passed.clear();
                    (run.min(Self::PASS), &mut self.passed)
                }
            };
            let read = limit.min(left);
            self.chunk.read(self.at, read, out);
            self.at += read;
            if let Some(walk) = &mut self.walk {
                let (place, step) = walk.place();
                walk.advance(read);
                if let Stretch::In(_) = run {
                    self.state = StreamState::Answered;
                    return Step::Passed { place, step, indices: &self.passed };
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
        self.chunk = Chunk::Drawn(Box::new(first));
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
        matches!(self.state, StreamState::Needs | StreamState::Ended)
    }

    /// Ends the stream, as a generator ends when its code raised.
    pub fn close(&mut self) {
        self.state = StreamState::Ended;
    }

    /// Answers the need that the last request told: with the sampler's next chunk, or `None` at its end. Does nothing
    /// where nothing is needed.
    pub fn supply(&mut self, chunk: Option<Chunk>) {
        if self.state == StreamState::Needs {
            self.is_last = chunk.is_none();
            (self.chunk, self.at) = (chunk.unwrap_or_else(Chunk::empty), 0);
            self.state = StreamState::Answered;
        }
    }

    /// The sampler has ended within a batch.
    fn last(&mut self) -> Step<'_> {
        match self.rule {
            // `islice` hands it out, and finds the ended sampler with the next request.
            Some(BatchRule { drop_last: false, .. }) if !self.batch.is_empty() => Step::Batch(&self.batch),
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
        let is_unread = self.batch.is_empty() && self.passed.is_empty();
        self.state == StreamState::Ready && is_unread && !self.gives_none
    }

    /// Gives the memory of indices back.
    fn end(&mut self) -> Step<'_> {
        (self.chunk, self.at) = (Chunk::empty(), 0);
        self.batch = Vec::new();
        self.passed = Vec::new();
        Step::End
    }
}
