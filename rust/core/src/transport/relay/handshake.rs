//! The first bytes of a connection: who may begin one.
//!
//! The main process sends a challenge, and the worker answers with its number and a proof that it knows the secret. The
//! secret does not cross the connection, and a proof is good for one connection, one worker and one number.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use hmac::{Hmac, KeyInit, Mac};
use rustix::rand::{GetRandomFlags, getrandom};
use sha2::Sha256;
use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{Identity, Token};

/// Bytes of a challenge.
pub(super) const CHALLENGE: usize = 32;

pub(super) type Challenge = [u8; CHALLENGE];

/// The time that a caller has for each word.
const INTRODUCED_WITHIN: Duration = Duration::from_secs(10);

const MAGIC: [u8; 8] = *b"ringldr2";

/// The first bytes of a worker: the answer to the challenge.
#[derive(Debug, Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
pub(super) struct Hello {
    magic: [u8; 8],
    worker: U32,
    /// The number under which this worker was expected.
    number: U64,
    proof: [u8; 32],
}

impl Hello {
    /// Returns the answer of a worker to a challenge.
    pub(super) fn new(challenge: &Challenge, identity: &Identity) -> Self {
        let &Identity { token, worker, number } = identity;
        let hello = Self { magic: MAGIC, worker: worker.into(), number: number.into(), proof: [0; 32] };
        Self { proof: hello.mac(challenge, &token).finalize().into_bytes().into(), ..hello }
    }

    /// Returns the worker and its number, if this answers the challenge.
    fn check(&self, challenge: &Challenge, token: &Token) -> Option<(u32, u64)> {
        // Takes as long, wherever a wrong proof differs.
        let is_right = self.mac(challenge, token).verify_slice(&self.proof).is_ok();
        (is_right && self.magic == MAGIC).then(|| (self.worker.get(), self.number.get()))
    }

    /// The proof is over the challenge and all that stands before it.
    fn mac(&self, challenge: &Challenge, token: &Token) -> Hmac<Sha256> {
        // HMAC fills a shorter key up with zeros itself.
        let mut key = [0; 64];
        key[..token.len()].copy_from_slice(token);
        let mut mac = Hmac::<Sha256>::new(&key.into());
        mac.update(challenge);
        mac.update(&self.as_bytes()[..size_of::<Self>() - self.proof.len()]);
        mac
    }
}

/// Asks a caller whose it is. Returns the worker and its number; `None` for a caller that is no worker, or has gone.
pub(super) fn ask(mut caller: &TcpStream, token: &Token) -> Option<(u32, u64)> {
    let mut challenge = [0; CHALLENGE];
    getrandom(&mut challenge, GetRandomFlags::empty()).ok().filter(|&got| got == CHALLENGE)?;
    caller.set_read_timeout(Some(INTRODUCED_WITHIN)).ok()?;
    caller.write_all(&challenge).ok()?;
    let mut hello = Hello::new_zeroed();
    caller.read_exact(hello.as_mut_bytes()).ok()?;
    hello.check(&challenge, token)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hello_is_good_for_its_challenge_its_token_and_its_words() {
        let (challenge, token) = ([1; CHALLENGE], [7; 32]);
        let hello = Hello::new(&challenge, &Identity { token, worker: 3, number: 9 });
        assert_eq!(hello.check(&challenge, &token), Some((3, 9)));
        assert_eq!(hello.check(&[2; CHALLENGE], &token), None, "a recorded one");
        assert_eq!(hello.check(&challenge, &[8; 32]), None);
        assert!(!hello.as_bytes().windows(token.len()).any(|bytes| bytes == token));
        for at in 0..size_of::<Hello>() {
            let mut changed = hello;
            changed.as_mut_bytes()[at] ^= 1;
            assert_eq!(changed.check(&challenge, &token), None, "byte {at}");
        }
    }
}
