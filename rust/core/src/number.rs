//! Conversions between integers that lose nothing.
#![forbid(unsafe_code)]

// INVARIANT: what counts bytes in memory fits into a `usize`.
const _: () = assert!(usize::BITS == u64::BITS, "ringloader needs a system of 64 bits");

/// Returns a length or an offset as this process counts it.
#[inline]
#[must_use]
#[expect(clippy::cast_possible_truncation, reason = "the two have as many bits")]
pub const fn usize_from(number: u64) -> usize {
    number as usize
}

/// Returns a number of workers, slots or parts of a batch, of which nobody has 2^32. Debug builds check it.
#[inline]
#[must_use]
#[expect(clippy::cast_possible_truncation, reason = "debug builds check it")]
pub const fn u32_from(number: u64) -> u32 {
    debug_assert!(number <= u32::MAX as u64, "a number not below 2^32");
    number as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_numbers_that_fit_arrive_whole() {
        assert_eq!((usize_from(0), usize_from(u64::MAX)), (0, usize::MAX));
        assert_eq!((u32_from(0), u32_from(u32::MAX.into())), (0, u32::MAX));
    }

    #[test]
    #[cfg(debug_assertions)]
    #[should_panic(expected = "not below 2^32")]
    fn a_larger_one_is_refused_in_debug_builds() {
        let _ = u32_from(1 << 32);
    }
}
