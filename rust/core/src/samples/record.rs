//! A record: one sample as bytes, with what shows that they are whole, and that sample's.
//!
//! | bytes | hold |
//! |---|---|
//! | 0..8 | in a file with a name, XXH3 (64 bits) of all bytes after these; else zero |
//! | 8..16 | the index |
//! | 16..24 | bytes of the record |
//! | 24..32 | where its last part begins, which describes the others |
//! | 32..64 | zero |
//!
//! All are `u64`, little endian.
//!
//! In memory there is no sum, which would take a third of a read: what is published there was written whole, and goes
//! with the machine.
//!
//! A sample is encoded once, into private memory. That memory is written to the file, and the object that its maker
//! gets lies over it, so no thread changes an object while another encodes it. A reader copies the record into memory
//! of its own, and makes the object over that: one copy.

use twox_hash::XxHash3_64;

use crate::testing::fault::fault;

/// Bytes before the sample's own.
pub const HEADER: usize = 64;
/// Records begin at multiples of this.
pub(super) const ALIGN: u64 = crate::cache::ALIGN;

/// Completes a record whose bytes after the header are written, with a sum or without.
///
/// # Panics
/// When it has no room for a header.
pub(super) fn seal(record: &mut [u8], index: usize, last: usize, has_sum: bool) {
    let len = record.len();
    record[..HEADER].fill(0);
    for (at, value) in [(8, index), (16, len), (24, last)] {
        record[at..at + 8].copy_from_slice(&(value as u64).to_le_bytes());
    }
    let sum = if has_sum { XxHash3_64::oneshot(&record[8..]) } else { 0 };
    record[..8].copy_from_slice(&sum.to_le_bytes());
}

/// The length of the record whose header this is; `None` of one that is none of that index.
pub(super) fn len(header: &[u8], index: usize) -> Option<u64> {
    let len = word(header, 16)?;
    (word(header, 8)? == index as u64 && len >= HEADER as u64).then_some(len)
}

/// The start of a record's last part; `None` where the record is not whole, or not that of `index`.
pub(super) fn check(record: &[u8], index: usize, has_sum: bool) -> Option<usize> {
    let last = usize::try_from(word(record, 24)?).ok()?;
    let is_whole =
        !has_sum || word(record, 0)? == XxHash3_64::oneshot(&record[8..]) || fault("checksum_ignored");
    (is_whole
        && word(record, 8)? == index as u64
        && word(record, 16)? == record.len() as u64
        && (HEADER..=record.len()).contains(&last))
    .then_some(last)
}

fn word(bytes: &[u8], at: usize) -> Option<u64> {
    let (word, _) = bytes.get(at..)?.split_first_chunk()?;
    Some(u64::from_le_bytes(*word))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flipped_bit_anywhere_is_found() {
        let mut record = vec![3; HEADER + 100];
        seal(&mut record, 5, HEADER + 64, true);
        assert_eq!(check(&record, 5, true), Some(HEADER + 64));
        assert_eq!(check(&record, 6, true), None, "no sample passes for another");
        assert_eq!(check(&record[..record.len() - 1], 5, true), None);
        for bit in 0..record.len() * 8 {
            record[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(check(&record, 5, true), None, "bit {bit}");
            record[bit / 8] ^= 1 << (bit % 8);
        }
    }
}
