//! Words that show whether a bit of them was flipped. Each is stored at once, so none is ever half of two values.

use crate::sync::{AtomicU64, Ordering};

/// The largest value of such a word, and one more.
pub(super) const END: u64 = 1 << BITS;
const BITS: u32 = 48;
/// Mixed into each check, so that no single bit makes a value of a word that was never written.
const SALT: u64 = 0x5a39;

/// The word of a value.
pub(super) fn seal(value: u64) -> u64 {
    debug_assert!(value < END);
    // Each bit of the value is in one bit of the check.
    let check = (value ^ value >> 16 ^ value >> 32) & 0xffff ^ SALT;
    value | check << BITS
}

/// The value of a word; zero where none was written. `None`: the word is damaged.
pub(super) fn open(word: u64) -> Option<u64> {
    let value = word & (END - 1);
    (word == 0 || word == seal(value)).then_some(value)
}

/// Makes the value at least `least`, also where it is damaged. Returns what it was.
pub(super) fn raise(word: &AtomicU64, least: u64) -> Option<u64> {
    let mut seen = word.load(Ordering::Relaxed);
    loop {
        let value = open(seen);
        if value.is_some_and(|value| value >= least) {
            return value;
        }
        match word.compare_exchange(seen, seal(least), Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => return value,
            Err(now) => seen = now,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flipped_bit_is_seen() {
        for value in [0, 64, 4096, 0xffff, 1 << 47, END - 64, 0x0123_4567_89c0] {
            assert_eq!(open(seal(value)), Some(value));
            assert!((0..64).all(|bit| open(seal(value) ^ 1 << bit).is_none()), "{value}");
        }
        assert_eq!(open(0), Some(0));
        assert!((0..64).all(|bit| open(1 << bit).is_none()));
    }
}
