//! Draws that a stream needs, and what answers them.
#![forbid(unsafe_code)]

use std::fmt::Debug;

use super::drawn::Draws;
use super::shuffle::Shuffle;
use crate::{Error, Result};

/// Indices in memory that another object owns, such as a tensor.
pub trait Indices: Send + Debug {
    /// The indices. Their number does not change while a stream has them.
    fn as_slice(&self) -> &[i64];
}

impl Indices for Vec<i64> {
    fn as_slice(&self) -> &[i64] {
        self
    }
}

/// The draw that a stream needs before it can continue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Draw {
    /// One int64, `torch.empty((), dtype=torch.int64).random_()`, from the global generator. It seeds a private
    /// generator, from which all later draws of this stream come.
    Seed,
    /// The sampler's `num_samples`, which torch reads before the first index and again after the last full
    /// permutation or chunk, since a dataset may have grown. It is asked for before the last permutation, where torch
    /// reads it right after.
    NumSamples,
    /// `randperm(n)`, whole or [word by word](Supply::WordByWord).
    Permutation {
        /// The length of the permutation.
        n: u64,
    },
    /// Numbers of 32 bits from the generator of the permutation that is being read, as `random_` gives them for
    /// all int64: two to each, the first in the upper half. Of an odd last one, only the lower 31 bits count.
    Words {
        /// The number of words.
        count: u64,
    },
    /// `randint(high, (count,))`
    Integers {
        /// The bound.
        high: u64,
        /// The number of integers. It may be 0: the draw is made all the same.
        count: u64,
    },
    /// `multinomial` over the sampler's weights.
    Multinomial {
        /// The number of weights.
        categories: u64,
        /// The number of indices to draw.
        count: u64,
    },
}

/// The answer to a need.
#[derive(Debug)]
pub enum Supply {
    /// To [`Draw::Seed`]: the private generator is seeded.
    Seeded,
    /// To [`Draw::NumSamples`].
    NumSamples(u64),
    /// To [`Draw::Permutation`], up to [`Supply::MOST_WORD_BY_WORD`] elements: the stream makes it while it is read,
    /// and asks for [`Draw::Words`], in all one less than it has elements. No one else may draw from that generator.
    WordByWord,
    /// To the others.
    Indices(Box<dyn Indices>),
}

impl Supply {
    /// Above this many elements torch permutes in another way.
    pub const MOST_WORD_BY_WORD: u64 = Shuffle::MOST;

    /// Makes draws of the supply that answers `draw`. [`check`] has compared the two.
    pub(super) fn into_draws(self, draw: Draw) -> Result<Draws> {
        Ok(match (self, draw) {
            (Self::Indices(indices), _) => Draws::Whole(indices),
            (Self::WordByWord, Draw::Permutation { n }) => Draws::Shuffled(Shuffle::new(n)?),
            (supply, draw) => unreachable!("{supply:?} does not answer {draw:?}"),
        })
    }

    pub(super) fn into_indices(self) -> Box<dyn Indices> {
        match self {
            Self::Indices(indices) => indices,
            other => unreachable!("{other:?} does not answer a need of words"),
        }
    }

    /// Describes the supply for a message, in which the indices themselves may be millions.
    pub(super) fn what(&self) -> String {
        match self {
            Self::Seeded => "a seed was".into(),
            Self::NumSamples(count) => format!("a number of samples, {count}, was"),
            Self::WordByWord => "a permutation word by word was".into(),
            Self::Indices(indices) => format!("{} indices were", indices.as_slice().len()),
        }
    }
}

/// Returns `Ok` if `supply` answers `draw`.
pub(super) fn check(draw: Draw, supply: &Supply) -> Result<()> {
    let (want, given) = match (draw, supply) {
        (Draw::Seed, Supply::Seeded)
        | (Draw::NumSamples, Supply::NumSamples(_))
        | (Draw::Permutation { n: 0..=Supply::MOST_WORD_BY_WORD }, Supply::WordByWord) => return Ok(()),
        (Draw::Words { count }, Supply::Indices(pairs)) => (count.div_ceil(2), pairs.as_slice().len() as u64),
        (Draw::Permutation { n: count }, Supply::Indices(indices))
        | (Draw::Integers { count, .. } | Draw::Multinomial { count, .. }, Supply::Indices(indices)) => {
            (count, indices.as_slice().len() as u64)
        }
        _ => return Err(Error::Indices(format!("{draw:?} was asked for, and {} supplied", supply.what()))),
    };
    if want == given {
        Ok(())
    } else {
        Err(Error::Indices(format!("{draw:?} has {want} indices, and {given} were supplied")))
    }
}
