//! Copies past the caches: for memory that no core reads soon, as a device's, or that of a large batch.
//!
//! An ordinary copy first loads each line that it is about to overwrite. Of large ones that is a third of the traffic.

/// Copies `len` bytes from `from` to `into`.
///
/// # Safety
/// `from` may be read and `into` written for `len` bytes, and they do not overlap.
#[cfg(target_arch = "x86_64")]
pub unsafe fn copy(from: *const u8, into: *mut u8, len: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
    use std::ptr::copy_nonoverlapping;

    const VECTOR: usize = size_of::<__m128i>();
    const LINE: usize = 4 * VECTOR;
    let head = into.align_offset(LINE).min(len);
    let streamed = (len - head) / LINE * LINE;
    let tail = len - head - streamed;
    // SAFETY: head, streamed part and tail are parts of both places, by the caller's promise. A vector store goes to a
    // multiple of its size, since the streamed part begins at a multiple of a line.
    unsafe {
        copy_nonoverlapping(from, into, head);
        let (source, target) = (from.add(head), into.add(head));
        for at in (0..streamed).step_by(LINE) {
            let vector = |number: usize| _mm_loadu_si128(source.add(at + number * VECTOR).cast::<__m128i>());
            let line = [vector(0), vector(1), vector(2), vector(3)];
            let into = target.add(at).cast::<__m128i>();
            for (number, vector) in line.into_iter().enumerate() {
                _mm_stream_si128(into.add(number), vector);
            }
        }
        copy_nonoverlapping(source.add(streamed), target.add(streamed), tail);
        // Streaming stores are ordered by no lock and no atomic.
        _mm_sfence();
    }
}

/// Copies `len` bytes from `from` to `into`.
///
/// # Safety
/// `from` may be read and `into` written for `len` bytes, and they do not overlap.
#[cfg(not(target_arch = "x86_64"))]
pub unsafe fn copy(from: *const u8, into: *mut u8, len: usize) {
    // SAFETY: the caller's promise.
    unsafe { std::ptr::copy_nonoverlapping(from, into, len) };
}

#[cfg(test)]
mod tests {
    use super::copy;

    #[test]
    fn every_length_and_alignment_is_copied_and_nothing_else() {
        let from: Vec<u8> = (0..600_u32).map(|at| (at % 251) as u8).collect();
        for (skip, shift) in (0..70).zip([0, 1, 15, 16, 33, 63].into_iter().cycle()) {
            for len in (0..300).chain([512, 513]) {
                let mut into = vec![255; 700];
                // SAFETY: 700 bytes hold `shift + len`, 600 hold `skip + len`.
                unsafe { copy(from.as_ptr().add(skip), into.as_mut_ptr().add(shift), len) };
                assert_eq!(into[shift..shift + len], from[skip..skip + len]);
                assert!(into[..shift].iter().chain(&into[shift + len..]).all(|&byte| byte == 255));
            }
        }
    }
}
