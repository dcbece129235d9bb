//! Reading from a connection without waiting: many small frames by one call, large batches straight to their place.

use std::io::{ErrorKind, Read};
use std::net::TcpStream;
use std::ops::Range;

use super::loss::Loss;

/// Bytes that may be read ahead of their use.
pub(super) const AHEAD: usize = 16 << 10;

/// The bytes of a connection that were read, and not used yet.
#[derive(Debug)]
pub(super) struct Reader {
    bytes: Box<[u8]>,
    unused: Range<usize>,
    is_drained: bool,
}

impl Reader {
    pub(super) fn new() -> Self {
        Self { bytes: vec![0; AHEAD].into_boxed_slice(), unused: 0..0, is_drained: false }
    }

    /// The bytes that were read, and not used.
    pub(super) fn ahead(&self) -> &[u8] {
        &self.bytes[self.unused.clone()]
    }

    /// The first `count` bytes of [`ahead`](Self::ahead) are used.
    pub(super) fn consume(&mut self, count: usize) {
        self.unused.start += count;
    }

    /// Reads more ahead. Returns false if nothing has come.
    ///
    /// # Errors
    /// As [`record`](Self::record).
    pub(super) fn fill(&mut self, socket: &mut TcpStream) -> Result<bool, Loss> {
        if self.is_drained() {
            return Ok(false);
        }
        self.bytes.copy_within(self.unused.clone(), 0);
        self.unused = 0..self.unused.len();
        let into = &mut self.bytes[self.unused.end..];
        let (asked, result) = (into.len(), socket.read(into));
        let read = self.record(asked, result)?;
        self.unused.end += read.unwrap_or(0);
        Ok(read.is_some())
    }

    /// Returns true, once, if the last call has read all that was there: another one would find nothing.
    pub(super) fn is_drained(&mut self) -> bool {
        std::mem::take(&mut self.is_drained)
    }

    /// Records a call that has asked for `asked` bytes. Returns how many came; `None`: none now.
    ///
    /// # Errors
    /// The reason why the connection cannot continue.
    pub(super) fn record(
        &mut self,
        asked: usize,
        result: std::io::Result<usize>,
    ) -> Result<Option<usize>, Loss> {
        match result {
            Ok(0) => Err(Loss::theirs("its connection has ended")),
            Ok(read) => {
                self.is_drained = read < asked;
                Ok(Some(read))
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(None),
            Err(error) => Err(Loss::theirs(format!("its connection has failed: {error}"))),
        }
    }
}
