//! The frames of a connection: a header of fixed length, and what follows it.

use crate::error::{Error, Result};

/// Bytes of a header.
pub(super) const HEADER: usize = 96;

const WORDS: usize = HEADER / 8;

/// The kind of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u64)]
pub(super) enum FrameKind {
    /// To the worker: a task, whose bytes follow.
    Task = 1,
    /// To the worker: nothing more is wanted.
    Done = 2,
    /// To the worker: a question for its clock.
    Ping = 3,
    /// To the main process: a result, whose bytes follow.
    Result = 4,
    /// To the main process: a sign of life, and perhaps the answer to a question.
    Beat = 5,
}

/// A header. Fields that a kind has no use for are zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    pub(super) kind: FrameKind,
    /// Of a result: true if its worker answers no other task of this epoch.
    pub(super) ends_part: bool,
    /// The number of the kind of task or result.
    pub(super) of: u64,
    pub(super) seq: u64,
    /// Bytes that follow.
    pub(super) len: u64,
    /// Of a result: where its table lies, and the number of its filling. Of a question and its answer: moments.
    pub(super) at: [u64; 3],
    /// Of a result: what its worker has counted.
    pub(super) counts: [u64; 5],
}

impl Header {
    /// A header of this kind, all zero.
    pub(super) fn of(kind: FrameKind) -> Self {
        Self { kind, ends_part: false, of: 0, seq: 0, len: 0, at: [0; 3], counts: [0; 5] }
    }

    pub(super) fn to_bytes(self) -> [u8; HEADER] {
        let Self { kind, ends_part, of, seq, len, at: [a, b, c], counts: [d, e, f, g, h] } = self;
        let words: [u64; WORDS] =
            [kind as u64 | u64::from(ends_part) << 8, of, seq, len, a, b, c, d, e, f, g, h];
        let mut bytes = [0; HEADER];
        for (word, into) in words.iter().zip(bytes.as_chunks_mut().0) {
            *into = word.to_le_bytes();
        }
        bytes
    }

    /// # Errors
    /// [`Error::Corrupt`] for bytes that no relay sends.
    pub(super) fn from_bytes(bytes: &[u8; HEADER]) -> Result<Self> {
        let mut words = [0; WORDS];
        for (word, from) in words.iter_mut().zip(bytes.as_chunks().0) {
            *word = u64::from_le_bytes(*from);
        }
        let [kind, of, seq, len, a, b, c, d, e, f, g, h] = words;
        let ends_part = kind >> 8 == 1;
        let kind = match kind & 0xff {
            1 => FrameKind::Task,
            2 => FrameKind::Done,
            3 => FrameKind::Ping,
            4 => FrameKind::Result,
            5 => FrameKind::Beat,
            _ => return Err(Error::Corrupt(format!("{kind} is no kind of frame"))),
        };
        Ok(Self { kind, ends_part, of, seq, len, at: [a, b, c], counts: [d, e, f, g, h] })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_come_back() {
        for kind in [FrameKind::Task, FrameKind::Done, FrameKind::Ping, FrameKind::Result, FrameKind::Beat] {
            let ends_part = kind == FrameKind::Result;
            let header =
                Header { kind, ends_part, of: 2, seq: 3, len: 4, at: [5, 6, 7], counts: [8, 9, 10, 11, 12] };
            assert_eq!(Header::from_bytes(&header.to_bytes()), Ok(header));
        }
        assert!(Header::from_bytes(&[0; HEADER]).is_err());
    }
}
