//! The frames of a connection: a header of fixed length, and what follows it.

use zerocopy::little_endian::U64;
use zerocopy::{Immutable, IntoBytes, KnownLayout, TryFromBytes, Unaligned};

/// Bytes of a header.
pub(super) const HEADER: usize = size_of::<FrameHeader>();

/// The kind of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq, TryFromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(u8)]
pub(super) enum FrameKind {
    /// To the worker: a task, whose bytes follow.
    Task = 1,
    /// To the worker: nothing more is wanted.
    Done = 2,
    /// To the worker: a sign of life, and a question for its clock.
    Ping = 3,
    /// To the main process: a result, whose bytes follow.
    Result = 4,
    /// To the main process: a sign of life, and perhaps the answer to a question.
    Beat = 5,
}

/// The header of a frame. Fields that a kind has no use for are zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, TryFromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct FrameHeader {
    pub(super) kind: FrameKind,
    /// Of a result: true if its worker answers no other task of this epoch.
    pub(super) ends_part: bool,
    /// The number of the kind of task or result.
    pub(super) of: u8,
    pub(super) zero: [u8; 5],
    pub(super) seq: U64,
    /// Bytes that follow.
    pub(super) len: U64,
    /// Of a result: where its table lies, and the number of its filling. Of a question and its answer: moments.
    pub(super) at: [U64; 3],
    /// Of a result: what its worker has counted.
    pub(super) counts: [U64; 5],
}

impl FrameHeader {
    /// Returns a header of this kind, all zero.
    pub(super) fn new(kind: FrameKind) -> Self {
        let zero = U64::ZERO;
        Self {
            kind,
            ends_part: false,
            of: 0,
            zero: [0; 5],
            seq: zero,
            len: zero,
            at: [zero; 3],
            counts: [zero; 5],
        }
    }

    /// Returns a header of this kind with these moments.
    pub(super) fn with_moments(kind: FrameKind, at: [u64; 3]) -> Self {
        Self { at: at.map(U64::new), ..Self::new(kind) }
    }

    /// Reads a header.
    ///
    /// # Errors
    /// The text that says that no relay sends such bytes.
    pub(super) fn read(bytes: &[u8; HEADER]) -> Result<Self, String> {
        Self::try_read_from_bytes(bytes).map_err(|_| format!("{:x?} begins no frame", &bytes[..8]))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_come_back() {
        for kind in [FrameKind::Task, FrameKind::Done, FrameKind::Ping, FrameKind::Result, FrameKind::Beat] {
            let ends_part = kind == FrameKind::Result;
            let counts = [8, 9, 10, 11, 12].map(U64::new);
            let (seq, len) = (3.into(), 4.into());
            let header = FrameHeader {
                ends_part,
                of: 2,
                seq,
                len,
                counts,
                ..FrameHeader::with_moments(kind, [5, 6, 7])
            };
            let bytes: [u8; HEADER] = header.as_bytes().try_into().unwrap();
            assert_eq!(FrameHeader::read(&bytes), Ok(header));
        }
        assert!(FrameHeader::read(&[0; HEADER]).is_err());
    }
}
