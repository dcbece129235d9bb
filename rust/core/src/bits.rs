//! A set of small numbers that is searched in a circle.
#![forbid(unsafe_code)]

/// One bit for each number below a limit. Every operation takes one step for each 64 numbers at most.
#[derive(Debug, Clone)]
pub(crate) struct Bits(Vec<u64>);

impl Bits {
    /// The empty set of numbers below `len`.
    pub(crate) fn new(len: usize) -> Self {
        Self(vec![0; words_for(len)])
    }

    pub(crate) fn set(&mut self, index: usize, value: bool) {
        let (word, bit) = (&mut self.0[index / 64], 1 << (index % 64));
        *word = if value { *word | bit } else { *word & !bit };
    }

    /// The words, the lowest number in the lowest bit of the first.
    pub(crate) fn words(&mut self) -> &mut [u64] {
        &mut self.0
    }

    /// The first member at `from` or after it, then from 0 on.
    pub(crate) fn first_from(&self, from: usize) -> Option<usize> {
        let first = from / 64;
        let word = self.0.get(first)? & (u64::MAX << (from % 64));
        let in_word = |word: u64, at: usize| (word != 0).then(|| at * 64 + word.trailing_zeros() as usize);
        in_word(word, first)
            .or_else(|| (first + 1..self.0.len()).find_map(|at| in_word(self.0[at], at)))
            .or_else(|| (0..=first).find_map(|at| in_word(self.0[at], at)))
    }
}

/// Returns the number of words that have a bit for each number below `len`.
pub(crate) const fn words_for(len: usize) -> usize {
    len.div_ceil(64)
}
