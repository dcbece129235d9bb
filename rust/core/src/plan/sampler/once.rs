//! The samplers that draw once or never.
#![forbid(unsafe_code)]

use super::drawn::{Drawn, Draws, within};
use super::{Draw, Pull, Source, Supply};
use crate::{Error, Result};

/// At most one draw, and then indices that are made of it one by one.
///
/// MIRRORS torch sampler.py::SequentialSampler.__iter__, SubsetRandomSampler.__iter__, WeightedRandomSampler.__iter__;
/// distributed.py::DistributedSampler.__iter__
#[derive(Debug)]
pub(super) enum Once {
    /// Still to be drawn, for all its indices or for a stride.
    Draw(Draw, Option<Stride>),
    /// The draw's indices as they are.
    Plain(Drawn),
    /// Every `step`-th of all indices, in order or permuted.
    Strided { permutation: Option<Draws>, stride: Stride },
}

/// Every `step`-th position in `len` indices that are repeated without end.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Stride {
    // INVARIANT: `at` and `step` are less than `len`, unless nothing is `left`; twice `len` is no overflow.
    at: u64,
    step: u64,
    left: u64,
    len: u64,
}

impl Once {
    /// A stream that has ended.
    pub(super) fn empty() -> Self {
        Self::Strided { permutation: None, stride: Stride::default() }
    }

    /// Makes the iterator of `source`, which must not be one of the sources that draw later.
    pub(super) fn new(source: Source) -> Result<Self> {
        Ok(match source {
            Source::Sequential { len } => {
                Self::Strided { permutation: None, stride: Stride::new(len, 0, 1, len)? }
            }
            Source::Subset { len } => Self::Draw(Draw::Permutation { n: len }, None),
            Source::Weighted { categories, num_samples } => {
                Self::Draw(Draw::Multinomial { categories, count: num_samples }, None)
            }
            Source::Distributed { len, num_samples, num_replicas, rank, shuffle, drop_last, start } => {
                let whole = distributed(len, num_samples, num_replicas, rank, drop_last)?;
                let stride = if start == 0 { whole } else { whole.rest(start, drop_last, num_replicas)? };
                if shuffle {
                    Self::Draw(Draw::Permutation { n: len }, Some(stride))
                } else {
                    Self::Strided { permutation: None, stride }
                }
            }
            Source::Random { .. } | Source::InfiniteNone => unreachable!("{source:?} goes on"),
        })
    }

    pub(super) fn pull(&mut self, limit: u64, out: &mut Vec<i64>) -> Result<Pull> {
        match self {
            Self::Draw(draw, _) => return Ok(Pull::Need(*draw)),
            Self::Plain(drawn) if drawn.is_empty() => return Ok(Pull::End),
            Self::Strided { stride, .. } if stride.left == 0 => return Ok(Pull::End),
            Self::Plain(drawn) => return drawn.take(limit, out),
            Self::Strided { permutation: None, stride } => {
                out.extend(stride.take(limit).map(|position| position as i64));
            }
            Self::Strided { permutation: Some(permutation), stride } => {
                let (len, before) = (stride.len, out.len());
                if let Err(draw) = permutation.reach(stride.reach(limit)) {
                    return Ok(Pull::Need(draw));
                }
                permutation.read(stride.take(limit).map(|position| position as usize), out);
                within(&out[before..], len)?;
            }
        }
        Ok(Pull::Some)
    }

    pub(super) fn supply(&mut self, draw: Draw, supply: Supply) -> Result<()> {
        if let Draw::Words { count } = draw {
            match self {
                Self::Plain(drawn) => drawn.supply(supply.into_indices(), count),
                Self::Strided { permutation: Some(permutation), .. } => {
                    permutation.supply(supply.into_indices(), count);
                }
                _ => unreachable!("words are for a permutation"),
            }
            return Ok(());
        }
        let drawn = supply.into_draws(draw)?;
        let Self::Draw(draw, used) = std::mem::replace(self, Self::empty()) else {
            unreachable!("only one draw is asked for")
        };
        let (Draw::Permutation { n: bound } | Draw::Multinomial { categories: bound, .. }) = draw else {
            unreachable!("{draw:?} is a need of RandomSampler")
        };
        let count = drawn.len();
        *self = match used {
            None => Self::Plain(Drawn::new(drawn, count, bound)),
            Some(stride) => Self::Strided { permutation: Some(drawn), stride },
        };
        Ok(())
    }
}

impl Stride {
    /// So `many` positions: `first`, `first + step`, ...
    fn new(len: u64, first: u64, step: u64, many: u64) -> Result<Self> {
        if len > i64::MAX as u64 {
            return Err(Error::Config(format!("a dataset of length {len} is too long for int64 indices")));
        }
        let within = |position: u64| position.checked_rem(len).unwrap_or(0);
        Ok(Self { at: within(first), step: within(step), left: many, len })
    }

    /// Returns the positions of a rank, after `start` indices that all ranks consumed.
    ///
    /// MIRRORS torch distributed.py::DistributedSampler.__init__ (`num_samples`), for what is left
    fn rest(self, start: u64, drop_last: bool, num_replicas: u64) -> Result<Self> {
        // None where padding was consumed too.
        let left = self.len.saturating_sub(start);
        let many = if drop_last { left / num_replicas } else { left.div_ceil(num_replicas) };
        Self::new(self.len, self.at + start.min(self.len), num_replicas, many)
    }

    /// Returns how many elements, counted from the first, must be known for the next `limit` positions.
    fn reach(&self, limit: u64) -> usize {
        let count = limit.min(self.left);
        // At an overflow, or past the end, the positions begin again: then all elements must be known.
        let last = count.saturating_sub(1).saturating_mul(self.step).saturating_add(self.at);
        if count == 0 { 0 } else { last.saturating_add(1).min(self.len) as usize }
    }

    /// The next positions, at most `limit`.
    fn take(&mut self, limit: u64) -> impl Iterator<Item = u64> {
        let count = limit.min(self.left);
        self.left -= count;
        let (step, len) = (self.step, self.len);
        let at = &mut self.at;
        (0..count).map(move |_| {
            let position = *at;
            *at += step;
            if *at >= len {
                *at -= len;
            }
            position
        })
    }
}

/// Returns the positions that this rank reads of `len` indices, which are repeated or cut, so that every rank
/// reads the same number.
fn distributed(len: u64, num_samples: u64, num_replicas: u64, rank: u64, drop_last: bool) -> Result<Stride> {
    let total = num_samples.checked_mul(num_replicas);
    let fits = |total: u64| if drop_last { total <= len } else { total >= len && (len > 0 || total == 0) };
    if rank >= num_replicas || !total.is_some_and(fits) {
        let what = if drop_last { "cut" } else { "padded" };
        return Err(Error::Config(format!(
            "{len} indices cannot be {what} to {num_samples} for each of {num_replicas} replicas, of which this is \
             number {rank}; make a new DistributedSampler when the length of its dataset changes"
        )));
    }
    Stride::new(len, rank, num_replicas, num_samples)
}
