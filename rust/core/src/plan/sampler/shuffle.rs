//! A permutation that is made while it is read.
#![forbid(unsafe_code)]

use std::hint::black_box;

use super::Indices;
use crate::Error;

/// Words that are asked for at once: 32 bits each, two to an int64.
const WORDS: u64 = 1 << 14;
/// Steps whose memory is fetched together, so that they do not wait for it one by one.
const BLOCK: usize = 32;

/// `randperm(n)` of which as much is worked out as was read.
///
/// Step `i` exchanges element `i` with a later one and no later step touches it again, so the beginning is known long
/// before the end. It takes the same words from the generator, in the same order, as torch's does.
///
/// MIRRORS torch `TensorFactories.cpp::randperm_cpu`, below 2^32 / 20 elements
#[derive(Debug)]
pub(super) struct Shuffle {
    /// INVARIANT: the elements before `done` are final. Each element is stored as its difference (exclusive or) to its
    /// own position, so that fresh zero pages are the identity, and only the pages that a step has reached take memory.
    elements: Vec<u32>,
    done: usize,
    words: Option<Words>,
}

#[derive(Debug)]
struct Words {
    pairs: Box<dyn Indices>,
    at: usize,
    count: usize,
}

impl Shuffle {
    /// The most elements that torch permutes in this way.
    pub(super) const MOST: u64 = (u32::MAX / 20) as u64 - 1;

    /// A permutation of `0..n`, at most [`Self::MOST`].
    ///
    /// # Errors
    /// [`Error::Memory`] when there is no memory for it.
    pub(super) fn new(n: u64) -> crate::Result<Self> {
        let len = n as usize;
        // `vec!` alone gives zero pages that were never touched, and it aborts where there is no room for them.
        let probe = Vec::<u32>::new().try_reserve_exact(len);
        probe.map_err(|_| Error::allocation(4 * n))?;
        Ok(Self { elements: vec![0; len], done: 0, words: None })
    }

    pub(super) fn len(&self) -> usize {
        self.elements.len()
    }

    /// Returns `Ok` if the first `count` elements are known. If not, the error is the number of words to
    /// [supply](Self::supply) first.
    pub(super) fn reach(&mut self, count: usize) -> Result<(), u64> {
        // The last step would exchange an element with itself, and torch draws nothing for it.
        let steps = count.min(self.len().saturating_sub(1));
        while self.done < steps {
            let Some(words) = &mut self.words else {
                return Err(((self.len() - 1 - self.done) as u64).min(WORDS));
            };
            let many = BLOCK.min(steps - self.done).min(words.count - words.at);
            let mut others = [0; BLOCK];
            words.read(&mut others[..many]);
            if words.at == words.count {
                self.words = None;
            }
            self.step(&mut others[..many]);
        }
        Ok(())
    }

    /// Takes words from the generator: two to an int64, the first one in the upper half; of an odd last one only the
    /// lower 31 bits count.
    pub(super) fn supply(&mut self, pairs: Box<dyn Indices>, count: u64) {
        self.words = Some(Words { pairs, at: 0, count: count as usize });
    }

    /// An element that was [reached](Self::reach).
    pub(super) fn get(&self, position: usize) -> i64 {
        i64::from(self.elements[position] ^ position as u32)
    }

    /// One step for each word.
    fn step(&mut self, words: &mut [u32]) {
        let mut fetched = 0;
        for (position, word) in (self.done..).zip(words.iter_mut()) {
            *word %= (self.elements.len() - position) as u32;
            fetched ^= self.elements[position + *word as usize];
        }
        // Loads that depend on nothing run side by side; the exchanges below find their memory near.
        black_box(fetched);
        for &mut ahead in words {
            let (here, there) = (self.done, self.done + ahead as usize);
            let moved = (here ^ there) as u32;
            let (first, second) = (self.elements[here], self.elements[there]);
            self.elements[here] = second ^ moved;
            self.elements[there] = first ^ moved;
            self.done += 1;
        }
    }
}

impl Words {
    fn read(&mut self, out: &mut [u32]) {
        let pairs = self.pairs.as_slice();
        for word in out {
            let pair = pairs.get(self.at / 2).copied().unwrap_or(0) as u64;
            *word = if self.at.is_multiple_of(2) { (pair >> 32) as u32 } else { pair as u32 };
            self.at += 1;
        }
    }
}
