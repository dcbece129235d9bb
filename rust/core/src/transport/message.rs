//! Gives the eight words of a descriptor their meaning: a task on its way down, a result on its way up.

use crate::error::{Error, Result};
use crate::number::u32_from;
use crate::pool::SlotId;
use crate::ring::Words;

/// The way to read the bytes of a task. They lie in the worker's task arena.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum TaskKind {
    /// torch's final signal: no bytes.
    End = 1,
    /// A list of exact ints, as little-endian int64.
    Indices = 2,
    /// One exact int, as little-endian int64.
    Index = 3,
    /// A list of `None`, whose length is the int64: what an iterable dataset is asked with.
    Nones = 4,
    /// An index of any other kind, pickled.
    PickledIndex = 5,
    /// A whole message of torch's protocol instead of an index, pickled.
    Object = 6,
    /// `None` itself as an index: what an iterable dataset is asked with for one sample. No bytes.
    None = 7,
    /// No task of torch's: something that the worker calls between two of them, pickled. Nothing answers it here.
    Call = 8,
    /// The places of the samples in the epoch, from which seeds are made, then an index of one of the kinds above.
    Seeded = 9,
}

impl TaskKind {
    /// Returns the kind with this number, if there is one.
    #[must_use]
    pub fn from_number(number: u64) -> Option<Self> {
        use TaskKind::{Call, End, Index, Indices, Nones, Object, PickledIndex, Seeded};
        let all = [End, Indices, Index, Nones, PickledIndex, Object, Self::None, Call, Seeded];
        all.into_iter().find(|&kind| kind as u64 == number)
    }

    pub(crate) fn read(number: u64) -> Result<Self> {
        Self::from_number(number).ok_or_else(|| Error::Corrupt(format!("{number} is no kind of task")))
    }
}

/// The request of a task: bytes, and the way to read them.
pub type TaskIndex = (TaskKind, Vec<u8>);

/// One task, as both ends see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Task {
    /// torch's `send_idx`; 0 where there is none.
    pub seq: u64,
    /// The way to read `bytes`.
    pub kind: TaskKind,
    /// The indices.
    pub bytes: Vec<u8>,
}

/// The location of a task's bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TaskDescriptor {
    pub(crate) seq: u64,
    pub(crate) kind: TaskKind,
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

impl TaskDescriptor {
    pub(crate) fn to_words(self) -> Words {
        seal([self.seq, self.kind as u64, self.offset, self.len, 0, 0, 0, 0])
    }

    pub(crate) fn from_words(words: &Words) -> Result<Self> {
        let &[seq, kind, offset, len, ..] = unseal(words)?;
        Ok(Self { seq, kind: TaskKind::read(kind)?, offset, len })
    }
}

/// The kind of a result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum ResultKind {
    /// The data of task `seq`.
    Batch = 1,
    /// A whole message of torch's protocol instead of a batch.
    Object = 2,
}

/// The location of a result's bytes: in a slot of the worker, in a window that all workers share, or in a segment of
/// their own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BatchLocation {
    Slot(SlotId),
    Shared(u32),
    Own,
}

/// One result, as both ends see it. Offsets count from the start of its location.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ResultDescriptor {
    pub(crate) seq: u64,
    pub(crate) kind: ResultKind,
    pub(crate) location: BatchLocation,
    pub(crate) meta_offset: u64,
    pub(crate) meta_len: u64,
    /// Bytes of the location that are in use.
    pub(crate) used: u64,
    /// The number of this filling, counted by the worker; stands in the meta block too.
    pub(crate) generation: u64,
}

const OWN: u64 = u64::MAX;
/// Before the number of a window that all workers share.
const SHARED: u64 = 1 << 32;

impl ResultKind {
    /// Returns the kind with this number, if there is one.
    #[must_use]
    pub fn from_number(number: u64) -> Option<Self> {
        [Self::Batch, Self::Object].into_iter().find(|&kind| kind as u64 == number)
    }
}

impl ResultDescriptor {
    pub(crate) fn to_words(self) -> Words {
        let location = match self.location {
            BatchLocation::Slot(slot) => slot.get().into(),
            BatchLocation::Shared(window) => SHARED | u64::from(window),
            BatchLocation::Own => OWN,
        };
        let Self { seq, kind, meta_offset, meta_len, used, generation, .. } = self;
        seal([seq, kind as u64, location, meta_offset, meta_len, used, generation, 0])
    }

