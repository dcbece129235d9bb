//! A permutation that is made while it is read.
#![forbid(unsafe_code)]

use std::hint::black_box;

use crate::number::{u32_from, usize_from};
use crate::{Error, Result};

/// Steps whose memory is fetched together, so that they do not wait for it one by one.
const BLOCK: usize = 32;

/// `randperm(n)` of which as much is worked out as was read.
///
/// Step `i` exchanges element `i` with a later one and no later step touches it again, so the beginning is known long
/// before the end. It takes the same words from the generator, in the same order, as torch's does.
///
/// MIRRORS torch `TensorFactories.cpp::randperm_cpu`, below 2^32 / 20 elements
#[derive(Debug)]
pub struct Shuffle {
    /// INVARIANT: the elements before `done` are final. Each element is stored as its difference (exclusive or) to its
    /// own position, so that fresh zero pages are the identity, and only the pages that a step has reached take memory.
    elements: Vec<u32>,
    done: usize,
}

impl Shuffle {
    /// The most elements that torch permutes in this way.
    pub const MOST: u64 = (u32::MAX / 20) as u64 - 1;

    /// A permutation of `0..n`, at most [`Self::MOST`].
    ///
    /// # Errors
    /// [`Error::Memory`] when there is no memory for it.
    pub fn new(n: u64) -> Result<Self> {
        let len = n.min(Self::MOST) as usize;
        // `vec!` alone gives zero pages that were never touched, and it aborts where there is no room for them.
        let probe = Vec::<u32>::new().try_reserve_exact(len);
        probe.map_err(|_| Error::allocation(4 * n))?;
        Ok(Self { elements: vec![0; len], done: 0 })
    }

    /// Returns the number of words to [supply](Self::supply) before the first `count` elements are known.
    #[must_use]
    pub fn missing(&self, count: u64) -> u64 {
        // Whole pairs. The last step would exchange an element with itself, and torch draws nothing for it.
        let steps = count.saturating_add(count % 2).min(self.elements.len().saturating_sub(1) as u64);
        steps.saturating_sub(self.done as u64)
    }

    /// Takes `count` words from the generator: two to an int64, the first one in the upper half; of an odd last one
    /// only the lower 31 bits count.
    ///
    /// # Errors
    /// [`Error::Config`] when they are not as many, or more than are missing.
    pub fn supply(&mut self, pairs: &[i64], count: u64) -> Result<()> {
        if count > self.missing(u64::MAX) || count.div_ceil(2) != pairs.len() as u64 {
            return Err(Error::Config(format!("{} pairs for {count} words", pairs.len())));
        }
        #[expect(clippy::cast_possible_truncation, reason = "halves are asked for")]
        let halves = |&pair: &i64| [(pair as u64 >> 32) as u32, pair as u32];
        let mut words = pairs.iter().flat_map(halves).take(usize_from(count));
        let mut left = usize_from(count);
        while left > 0 {
            let many = BLOCK.min(left);
            let mut block = [0; BLOCK];
            block.iter_mut().zip(words.by_ref().take(many)).for_each(|(into, word)| *into = word);
            self.step(&mut block[..many]);
            left -= many;
        }
        Ok(())
    }

    /// Returns the element at a position; `None` if it is not known.
    #[must_use]
    pub fn get(&self, position: u64) -> Option<i64> {
        let is_known = position < self.done as u64 || self.missing(u64::MAX) == 0;
        let element = self.elements.get(usize_from(position)).filter(|_| is_known)?;
        Some(i64::from(element ^ u32_from(position)))
    }

    /// One step for each word.
    fn step(&mut self, words: &mut [u32]) {
        let mut fetched = 0;
        for (position, word) in (self.done..).zip(words.iter_mut()) {
            *word %= u32_from((self.elements.len() - position) as u64);
            fetched ^= self.elements[position + *word as usize];
        }
        // Loads that depend on nothing run side by side; the exchanges below find their memory near.
        black_box(fetched);
        for &mut ahead in words {
            let (here, there) = (self.done, self.done + ahead as usize);
            let moved = u32_from((here ^ there) as u64);
            let (first, second) = (self.elements[here], self.elements[there]);
            self.elements[here] = second ^ moved;
            self.elements[there] = first ^ moved;
            self.done += 1;
        }
    }
}
