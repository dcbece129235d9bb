#![forbid(unsafe_code)]
//! LEB128 numbers and the zigzag map, in their shortest form only: one number has one encoding.

use crate::number::u32_from;

/// Appends `value`: seven bits a byte, low bits first.
pub(super) fn put(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value.to_le_bytes()[0] | 0x80);
        value >>= 7;
    }
    out.push(value.to_le_bytes()[0]);
}

/// Takes a number off the front of `bytes`. `None`, with `bytes` as they were, if it is cut off, longer than
/// needed, or above 64 bits.
#[inline]
pub(super) fn take(bytes: &mut &[u8]) -> Option<u64> {
    match bytes.split_first()? {
        (&first @ ..0x80, rest) => {
            *bytes = rest;
            Some(u64::from(first))
        }
        (&first, rest) => take_long(first, rest, bytes),
    }
}

/// The rest of a number that begins with `first` and continues in `rest`.
fn take_long<'a>(first: u8, rest: &'a [u8], bytes: &mut &'a [u8]) -> Option<u64> {
    let mut value = u64::from(first & 0x7f);
    for (index, &byte) in rest.iter().take(9).enumerate() {
        let bits = u64::from(byte & 0x7f);
        let shift = 7 * (u32_from(index as u64) + 1);
        if shift == 63 && byte > 1 {
            return None;
        }
        value |= bits << shift;
        if byte < 0x80 {
            if byte == 0 {
                return None;
            }
            *bytes = &rest[index + 1..];
            return Some(value);
        }
    }
    None
}

/// Maps numbers near zero, of either sign, to small ones.
pub(super) const fn zigzag(value: i64) -> u64 {
    ((value << 1) ^ (value >> 63)) as u64
}

/// The inverse of [`zigzag`].
pub(super) const fn unzigzag(value: u64) -> i64 {
    (value >> 1) as i64 ^ -((value & 1) as i64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn edges_have_the_known_encodings() {
        let cases: [(u64, &[u8]); 5] = [
            (0, &[0]),
            (127, &[0x7f]),
            (128, &[0x80, 1]),
            (300, &[0xac, 2]),
            (u64::MAX, &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1]),
        ];
        for (value, bytes) in cases {
            let mut out = Vec::new();
            put(&mut out, value);
            assert_eq!(out, bytes);
            assert_eq!(take(&mut out.as_slice()), Some(value));
        }
    }

    #[test]
    fn malformed_numbers_are_refused() {
        let overlong: &[u8] = &[0x80, 0];
        let cut: &[u8] = &[0x80];
        let above: &[u8] = &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 2];
        let endless: &[u8] = &[0x80; 20];
        for bytes in [&[], overlong, cut, above, endless] {
            let mut rest = bytes;
            assert_eq!(take(&mut rest), None);
            assert_eq!(rest, bytes);
        }
    }

    proptest! {
        #[test]
        fn numbers_round_trip(value: u64, signed: i64, tail: Vec<u8>) {
            let mut out = Vec::new();
            put(&mut out, value);
            out.extend_from_slice(&tail);
            let mut rest = out.as_slice();
            prop_assert_eq!(take(&mut rest), Some(value));
            prop_assert_eq!(rest, tail.as_slice());
            prop_assert_eq!(unzigzag(zigzag(signed)), signed);
        }

        #[test]
        fn what_is_accepted_is_the_shortest_form(bytes in prop::collection::vec(prop_oneof![Just(0x80), Just(0xff), any::<u8>()], 0..12)) {
            let mut rest = bytes.as_slice();
            if let Some(value) = take(&mut rest) {
                let mut again = Vec::new();
                put(&mut again, value);
                prop_assert_eq!(&again[..], &bytes[..bytes.len() - rest.len()]);
            }
        }
    }
}
