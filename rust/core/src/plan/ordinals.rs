//! Sets of an epoch's samples, by their ordinals. The samples that were passed are nearly always one range.
#![forbid(unsafe_code)]

use std::collections::VecDeque;

use crate::{Error, Result};

/// A set of ordinals, as half-open ranges. Ordinal `k` stands for the index that the sampler gives after `k` others in
/// this epoch, on this rank.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct OrdinalSet {
    /// INVARIANT: sorted; none is empty, and none touches the next one.
    ranges: VecDeque<(u64, u64)>,
}

impl OrdinalSet {
    /// An empty set. It allocates with the first range.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Makes a set of ranges, each a first ordinal and the one after the last.
    ///
    /// # Errors
    /// [`Error::Config`] for a range that is empty, or that begins before the one before it ends.
    pub fn from_ranges(ranges: impl IntoIterator<Item = (u64, u64)>) -> Result<Self> {
        let mut delivered = Self::new();
        let mut end = 0;
        for (start, stop) in ranges {
            if start >= stop || start < end {
                return Err(Error::Config(format!(
                    "the range {start}..{stop} of samples cannot follow one that ends at {end}: ranges are not empty, \
                     and each begins where the one before it has ended, or later"
                )));
            }
            delivered.insert(start, stop);
            end = stop;
        }
        Ok(delivered)
    }

    /// Adds the ordinals from `start` to before `stop`, of which some may be in it. It moves the ranges on the shorter
    /// side. Allocates only while the largest number of ranges grows.
    pub fn insert(&mut self, start: u64, stop: u64) {
        if start >= stop {
            return;
        }
        let from = self.ranges.partition_point(|&(_, end)| end < start);
        let to = self.ranges.partition_point(|&(first, _)| first <= stop);
        if from == to {
            return self.ranges.insert(from, (start, stop));
        }
        let (first, end) = (self.ranges[from].0, self.ranges[to - 1].1);
        self.ranges[from] = (first.min(start), end.max(stop));
        self.ranges.drain(from + 1..to);
    }

    /// Returns the ranges, from the first to the last. Between two of them at least one ordinal is missing.
    pub fn ranges(&self) -> impl ExactSizeIterator<Item = (u64, u64)> + '_ {
        self.ranges.iter().copied()
    }

    /// Returns the number of ordinals in it.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.ranges().map(|(start, stop)| stop - start).sum()
    }
}

/// A walk over all ordinals from 0 on, which knows which of them are in a set. Ordinal `k` has the place `place + k *
/// step`, modulo 2^64.
#[derive(Debug, Clone)]
pub(super) struct Walk {
    set: OrdinalSet,
    place: u64,
    step: u64,
    at: u64,
    /// The number of ranges that lie before `at`.
    behind: usize,
}

/// The ordinals that lie ahead in a walk: at least 1.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stretch {
    /// The number of ordinals that are in the set.
    In(u64),
    /// The number of ordinals that are not in the set.
    Out(u64),
}

impl Walk {
    pub(super) fn new(set: OrdinalSet, place: u64, step: u64) -> Self {
        Self { set, place, step, at: 0, behind: 0 }
    }

    /// Returns the next ordinal.
    pub(super) fn at(&self) -> u64 {
        self.at
    }

    /// Returns the place of the next ordinal, and the step to the place of the one after it.
    pub(super) fn place(&self) -> (u64, u64) {
        (self.place.wrapping_add(self.at.wrapping_mul(self.step)), self.step)
    }

    /// Looks ahead. O(1).
    pub(super) fn stretch(&self) -> Stretch {
        match self.set.ranges.get(self.behind) {
            Some(&(start, stop)) if start <= self.at => Stretch::In(stop - self.at),
            Some(&(start, _)) => Stretch::Out(start - self.at),
            None => Stretch::Out(u64::MAX),
        }
    }

    /// Moves to the next ordinal that is not in the set. Returns how many follow without a gap, at least 1.
    pub(super) fn pass_set(&mut self) -> u64 {
        loop {
            match self.stretch() {
                Stretch::In(run) => self.advance(run),
                Stretch::Out(run) => return run,
            }
        }
    }

