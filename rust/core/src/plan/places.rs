//! Places of samples in their epoch, task by task: what keyed seeds of random generators are made from.
#![forbid(unsafe_code)]

use crate::{Error, Result};

/// Samples of a task that come one after another in the epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// The place of the first sample.
    pub place: u64,
    /// The number of samples.
    pub count: u64,
}

/// Gives each task the places of its samples, in the order in which tasks are read from the sampler.
///
/// The sample that the sampler gives after `k` others in this epoch has the place `first + k * step`, modulo 2^64.
#[derive(Debug, Clone)]
pub struct Places {
    first: u64,
    step: u64,
    /// The `k` of the next sample.
    next: u64,
    /// Samples that the epoch passes over, by their `k`. INVARIANT: sorted ranges, none of them empty.
    passed: Vec<(u64, u64)>,
    /// The number of ranges that lie before `next`.
    behind: usize,
}

impl Places {
    /// For an epoch that passes over the samples of `passed`: ranges of their `k`, from the first to behind the last.
    ///
    /// # Errors
    /// [`Error::Config`] for a range that is empty, or that begins before the one before it ends.
    pub fn new(first: u64, step: u64, passed: Vec<(u64, u64)>) -> Result<Self> {
        let mut end = 0;
        for &(start, stop) in &passed {
            if start >= stop || start < end {
                return Err(Error::Config(format!(
                    "the samples {start}..{stop} cannot be passed over behind sample {end}"
                )));
            }
            end = stop;
        }
        let mut places = Self { first, step, next: 0, passed, behind: 0 };
        places.pass_over();
        Ok(places)
    }

    /// Returns the distance between the places of one sample and the next.
    #[must_use]
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Returns the places of the next `count` samples: runs between which samples are passed over. There is one run at
    /// least, so that a task without samples has a place too, the next sample's.
    pub fn take(&mut self, count: u64) -> Vec<Run> {
        let mut runs = Vec::with_capacity(1);
        let mut left = count;
        loop {
            let before_gap = self.passed.get(self.behind).map_or(left, |&(start, _)| start - self.next);
            let count = left.min(before_gap);
            runs.push(Run { place: self.place(), count });
            self.next += count;
            self.pass_over();
            left -= count;
            if left == 0 {
                return runs;
            }
        }
    }

    fn place(&self) -> u64 {
        self.first.wrapping_add(self.next.wrapping_mul(self.step))
    }

    /// INVARIANT: behind it, `next` lies in no range of `passed`.
    fn pass_over(&mut self) {
        while let Some(&(start, stop)) = self.passed.get(self.behind)
            && start <= self.next
        {
            self.next = stop;
            self.behind += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flat(runs: &[Run], step: u64) -> Vec<u64> {
        runs.iter().flat_map(|run| (0..run.count).map(|at| run.place + at * step)).collect()
    }

    #[test]
    fn tasks_have_consecutive_places() {
        let mut places = Places::new(1, 3, Vec::new()).unwrap();
        assert_eq!(places.take(2), [Run { place: 1, count: 2 }]);
        assert_eq!(places.take(0), [Run { place: 7, count: 0 }]);
        assert_eq!(places.take(3), [Run { place: 7, count: 3 }]);
    }

    #[test]
    fn samples_that_are_passed_over_keep_their_places() {
        for passed in
            [vec![], vec![(0, 4)], vec![(2, 3)], vec![(0, 1), (3, 5), (5, 6), (9, 10)], vec![(7, 20)]]
        {
            let left = |k: &u64| !passed.iter().any(|&(start, stop)| start <= *k && *k < stop);
            let expected: Vec<u64> = (0..40).filter(left).map(|k| 5 + 2 * k).collect();
            for size in 1..8 {
                let mut places = Places::new(5, 2, passed.clone()).unwrap();
                for task in expected.chunks_exact(size) {
                    assert_eq!(places.clone().take(0)[0].place, task[0], "{passed:?}");
                    let runs = places.take(size as u64);
                    assert_eq!(flat(&runs, 2), task, "{passed:?}");
                    assert!(runs.iter().all(|run| run.count > 0), "{runs:?}");
                }
            }
        }
    }

    #[test]
    fn ranges_out_of_order_are_refused() {
        for wrong in [vec![(3, 3)], vec![(4, 3)], vec![(0, 2), (1, 3)], vec![(5, 6), (0, 1)]] {
            assert!(matches!(Places::new(0, 1, wrong), Err(Error::Config(_))));
        }
    }
}
