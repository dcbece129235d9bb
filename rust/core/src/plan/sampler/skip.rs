//! Indices that are read and not handed out again.
#![forbid(unsafe_code)]

use super::super::delivered::{Delivered, Run, Walk};
use super::super::fingerprint::sum_of;

/// A walk over a stream's indices, past those that were delivered before.
#[derive(Debug)]
pub(super) struct Skip {
    walk: Walk,
    place: u64,
    step: u64,
    passed: u64,
    sum: u64,
}

impl Skip {
    pub(super) fn new(base: Delivered, place: u64, step: u64) -> Self {
        Self { walk: Walk::new(base), place, step, passed: 0, sum: 0 }
    }

    /// Returns what the next indices are.
    pub(super) fn run(&self) -> Run {
        self.walk.run()
    }

    /// So many indices, no more than the run has, become part of a batch.
    pub(super) fn keep(&mut self, count: u64) {
        self.walk.advance(count);
    }

    /// These indices, no more than the run has, were passed over. Returns the place of the first.
    pub(super) fn pass(&mut self, indices: &[i64]) -> u64 {
        let place = self.place.wrapping_add(self.walk.at().wrapping_mul(self.step));
        self.sum = self.sum.wrapping_add(sum_of(place, self.step, indices.iter().copied()));
        self.passed += indices.len() as u64;
        self.walk.advance(indices.len() as u64);
        place
    }

    /// Returns the number of indices that were passed over, and the sum of their hashes.
    pub(super) fn passed(&self) -> (u64, u64) {
        (self.passed, self.sum)
    }
}