    /// Moves on by `count` ordinals, no more than the run ahead has. O(1).
    pub(super) fn advance(&mut self, count: u64) {
        self.at = self.at.wrapping_add(count);
        self.behind +=
            usize::from(self.set.ranges.get(self.behind).is_some_and(|&(_, stop)| stop == self.at));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(ranges: &[(u64, u64)]) -> OrdinalSet {
        OrdinalSet::from_ranges(ranges.iter().copied()).unwrap()
    }

    fn ranges(set: &OrdinalSet) -> Vec<(u64, u64)> {
        set.ranges().collect()
    }

    #[test]
    fn ranges_grow_and_meet() {
        let mut set = OrdinalSet::new();
        for (start, stop, expected) in [
            (5, 5, vec![]),
            (10, 20, vec![(10, 20)]),
            (20, 25, vec![(10, 25)]),
            (30, 40, vec![(10, 25), (30, 40)]),
            (5, 10, vec![(5, 25), (30, 40)]),
            (0, 2, vec![(0, 2), (5, 25), (30, 40)]),
            (3, 4, vec![(0, 2), (3, 4), (5, 25), (30, 40)]),
            (2, 3, vec![(0, 4), (5, 25), (30, 40)]),
            (4, 5, vec![(0, 25), (30, 40)]),
            (26, 27, vec![(0, 25), (26, 27), (30, 40)]),
            (7, 50, vec![(0, 50)]),
            (0, 1, vec![(0, 50)]),
        ] {
            set.insert(start, stop);
            assert_eq!(ranges(&set), expected, "{start}..{stop}");
        }
        assert_eq!(set.count(), 50);
    }

    #[test]
    fn every_insertion_is_that_of_a_set_of_numbers() {
        let mut state = 1_u64;
        let mut random = |below: u64| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) % below
        };
        // Miri takes long.
        for _ in 0..if cfg!(miri) { 3 } else { 300 } {
            let (mut set, mut plain) = (OrdinalSet::new(), [false; 64]);
            let longest = 1 + random(12);
            for _ in 0..random(40) {
                let start = random(64);
                let stop = (start + random(longest)).min(64);
                set.insert(start, stop);
                plain[start as usize..stop.max(start) as usize].fill(true);
                let found = ranges(&set);
                assert!(found.iter().all(|&(start, stop)| start < stop));
                assert!(found.windows(2).all(|pair| pair[0].1 < pair[1].0), "{found:?}");
                for (ordinal, &is_in) in plain.iter().enumerate() {
                    assert_eq!(
                        set.ranges().any(|(start, stop)| (start..stop).contains(&(ordinal as u64))),
                        is_in,
                        "{ordinal} in {found:?}"
                    );
                }
                assert_eq!(set.count(), plain.iter().filter(|&&is_in| is_in).count() as u64);
                assert_eq!(OrdinalSet::from_ranges(found), Ok(set.clone()));
            }
            let mut walk = Walk::new(set, 7, u64::MAX);
            while walk.at() < 64 {
                assert_eq!(walk.place(), (7_u64.wrapping_sub(walk.at()), u64::MAX));
                let (is_in, count) = match walk.stretch() {
                    Stretch::In(count) => (true, count),
                    Stretch::Out(count) => (false, count.min(64 - walk.at())),
                };
                let ahead = &plain[walk.at() as usize..(walk.at() + count) as usize];
                assert!(count > 0 && ahead.iter().all(|&plain| plain == is_in));
                walk.advance(1 + random(count));
            }
            assert_eq!(walk.stretch(), Stretch::Out(u64::MAX));
        }
    }

    #[test]
    fn ranges_out_of_order_are_refused() {
        for wrong in
            [vec![(3, 3)], vec![(4, 3)], vec![(0, 2), (1, 3)], vec![(5, 6), (0, 1)], vec![(0, 2), (0, 2)]]
        {
            let Err(Error::Config(text)) = OrdinalSet::from_ranges(wrong.clone()) else {
                panic!("{wrong:?}")
            };
            let (start, stop) = wrong[wrong.len() - 1];
            assert!(text.contains(&format!("{start}..{stop} ")), "{text}");
        }
        assert_eq!(ranges(&set(&[(0, 2), (2, 3), (7, 8)])), [(0, 3), (7, 8)]);
        assert_eq!(OrdinalSet::from_ranges([]), Ok(OrdinalSet::new()));
        assert_eq!(set(&[(0, u64::MAX)]).count(), u64::MAX);
    }
}
