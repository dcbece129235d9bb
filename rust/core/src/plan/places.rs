//! Places of samples in their epoch, task by task, from which keyed seeds of random generators are made.
#![forbid(unsafe_code)]

use std::ops::Range;

use super::ordinals::{OrdinalSet, Walk};
use crate::Result;

/// Samples of a task that come one after another in the epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// The place of the first sample.
    pub place: u64,
    /// The number of samples.
    pub count: u64,
}

/// The places of one task's samples, and the key of their epoch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaskPlaces {
    /// The key.
    pub key: u64,
    /// The distance between the places of one sample of a run and the next.
    pub step: u64,
    /// The samples: runs between which samples are passed over. There is one run at least, so that a task without
    /// samples has a place too, the next sample's.
    pub runs: Vec<Run>,
}

impl TaskPlaces {
    /// Appends what [`from_bytes`](Self::from_bytes) reads.
    pub fn to_bytes(&self, bytes: &mut Vec<u8>) {
        let head = [self.key, self.step, self.runs.len() as u64];
        let runs = self.runs.iter().flat_map(|run| [run.place, run.count]);
        bytes.extend(head.into_iter().chain(runs).flat_map(u64::to_le_bytes));
    }

    /// Reads places, and returns the bytes after them too; none from bytes that no [`to_bytes`](Self::to_bytes)
    /// writes.
    #[must_use]
    pub fn from_bytes(mut bytes: &[u8]) -> Option<(Self, &[u8])> {
        let mut number = || {
            let (first, rest) = bytes.split_first_chunk()?;
            bytes = rest;
            Some(u64::from_le_bytes(*first))
        };
        let (key, step, count) = (number()?, number()?, number()?);
        // A missing run ends it before memory for it is reserved.
        let runs = (0..count).map(|_| Some(Run { place: number()?, count: number()? }));
        let runs = runs.collect::<Option<Vec<_>>>()?;
        (!runs.is_empty()).then_some((Self { key, step, runs }, bytes))
    }

    /// Returns the place of the first sample, or of the next one if there is none.
    #[must_use]
    pub fn first(&self) -> u64 {
        self.runs.first().map_or(0, |run| run.place)
    }

    /// Returns the number of samples.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.runs.iter().map(|run| run.count).sum()
    }

    /// Returns the places of some of the samples, by their numbers in the task.
    #[must_use]
    pub fn part(&self, samples: Range<u64>) -> Self {
        let Self { key, step, .. } = *self;
        let mut runs = Vec::with_capacity(1);
        let mut before = 0;
        for run in &self.runs {
            let (start, end) = (samples.start.max(before), samples.end.min(before + run.count));
            if start < end {
                let place = run.place.wrapping_add((start - before).wrapping_mul(step));
                runs.push(Run { place, count: end - start });
            }
            before += run.count;
        }
        if runs.is_empty() {
            runs.push(Run { place: self.first(), count: 0 });
        }
        Self { key, step, runs }
    }

    /// Returns the places of all samples.
    pub fn all(&self) -> impl Iterator<Item = u64> + '_ {
        let of_run = move |run: &Run| {
            let Run { place, count } = *run;
            (0..count).map(move |at| place.wrapping_add(at.wrapping_mul(self.step)))
        };
        self.runs.iter().flat_map(of_run)
    }
}

/// Gives each task the places of its samples, in the order in which tasks are read from the sampler.
///
/// The sample that the sampler gives after `k` others in this epoch has the place `first + k * step`, modulo 2^64.
#[derive(Debug, Clone)]
pub struct Places {
    key: u64,
    walk: Walk,
}

impl Places {
    /// For an epoch with this `key` that passes over the samples of `passed`: ranges of their `k`, from the first to
    /// the one after the last.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) for a range that is empty, or that begins before the one before it ends.
    pub fn new(key: u64, first: u64, step: u64, passed: Vec<(u64, u64)>) -> Result<Self> {
        Ok(Self { key, walk: Walk::new(OrdinalSet::from_ranges(passed)?, first, step) })
    }

