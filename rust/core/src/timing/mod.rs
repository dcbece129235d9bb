//! Measures the time of an epoch's parts. All times are nanoseconds of one clock that all processes share; nothing here
//! reads it.
//!
//! A worker records the moments of a batch in a [`WorkerClock`]. They travel with the batch as [`Stamps`]. The main
//! process adds them up in an [`EpochTimes`].

use crate::number::usize_from;

mod clock;
mod epoch;

pub use clock::WorkerClock;
pub use epoch::{EpochTimes, Event, Fetch, MainWork, WorkerSums};

/// Words of a batch's stamps, followed by the number of its filling.
const WORDS: usize = 9;

/// The moments of one batch in its worker, and what it took there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stamps {
    /// The worker began to wait for the task.
    pub asked: u64,
    /// The worker had the task, and asked the dataset.
    pub got: u64,
    /// Collation began; 0 if there was none.
    pub collating: u64,
    /// The length of collation.
    pub collate: u64,
    /// The batch was there, and the worker began to send it.
    pub made: u64,
    /// The time of that for which the worker waited for memory.
    pub room: u64,
    /// The batch was sent.
    pub sent: u64,
    /// Processor time since it was read before.
    pub cpu: u64,
}

impl Stamps {
    /// Bytes of the stamps after a batch.
    pub const BYTES: u64 = (WORDS * size_of::<u64>()) as u64;

    /// Returns the stamps as they travel after the batch of this filling.
    #[must_use]
    pub fn to_bytes(&self, generation: u64) -> [u8; usize_from(Self::BYTES)] {
        let Self { asked, got, collating, collate, made, room, sent, cpu } = *self;
        let mut bytes = [0; usize_from(Self::BYTES)];
        let words = [asked, got, collating, collate, made, room, sent, cpu, generation];
        for (word, into) in words.iter().zip(bytes.as_chunks_mut().0) {
            *into = word.to_le_bytes();
        }
        bytes
    }

    /// Returns the stamps after the batch of this filling; `None` for other bytes.
    #[must_use]
    pub fn from_bytes(bytes: &[u8], generation: u64) -> Option<Self> {
        let (words, rest) = bytes.as_chunks();
        let words: &[[u8; 8]; WORDS] = words.try_into().ok().filter(|_| rest.is_empty())?;
        let [asked, got, collating, collate, made, room, sent, cpu, of] = words.map(u64::from_le_bytes);
        (of == generation).then_some(Self { asked, got, collating, collate, made, room, sent, cpu })
    }

    /// Returns the time for which the worker waited for the task.
    #[must_use]
    pub fn idle(&self) -> u64 {
        self.got.saturating_sub(self.asked)
    }

    /// Returns the time that the dataset took.
    #[must_use]
    pub fn dataset(&self) -> u64 {
        self.made.saturating_sub(self.got).saturating_sub(self.collate)
    }

    /// Returns the time for which the worker waited for memory from this moment on. It waits before it sends.
    #[must_use]
    pub fn room_since(&self, moment: u64) -> u64 {
        self.room.min((self.made + self.room).saturating_sub(moment))
    }

    /// Returns the time that encoding and copying took.
    #[must_use]
    pub fn send(&self) -> u64 {
        self.sent.saturating_sub(self.made).saturating_sub(self.room)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STAMPS: Stamps =
        Stamps { asked: 10, got: 15, collating: 60, collate: 20, made: 80, room: 7, sent: 100, cpu: 33 };

    #[test]
    fn stamps_come_back_for_their_own_batch_only() {
        let bytes = STAMPS.to_bytes(5);
        assert_eq!(Stamps::from_bytes(&bytes, 5), Some(STAMPS));
        assert_eq!(Stamps::from_bytes(&bytes, 6), None);
        assert_eq!(Stamps::from_bytes(&bytes[1..], 5), None);
        assert_eq!(Stamps::from_bytes(&[], 0), None);
    }

    #[test]
    fn the_parts_of_a_batch_add_up() {
        let parts = STAMPS.idle() + STAMPS.dataset() + STAMPS.collate + STAMPS.send() + STAMPS.room;
        assert_eq!(parts, STAMPS.sent - STAMPS.asked);
        assert_eq!((STAMPS.idle(), STAMPS.dataset(), STAMPS.send()), (5, 45, 13));
    }
}
