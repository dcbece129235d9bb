//! A sum over the samples of an epoch that tells whether they were the same, each at the same place.
#![forbid(unsafe_code)]

/// The step between places: the golden ratio of 2^64. Its small multiples are far apart modulo 2^64, so samples of below
/// 2^31 places and 2^32 indices are all hashed from different numbers.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

fn mixed(z: u64) -> u64 {
    let z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Returns the sum of the hashes of the samples at `place`, `place + step`, ..., modulo 2^64. Parts of an epoch add up to
/// the whole, in any order and by any number of ranks.
#[inline]
#[must_use]
pub fn fingerprint_of(place: u64, step: u64, indices: impl IntoIterator<Item = i64>) -> u64 {
    // The product of a place is that of the one before it and a constant.
    let (mut product, step) = (place.wrapping_add(1).wrapping_mul(STEP), step.wrapping_mul(STEP));
    let mut sum = 0_u64;
    for index in indices {
        sum = sum.wrapping_add(mixed(product.wrapping_add(index as u64)));
        product = product.wrapping_add(step);
    }
    sum
}
