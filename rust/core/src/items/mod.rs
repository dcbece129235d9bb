//! A list of byte strings in frozen memory: it is built in a stream, and read by any process that has its descriptor.
//!
//! ```text
//!   bytes of item 0, of item 1, ... | zeros, up to a multiple of 8 | 0, end of item 0, of item 1, ... | count
//! ```
//!
//! All numbers are `u64`, little endian. They are checked where they are read.

#![forbid(unsafe_code)]

use std::os::fd::{BorrowedFd, OwnedFd};

use crate::error::{Error, Result};
use crate::os::frozen::{Frozen, Growing};

const WORD: usize = 8;
/// Bytes that are collected before they are written.
const BUFFER: usize = 1 << 20;

/// A list of byte strings that never changes.
#[derive(Debug)]
pub struct Items {
    memory: Frozen,
    /// Where the first item begins to be named: bytes before it are the items'.
    table: usize,
    count: usize,
}

impl Items {
    /// Takes over the descriptor of a list that another process has built.
    ///
    /// # Errors
    /// [`Error::Corrupt`] when it is no such list, [`Error::Os`] when it cannot be mapped.
    pub fn attach(fd: OwnedFd) -> Result<Self> {
        Self::over(Frozen::attach(fd)?)
    }

    fn over(memory: Frozen) -> Result<Self> {
        let len = memory.bytes().len();
        let shape = len.checked_sub(WORD).and_then(|at| {
            let count = usize::try_from(word(memory.bytes(), at)?).ok()?;
            let table = at.checked_sub(count.checked_add(1)?.checked_mul(WORD)?)?;
            Some((table, count))
        });
        let (table, count) =
            shape.ok_or_else(|| Error::Corrupt(format!("{len} bytes are no list of items")))?;
        Ok(Self { memory, table, count })
    }

    /// Number of items.
    #[must_use]
    pub fn len(&self) -> usize {
        self.count
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The bytes of one item; `None` past the end.
    #[must_use]
    pub fn get(&self, index: usize) -> Option<&[u8]> {
        if index >= self.count {
            return None;
        }
        let bytes = self.memory.bytes();
        let at = self.table + index * WORD;
        let (start, end) = (word(bytes, at)?, word(bytes, at + WORD)?);
        bytes[..self.table].get(usize::try_from(start).ok()?..usize::try_from(end).ok()?)
    }

    /// Bytes of shared memory.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        self.memory.bytes()
    }

    /// What another process needs for [`attach`](Self::attach).
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.memory.fd()
    }
}

fn word(bytes: &[u8], at: usize) -> Option<u64> {
    let word = bytes.get(at..at.checked_add(WORD)?)?;
    Some(u64::from_le_bytes(word.try_into().ok()?))
}

/// Builds a list, item by item. Private memory is a buffer, and the item at hand.
#[derive(Debug)]
pub struct Builder {
    payload: Growing,
    ends: Growing,
    buffer: Vec<u8>,
    ends_buffer: Vec<u8>,
    count: u64,
}

impl Builder {
    /// An empty list.
    ///
    /// # Errors
    /// [`Error::Os`] when the system refuses: too many open files.
    pub fn new() -> Result<Self> {
        Ok(Self {
            payload: Growing::create("ringloader-items")?,
            ends: Growing::create("ringloader-ends")?,
            buffer: Vec::new(),
            ends_buffer: 0u64.to_le_bytes().to_vec(),
            count: 0,
        })
    }

    /// Where the bytes of the next item are appended, behind others. [`end_item`](Self::end_item) follows.
    pub fn buffer(&mut self) -> &mut Vec<u8> {
        &mut self.buffer
    }

    /// All that was appended since the last call is one item.
    ///
    /// # Errors
    /// [`Error::Os`] when the system has no memory for it.
    pub fn end_item(&mut self) -> Result<()> {
        let end = self.payload.len() + self.buffer.len() as u64;
        self.ends_buffer.extend_from_slice(&end.to_le_bytes());
        self.count += 1;
        if self.buffer.len() >= BUFFER {
            self.payload.append(&self.buffer)?;
            self.buffer.clear();
            self.buffer.shrink_to(2 * BUFFER);
        }
        if self.ends_buffer.len() >= BUFFER {
            self.ends.append(&self.ends_buffer)?;
            self.ends_buffer.clear();
        }
        Ok(())
    }

    /// The list.
    ///
    /// # Errors
    /// [`Error::Os`] when the system has no memory for it.
    pub fn finish(mut self) -> Result<Items> {
        let end = self.payload.len() + self.buffer.len() as u64;
        self.buffer.resize(self.buffer.len() + (end.next_multiple_of(WORD as u64) - end) as usize, 0);
        self.payload.append(&self.buffer)?;
        self.payload.append_all(&self.ends)?;
        self.ends_buffer.extend_from_slice(&self.count.to_le_bytes());
        self.payload.append(&self.ends_buffer)?;
        Items::over(self.payload.freeze()?)
    }
}

/// A list whose [`bytes`](Items::bytes) were kept.
///
/// # Errors
/// [`Error::Corrupt`] when they are no list, [`Error::Os`] when the system has no memory for them.
pub fn from_bytes(bytes: &[u8]) -> Result<Items> {
    let mut memory = Growing::create("ringloader-items")?;
    memory.append(bytes)?;
    Items::over(memory.freeze()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn built(items: &[Vec<u8>]) -> Items {
        let mut builder = Builder::new().unwrap();
        for item in items {
            builder.buffer().extend_from_slice(item);
            builder.end_item().unwrap();
        }
        builder.finish().unwrap()
    }

    #[test]
    fn items_are_read_as_they_were_written() {
        // Empty ones, one larger than the buffer, and enough that their ends are more than it too.
        let mut items = vec![vec![], b"one".to_vec(), vec![7; BUFFER * 2 + 3], vec![]];
        items.extend((0..BUFFER / WORD + 10).map(|number| vec![number as u8; number % 3]));
        let list = built(&items);
        assert_eq!(list.len(), items.len());
        let again = Items::attach(list.fd().try_clone_to_owned().unwrap()).unwrap();
        let copied = from_bytes(list.bytes()).unwrap();
        drop(list);
        for (index, item) in items.iter().enumerate() {
            assert_eq!(again.get(index), Some(&item[..]), "{index}");
            assert_eq!(copied.get(index), Some(&item[..]), "{index}");
        }
        assert_eq!(again.get(items.len()), None);
    }

    #[test]
    fn an_empty_list_has_no_item() {
        let list = built(&[]);
        assert!(list.is_empty());
        assert_eq!(list.get(0), None);
    }

    #[test]
    fn bytes_that_are_no_list_are_refused_or_have_no_item() {
        for bytes in [vec![1], vec![0; 8], vec![255; 16], vec![1; 64]] {
            assert!(from_bytes(&bytes).is_err(), "{bytes:?}");
        }
        let words = |words: &[u64]| words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>();
        // Ends before it begins; ends behind the items; a table that would reach to usize::MAX.
        assert_eq!(from_bytes(&words(&[0, 8, 4, 1])).unwrap().get(0), None);
        assert_eq!(from_bytes(&words(&[0, 0, 9, 1])).unwrap().get(0), None);
        assert!(from_bytes(&words(&[0, 0, u64::MAX])).is_err());
        assert_eq!(from_bytes(&words(&[0, 0, 8, 1])).unwrap().get(0), Some(&[0; 8][..]));
    }
}