    /// Reads a descriptor for a worker with `slots` windows of `window` bytes.
    pub(crate) fn from_words(words: &Words, slots: u32, window: u64) -> Result<Self> {
        let &[seq, kind, location, meta_offset, meta_len, used, generation, _] = unseal(words)?;
        let kind = ResultKind::from_number(kind)
            .ok_or_else(|| Error::Corrupt(format!("{kind} is no kind of result")))?;
        let (location, room) = match location {
            OWN => (BatchLocation::Own, u64::MAX),
            slot if slot < slots.into() => (BatchLocation::Slot(SlotId::new(u32_from(slot))), window),
            // Whoever knows the windows looks if it is one of them, and has as many bytes.
            shared if shared >> 32 == 1 => {
                (BatchLocation::Shared(u32_from(shared & u64::from(u32::MAX))), u64::MAX)
            }
            slot => return Err(Error::Corrupt(format!("slot {slot} of {slots}"))),
        };
        let inside = meta_offset.checked_add(meta_len).is_some_and(|end| end <= used) && used <= room;
        if !inside {
            return Err(Error::Corrupt(format!(
                "a block of {meta_len} bytes at {meta_offset}, {used} bytes in use, in a window of {room}"
            )));
        }
        Ok(Self { seq, kind, location, meta_offset, meta_len, used, generation })
    }
}

/// Fills in the last word: a descriptor that was overwritten in part does not pass.
fn seal(mut words: Words) -> Words {
    words[7] = fold(&words);
    words
}

fn unseal(words: &Words) -> Result<&Words> {
    if words[7] != fold(words) {
        return Err(Error::Corrupt(format!("a descriptor does not match its check word: {words:x?}")));
    }
    Ok(words)
}

fn fold(words: &Words) -> u64 {
    const ODD: u64 = 0x9e37_79b9_7f4a_7c15;
    words[..7].iter().fold(ODD, |sum, &word| (sum ^ word).wrapping_mul(ODD).rotate_left(29))
}

#[cfg(test)]
mod tests {
    use super::*;

    const RESULT: ResultDescriptor = ResultDescriptor {
        seq: 9,
        kind: ResultKind::Batch,
        location: BatchLocation::Slot(SlotId::new(63)),
        meta_offset: 4000,
        meta_len: 96,
        used: 4096,
        generation: 5,
    };

    #[test]
    fn descriptors_survive_the_ring() {
        for number in 0..20 {
            let Some(kind) = TaskKind::from_number(number) else { continue };
            assert_eq!(kind as u64, number);
            let task = TaskDescriptor { seq: 7, kind, offset: 64, len: 512 };
            assert_eq!(TaskDescriptor::from_words(&task.to_words()), Ok(task));
        }
        assert_eq!(ResultDescriptor::from_words(&RESULT.to_words(), 64, 4096), Ok(RESULT));
        for location in [BatchLocation::Own, BatchLocation::Shared(0), BatchLocation::Shared(u32::MAX)] {
            let large = ResultDescriptor { location, used: 1 << 40, ..RESULT };
            assert_eq!(ResultDescriptor::from_words(&large.to_words(), 64, 4096), Ok(large));
        }
    }

    #[test]
    fn any_flipped_bit_is_noticed() {
        let words = RESULT.to_words();
        for bit in 0..512 {
            let mut flipped = words;
            flipped[bit / 64] ^= 1 << (bit % 64);
            assert!(ResultDescriptor::from_words(&flipped, 64, 4096).is_err(), "bit {bit}");
        }
        assert!(TaskDescriptor::from_words(&[0; 8]).is_err());
    }

    #[test]
    fn ranges_outside_the_window_are_refused() {
        for (meta_offset, meta_len, used) in [(4000, 97, 4096), (u64::MAX, 96, 4096), (0, 96, 4097)] {
            let words = ResultDescriptor { meta_offset, meta_len, used, ..RESULT }.to_words();
            assert!(ResultDescriptor::from_words(&words, 64, 4096).is_err());
        }
        let words = ResultDescriptor { location: BatchLocation::Slot(SlotId::new(64)), ..RESULT }.to_words();
        assert!(ResultDescriptor::from_words(&words, 64, 4096).is_err());
    }
}
