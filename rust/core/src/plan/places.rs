//! Places of samples in their epoch, task by task, from which keyed seeds of random generators are made.
#![forbid(unsafe_code)]

use std::ops::Range;

use super::ordinals::{OrdinalSet, Walk};
use crate::Result;
use crate::number::usize_from;

/// The places of one task's samples, and the key of their epoch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaskPlaces {
    /// The key.
    pub key: u64,
    /// The place of the first sample; of the next one, if the task has none.
    pub first: u64,
    /// The places of all samples.
    pub all: Vec<u64>,
}

impl TaskPlaces {
    /// Appends what [`from_bytes`](Self::from_bytes) reads.
    pub fn to_bytes(&self, bytes: &mut Vec<u8>) {
        let head = [self.key, self.first, self.len()];
        bytes.extend(head.iter().chain(&self.all).flat_map(|word| word.to_le_bytes()));
    }

    /// Reads places, and returns the bytes after them too; none from bytes that no [`to_bytes`](Self::to_bytes)
    /// writes.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<(Self, &[u8])> {
        let (head, rest) = bytes.split_at_checked(24)?;
        let words = |bytes: &[u8]| bytes.as_chunks().0.iter().map(|word| u64::from_le_bytes(*word)).collect();
        let head: Vec<u64> = words(head);
        let (places, rest) = rest.split_at_checked(usize::try_from(head[2].checked_mul(8)?).ok()?)?;
        Some((Self { key: head[0], first: head[1], all: words(places) }, rest))
    }

    /// Returns the number of samples.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.all.len() as u64
    }

    /// Returns the places of some of the samples, by their numbers in the task.
    #[must_use]
    pub fn part(&self, samples: Range<u64>) -> Self {
        let [start, end] = [samples.start, samples.end].map(|number| usize_from(number.min(self.len())));
        let all = self.all.get(start..end).unwrap_or_default().to_vec();
        Self { key: self.key, first: all.first().copied().unwrap_or(self.first), all }
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
        self.walk.pass_set();
        let ((first, step), mut all) = (self.walk.place(), Vec::new());
        while (all.len() as u64) < count {
            let many = self.walk.pass_set().min(count - all.len() as u64);
            let (place, _) = self.walk.place();
            all.extend((0..many).map(|at| place.wrapping_add(at.wrapping_mul(step))));
            self.walk.advance(many);
        }
        TaskPlaces { key: self.key, first, all }
    }

    /// Returns the places of the `count` samples of the next batch, where batch `k` has the places from `k << 32` on.
    pub fn take_batch(&mut self, count: u64) -> TaskPlaces {
        let (TaskPlaces { key, first, .. }, (_, step)) = (self.take(1), self.walk.place());
        let first = first << 32;
        TaskPlaces {
            key,
            first,
            all: (0..count).map(|at| first.wrapping_add(at.wrapping_mul(step))).collect(),
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
        assert_eq!(take(2), TaskPlaces { key: 9, first: 1, all: vec![1, 4] });
        assert_eq!(take(0), TaskPlaces { key: 9, first: 7, all: vec![] });
        assert_eq!(take(3), TaskPlaces { key: 9, first: 7, all: vec![7, 10, 13] });
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
                    assert_eq!(places.clone().take(0).first, task[0], "{passed:?}");
                    let found = places.take(size as u64);
                    assert_eq!((found.first, &found.all[..]), (task[0], task), "{passed:?}");
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
        let task = TaskPlaces { key: 9, first: 3, all: vec![3, 5, 11, 13, 15] };
        assert_eq!(task.len(), 5);
        for start in 0..5 {
            for end in start + 1..=5 {
                let part = task.part(start..end);
                assert_eq!(part.all, task.all[start as usize..end as usize]);
                assert_eq!((part.key, part.first), (9, task.all[start as usize]));
            }
        }
        for none in [0..0, 5..9] {
            assert_eq!(task.part(none), TaskPlaces { key: 9, first: 3, all: vec![] });
        }
    }

    #[test]
    fn places_survive_the_way_as_bytes() {
        for all in [vec![7, 8], vec![], vec![1, 3, u64::MAX, 4]] {
            let count = all.len() as u64;
            let places = TaskPlaces { key: u64::MAX - 5, first: 3, all };
            for behind in [&[][..], &[1, 2, 3]] {
                let mut bytes = Vec::new();
                places.to_bytes(&mut bytes);
                bytes.extend(behind);
                assert_eq!(TaskPlaces::from_bytes(&bytes), Some((places.clone(), behind)));
                bytes.truncate(bytes.len() - behind.len());
                for len in 0..bytes.len() {
                    assert_eq!(TaskPlaces::from_bytes(&bytes[..len]), None, "{len} bytes");
                }
                for wrong in [count + 1, u64::MAX / 8 + 1, u64::MAX] {
                    bytes[16..24].copy_from_slice(&wrong.to_le_bytes());
                    assert_eq!(TaskPlaces::from_bytes(&bytes), None, "{wrong} places");
                }
            }
        }
    }
}
