//! Drawn indices that are not handed out yet.
#![forbid(unsafe_code)]

use super::shuffle::Shuffle;
use super::{Draw, Indices, Pull};
use crate::{Error, Result};

/// The drawn indices.
#[derive(Debug)]
pub(super) enum Draws {
    /// All of it.
    Whole(Box<dyn Indices>),
    /// A permutation whose words are drawn as it is read.
    Shuffled(Shuffle),
}

impl Draws {
    pub(super) fn len(&self) -> u64 {
        match self {
            Self::Whole(indices) => indices.as_slice().len() as u64,
            Self::Shuffled(shuffle) => shuffle.len() as u64,
        }
    }

    /// Returns `Ok` if the first `count` can be read, else the draw that they need.
    pub(super) fn reach(&mut self, count: usize) -> std::result::Result<(), Draw> {
        match self {
            Self::Whole(_) => Ok(()),
            Self::Shuffled(shuffle) => shuffle.reach(count).map_err(|count| Draw::Words { count }),
        }
    }

    /// Takes what [`reach`](Self::reach) asked for.
    pub(super) fn supply(&mut self, words: Box<dyn Indices>, count: u64) {
        if let Self::Shuffled(shuffle) = self {
            shuffle.supply(words, count);
        }
    }

    /// Appends those at `positions`, all of which were reached.
    pub(super) fn read(&self, positions: impl Iterator<Item = usize>, out: &mut Vec<i64>) {
        match self {
            Self::Whole(indices) => {
                let indices = indices.as_slice();
                out.extend(positions.map(|position| indices[position]));
            }
            Self::Shuffled(shuffle) => out.extend(positions.map(|position| shuffle.get(position))),
        }
    }
}

/// The part of a draw that is still to come. Every index is checked when it is taken, so that a buffer of any length
/// costs nothing in advance.
#[derive(Debug)]
pub(super) struct Drawn {
    draws: Draws,
    at: usize,
    end: usize,
    /// Indices lie in `0..bound`.
    bound: u64,
}

impl Drawn {
    /// The first `count` of `draws`.
    pub(super) fn new(draws: Draws, count: u64, bound: u64) -> Self {
        Self { end: count.min(draws.len()) as usize, draws, at: 0, bound }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.at == self.end
    }

    /// Takes what [`take`](Self::take) asked for.
    pub(super) fn supply(&mut self, words: Box<dyn Indices>, count: u64) {
        self.draws.supply(words, count);
    }

    /// Appends up to `limit` of them.
    pub(super) fn take(&mut self, limit: u64, out: &mut Vec<i64>) -> Result<Pull> {
        let before = out.len();
        let until = self.at + usize::try_from(limit).unwrap_or(usize::MAX).min(self.end - self.at);
        if let Err(draw) = self.draws.reach(until) {
            return Ok(Pull::Need(draw));
        }
        self.draws.read(self.at..until, out);
        self.at = until;
        within(&out[before..], self.bound)?;
        Ok(Pull::Some)
    }
}

/// Refuses indices that do not lie in `0..bound`.
pub(super) fn within(indices: &[i64], bound: u64) -> Result<()> {
    // Without an early exit this compiles to vector instructions.
    if indices.iter().fold(true, |so_far, &index| so_far & ((index as u64) < bound)) {
        return Ok(());
    }
    let astray = indices.iter().find(|&&index| index as u64 >= bound).unwrap_or(&-1);
    Err(Error::Indices(format!("index {astray} was drawn from a range of {bound}")))
}
