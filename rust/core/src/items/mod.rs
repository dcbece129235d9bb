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

mod builder;

pub use builder::Builder;

const WORD: usize = 8;

/// A list of byte strings that never changes.
#[derive(Debug)]
pub struct Items {
    memory: Frozen,
    /// Start of the table that lists the items. The bytes before it are the items'.
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

    /// Returns true if there are no items.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// The bytes of one item; `None` past the end.
    #[must_use]
    #[inline]
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

    /// Returns the descriptor that another process needs for [`attach`](Self::attach).
    ///
    /// # Errors
    /// [`Error::Os`] when other code has closed it by its number. The items can still be read.
    pub fn fd(&self) -> Result<BorrowedFd<'_>> {
        self.memory.fd()
    }
}

#[inline]
fn word(bytes: &[u8], at: usize) -> Option<u64> {
    let word = bytes.get(at..at.checked_add(WORD)?)?;
    Some(u64::from_le_bytes(word.try_into().ok()?))
}

/// A list whose [`bytes`](Items::bytes) were kept.
///
/// # Errors
/// [`Error::Corrupt`] when they are no list, [`Error::Memory`] or [`Error::Os`] when there is no memory for them.
pub fn from_bytes(bytes: &[u8]) -> Result<Items> {
    let mut memory = Growing::create("ringloader-items")?;
    builder::Allowance::default().take(bytes.len() as u64, 0)?;
    memory.append(bytes)?;
    Items::over(memory.freeze()?)
}

#[cfg(test)]
mod tests {
    use super::builder::BUFFER;
    use super::*;

    fn built(items: &[Vec<u8>]) -> Items {
        let mut builder = Builder::new().unwrap();
        for item in items {
            builder.buffer().extend_from_slice(item);
            if builder.end_item() {
                builder.flush().unwrap();
            }
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
        let again = Items::attach(list.fd().unwrap().try_clone_to_owned().unwrap()).unwrap();
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
        // Ends before it begins; ends after the items; a table that would reach to usize::MAX.
        assert_eq!(from_bytes(&words(&[0, 8, 4, 1])).unwrap().get(0), None);
        assert_eq!(from_bytes(&words(&[0, 0, 9, 1])).unwrap().get(0), None);
        assert!(from_bytes(&words(&[0, 0, u64::MAX])).is_err());
        assert_eq!(from_bytes(&words(&[0, 0, 8, 1])).unwrap().get(0), Some(&[0; 8][..]));
    }
}
