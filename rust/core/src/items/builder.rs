//! Building a list, item by item.
//!
//! INVARIANT: only the process that made a `Builder` writes with it. A forked child has the same memory and the same
//! offset in it, so what it wrote would lie between the parent's items.

use super::{Items, WORD};
use crate::error::{Error, Result};
use crate::number::usize_from;
use crate::os::frozen::Growing;
use crate::os::memory::{Available, MemoryProbe};

/// Bytes that are collected before they are written.
pub(super) const BUFFER: usize = 1 << 20;
/// Bytes that are written between two looks at what the system has left.
const LOOK: u64 = 16 << 20;

/// Builds a list. Private memory is a buffer, the item at hand, and where each item ends.
#[derive(Debug)]
pub struct Builder {
    memory: Growing,
    buffer: Vec<u8>,
    /// Zero, and the end of each item.
    ends: Vec<u8>,
    /// Bytes of `ends` that the allowance has counted.
    counted: usize,
    allowance: Allowance,
    owner: u32,
}

impl Builder {
    /// An empty list.
    ///
    /// # Errors
    /// [`Error::Os`] when the system refuses: too many open files.
    pub fn new() -> Result<Self> {
        Ok(Self {
            memory: Growing::create("ringloader-items")?,
            buffer: Vec::new(),
            ends: vec![0; WORD],
            counted: 0,
            allowance: Allowance::default(),
            owner: std::process::id(),
        })
    }

    /// Returns the buffer to which the bytes of the next item are appended, after earlier ones. Call
    /// [`end_item`](Self::end_item) afterwards.
    pub fn buffer(&mut self) -> &mut Vec<u8> {
        &mut self.buffer
    }

    /// Appends bytes of the next item.
    ///
    /// # Errors
    /// [`Error::Memory`] when there is no private memory for them.
    pub fn add(&mut self, bytes: &[u8]) -> Result<()> {
        let len = bytes.len() as u64;
        self.buffer.try_reserve(bytes.len()).map_err(|_| Error::allocation(len))?;
        self.buffer.extend_from_slice(bytes);
        Ok(())
    }

    /// Makes one item of all that was appended since the last call. Returns whether [`flush`](Self::flush) should
    /// follow.
    #[must_use]
    pub fn end_item(&mut self) -> bool {
        let end = self.memory.len() + self.buffer.len() as u64;
        self.ends.extend_from_slice(&end.to_le_bytes());
        self.buffer.len() >= BUFFER || self.ends.len() - self.counted >= BUFFER
    }

    /// Moves what was collected to shared memory. Between items only.
    ///
    /// # Errors
    /// [`Error::ListInherited`] in a forked child, [`Error::Memory`] when there is no memory, [`Error::Os`]
    /// when the system refuses.
    pub fn flush(&mut self) -> Result<()> {
        if std::process::id() != self.owner {
            return Err(Error::ListInherited { owner: self.owner });
        }
        let collected = self.buffer.len() + self.ends.len() - self.counted;
        self.counted = self.ends.len();
        self.allowance.take(collected as u64, self.memory.len())?;
        self.memory.append(&self.buffer)?;
        self.buffer.clear();
        self.buffer.shrink_to(2 * BUFFER);
        Ok(())
    }

    /// The list.
    ///
    /// # Errors
    /// As [`flush`](Self::flush).
    pub fn finish(mut self) -> Result<Items> {
        let end = self.memory.len() + self.buffer.len() as u64;
        self.buffer.resize(self.buffer.len() + usize_from(end.next_multiple_of(WORD as u64) - end), 0);
        self.flush()?;
        let count = self.ends.len() / WORD - 1;
        self.ends.extend_from_slice(&(count as u64).to_le_bytes());
        self.allowance.take(self.ends.len() as u64, self.memory.len())?;
        self.memory.append(&self.ends)?;
        Items::over(self.memory.freeze()?)
    }
}

/// The bytes that may be written before the next look at what the system has left. A process that reaches its control
/// group's limit is killed.
#[derive(Debug, Default)]
pub(super) struct Allowance {
    taken: u64,
    probe: Option<MemoryProbe>,
}

impl Allowance {
    /// Asks for `needed` bytes for a list that has `built`.
    pub(super) fn take(&mut self, needed: u64, built: u64) -> Result<()> {
        self.taken = self.taken.saturating_add(needed);
        if self.taken < LOOK {
            return Ok(());
        }
        self.taken = 0;
        let Available { bytes, limit } = self.probe.get_or_insert_with(MemoryProbe::new).available();
        // The bytes that are written before the next look must be available too.
        if needed.saturating_add(LOOK) > bytes {
            return Err(Error::Memory(format!(
                "a list in shared memory has {built} bytes and needs {needed} more, and {LOOK} to spare, but only {bytes} \
                 are available ({limit}); use a shorter list or smaller items, or raise the limit"
            )));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_than_the_machine_has_is_refused_with_the_figures() {
        let mut allowance = Allowance::default();
        assert_eq!(allowance.take(LOOK - 1, 0), Ok(()));
        let error = allowance.take(1 << 60, 77).unwrap_err().to_string();
        assert!(error.contains("77 bytes") && error.contains(&(1u64 << 60).to_string()), "{error}");
        assert_eq!(allowance.take(1, 0), Ok(()), "the next look is later");
    }
}
