//! Indices that were drawn, as far as they are not handed out.
#![forbid(unsafe_code)]

use super::Indices;
use crate::{Error, Result};

/// The part of a buffer that is still to come. Every index is checked when it is taken, so that a buffer of any length
/// costs nothing in advance.
#[derive(Debug)]
pub(super) struct Drawn {
    indices: Box<dyn Indices>,
    at: usize,
    end: usize,
    /// Indices lie in `0..bound`.
    bound: u64,
}

impl Drawn {
    /// The first `count` of `indices`.
    pub(super) fn new(indices: Box<dyn Indices>, count: u64, bound: u64) -> Self {
        let end = usize::try_from(count).unwrap_or(usize::MAX).min(indices.as_slice().len());
        Self { indices, at: 0, end, bound }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.at == self.end
    }

    /// Appends up to `limit` of them.
    pub(super) fn take(&mut self, limit: u64, out: &mut Vec<i64>) -> Result<()> {
        out.extend_from_slice(self.advance(limit)?);
        Ok(())
    }

    /// Appends what lies in `through` at up to `limit` of them. As many lie there as the draw has a bound.
    pub(super) fn take_through(&mut self, through: &[i64], limit: u64, out: &mut Vec<i64>) -> Result<()> {
        same_length(through, self.bound)?;
        out.extend(self.advance(limit)?.iter().map(|&index| through[index as usize]));
        Ok(())
    }

    fn advance(&mut self, limit: u64) -> Result<&[i64]> {
        let count = usize::try_from(limit).unwrap_or(usize::MAX).min(self.end - self.at);
        let indices = self.indices.as_slice();
        let Some(indices) = indices.get(self.at..self.at + count) else {
            return Err(resized(indices.len(), self.end as u64));
        };
        self.at += count;
        within(indices, self.bound)?;
        Ok(indices)
    }
}

/// Refuses a buffer that no longer has the length that it had when it was supplied.
pub(super) fn same_length(indices: &[i64], len: u64) -> Result<()> {
    if indices.len() as u64 == len { Ok(()) } else { Err(resized(indices.len(), len)) }
}

#[cold]
fn resized(now: usize, before: u64) -> Error {
    Error::Indices(format!("a buffer of {before} indices has {now} while it is in use"))
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
