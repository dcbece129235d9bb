//! The first bytes of a connection: who may begin one.

use std::io::{ErrorKind, Read};
use std::net::TcpStream;
use std::time::Instant;

use super::Token;

/// Bytes that a worker begins with.
pub(super) const HELLO: usize = 64;

const MAGIC: &[u8; 8] = b"ringldr1";

/// The first bytes of a worker's connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) token: Token,
    pub(super) worker: u32,
    /// The number under which this worker was expected.
    pub(super) number: u64,
}

impl Hello {
    pub(super) fn to_bytes(self) -> [u8; HELLO] {
        let mut bytes = [0; HELLO];
        bytes[..8].copy_from_slice(MAGIC);
        bytes[8..40].copy_from_slice(&self.token);
        bytes[40..44].copy_from_slice(&self.worker.to_le_bytes());
        bytes[48..56].copy_from_slice(&self.number.to_le_bytes());
        bytes
    }

    /// Returns the worker and its number, if the bytes begin a connection with this token.
    pub(super) fn read(bytes: &[u8; HELLO], token: &Token) -> Option<(u32, u64)> {
        let magic = &bytes[..8] == MAGIC;
        // Looks at all of it in any case: the time says nothing of where a wrong one differs.
        let differs = bytes[8..40].iter().zip(token).fold(0, |sum, (one, other)| sum | (one ^ other));
        let worker = u32::from_le_bytes(bytes[40..44].try_into().ok()?);
        let number = u64::from_le_bytes(bytes[48..56].try_into().ok()?);
        (magic && differs == 0).then_some((worker, number))
    }
}

/// A connection that has not said yet whose it is.
#[derive(Debug)]
pub(super) struct Caller {
    pub(super) socket: TcpStream,
    bytes: [u8; HELLO],
    have: usize,
    pub(super) since: Instant,
}

/// The words of a caller.
pub(super) enum Said {
    /// Not everything yet.
    Little,
    /// That it is this worker, under this number.
    Worker(u32, u64),
    /// Words of no worker; or the caller has gone.
    Nonsense,
}

impl Caller {
    pub(super) fn new(socket: TcpStream) -> Self {
        Self { socket, bytes: [0; HELLO], have: 0, since: Instant::now() }
    }

    /// Reads what is there. Never waits.
    pub(super) fn listen(&mut self, token: &Token) -> Said {
        loop {
            match self.socket.read(&mut self.bytes[self.have..]) {
                Ok(0) => return Said::Nonsense,
                Ok(read) => self.have += read,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Said::Little,
                Err(_) => return Said::Nonsense,
            }
            if self.have == HELLO {
                return Hello::read(&self.bytes, token)
                    .map_or(Said::Nonsense, |(worker, number)| Said::Worker(worker, number));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hello_is_read_with_its_token_only() {
        let bytes = Hello { token: [7; 32], worker: 3, number: 9 }.to_bytes();
        assert_eq!(Hello::read(&bytes, &[7; 32]), Some((3, 9)));
        let mut other = [7; 32];
        for at in 0..32 {
            other[at] ^= 1;
            assert_eq!(Hello::read(&bytes, &other), None, "byte {at}");
            other[at] ^= 1;
        }
        let mut changed = bytes;
        changed[0] ^= 1;
        assert_eq!(Hello::read(&changed, &[7; 32]), None);
    }
}