    /// Returns the places of the next `count` samples.
    pub fn take(&mut self, count: u64) -> TaskPlaces {
        let mut runs = Vec::with_capacity(1);
        let mut left = count;
        loop {
            let count = left.min(self.walk.pass_set());
            let (place, step) = self.walk.place();
            runs.push(Run { place, count });
            self.walk.advance(count);
            left -= count;
            if left == 0 {
                return TaskPlaces { key: self.key, step, runs };
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;

    #[test]
    fn tasks_have_consecutive_places() {
        let mut places = Places::new(9, 1, 3, Vec::new()).unwrap();
        let mut take = |count| places.take(count);
        assert_eq!(take(2), TaskPlaces { key: 9, step: 3, runs: vec![Run { place: 1, count: 2 }] });
        assert_eq!(take(0), TaskPlaces { key: 9, step: 3, runs: vec![Run { place: 7, count: 0 }] });
        assert_eq!(take(3), TaskPlaces { key: 9, step: 3, runs: vec![Run { place: 7, count: 3 }] });
    }

    #[test]
    fn samples_that_are_passed_over_keep_their_places() {
        for passed in
            [vec![], vec![(0, 4)], vec![(2, 3)], vec![(0, 1), (3, 5), (5, 6), (9, 10)], vec![(7, 20)]]
        {
            let left = |k: &u64| !passed.iter().any(|&(start, stop)| start <= *k && *k < stop);
            let expected: Vec<u64> = (0..40).filter(left).map(|k| 5 + 2 * k).collect();
            for size in 1..8 {
                let mut places = Places::new(0, 5, 2, passed.clone()).unwrap();
                for task in expected.chunks_exact(size) {
                    assert_eq!(places.clone().take(0).first(), task[0], "{passed:?}");
                    let found = places.take(size as u64);
                    assert_eq!(found.all().collect::<Vec<_>>(), task, "{passed:?}");
                    assert!(
                        found.first() == task[0] && found.runs.iter().all(|run| run.count > 0),
                        "{found:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn ranges_out_of_order_are_refused() {
        for wrong in [vec![(3, 3)], vec![(4, 3)], vec![(0, 2), (1, 3)], vec![(5, 6), (0, 1)]] {
            assert!(matches!(Places::new(0, 0, 1, wrong), Err(Error::Config(_))));
        }
    }

    #[test]
    fn a_part_has_the_places_of_its_samples() {
        let runs = vec![Run { place: 3, count: 2 }, Run { place: 11, count: 3 }];
        let task = TaskPlaces { key: 9, step: 2, runs };
        let all: Vec<_> = task.all().collect();
        assert_eq!(task.len(), 5);
        for start in 0..5 {
            for end in start + 1..=5 {
                let part = task.part(start..end);
                assert_eq!(part.all().collect::<Vec<_>>(), all[start as usize..end as usize]);
                assert_eq!((part.key, part.first()), (9, all[start as usize]));
            }
        }
        assert_eq!(task.part(0..0).len(), 0);
    }

    #[test]
    fn places_survive_the_way_as_bytes() {
        for runs in [&[(7, 2)][..], &[(0, 0)], &[(1, 2), (u64::MAX, 1), (4, 5)]] {
            let runs = runs.iter().map(|&(place, count)| Run { place, count }).collect();
            let places = TaskPlaces { key: u64::MAX - 5, step: 3, runs };
            for behind in [&[][..], &[1, 2, 3]] {
                let mut bytes = Vec::new();
                places.to_bytes(&mut bytes);
                bytes.extend(behind);
                assert_eq!(TaskPlaces::from_bytes(&bytes), Some((places.clone(), behind)));
                bytes.truncate(bytes.len() - behind.len());
                for len in 0..bytes.len() {
                    assert_eq!(TaskPlaces::from_bytes(&bytes[..len]), None, "{len} bytes");
                }
                for count in [0, 4, u64::MAX] {
                    bytes[16..24].copy_from_slice(&count.to_le_bytes());
                    assert_eq!(TaskPlaces::from_bytes(&bytes), None, "{count} runs");
                }
            }
        }
    }
}
