#![forbid(unsafe_code)]
//! Reading tokens.

use super::{Token, integers, tag, width_of};
use crate::batch::varint;
use crate::{Error, Result};

/// In a box, an error takes no more room than the token that it stands for.
type Boxed<T> = std::result::Result<T, Box<Error>>;

/// The tokens of a skeleton, each checked when it is read.
///
/// A token's bytes are inside the skeleton, leaf and memo numbers exist, and a container is only returned if all items still owed, its own included, have at least a byte each: memory reserved for announced
/// lengths stays within the length of the skeleton. The iterator ends after exactly one value; bytes beyond it, or
/// too few, are an error. After an error it ends.
#[derive(Debug, Clone)]
pub struct SkeletonReader<'a> {
    rest: &'a [u8],
    /// Values that must still come.
    owed: u64,
    memo: u32,
    leaves: u32,
    /// Bytes of the whole skeleton.
    len: usize,
}

impl<'a> SkeletonReader<'a> {
    /// Reads `bytes`, in which leaves are numbered below `leaf_count`.
    #[inline]
    pub fn new(bytes: &'a [u8], leaf_count: u32) -> Self {
        Self { rest: bytes, owed: 1, memo: 0, leaves: leaf_count, len: bytes.len() }
    }

    /// Bytes not read yet.
    pub fn remaining(&self) -> usize {
        self.rest.len()
    }

    /// Memo numbers taken so far: one less is the number of the memoisable token just read.
    pub fn memo_count(&self) -> u32 {
        self.memo
    }

    /// The next token, for a walker that knows it must come.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if the token is bad, or the value is complete and nothing may follow.
    // Always inlined, as `token` is: a walker's branch on the token is then the branch on the tag.
    #[inline(always)]
    pub fn next_token(&mut self) -> Result<Token<'a>> {
        if self.owed == 0 {
            return Err(self.end());
        }
        self.token().map_err(|error| self.fail(*error))
    }

    #[inline(always)]
    fn token(&mut self) -> Boxed<Token<'a>> {
        let Some((&tag, rest)) = self.rest.split_first() else {
            return Err(self.corrupt("the bytes end before the value does"));
        };
        self.rest = rest;
        let token = match tag {
            tag::NONE => Token::None,
            tag::TRUE => Token::True,
            tag::FALSE => Token::False,
            tag::INT => Token::Int(varint::unzigzag(self.number()?)),
            tag::FLOAT => {
                let (bytes, rest) =
                    self.rest.split_first_chunk().ok_or_else(|| self.corrupt("a float is cut off"))?;
                self.rest = rest;
                Token::Float(f64::from_le_bytes(*bytes))
            }
            tag::STR => Token::Str(self.blob()?),
            tag::BYTES => Token::Bytes(self.blob()?),
            tag::LIST => Token::List(self.length(1)?),
            tag::TUPLE => Token::Tuple(self.length(1)?),
            tag::DICT => Token::Dict(self.length(2)?),
            tag::NAMED_TUPLE => Token::NamedTuple(self.length(1)?),
            tag::LEAF => Token::Leaf(self.below(u64::from(self.leaves), "leaf")?),
            tag::MEMO => Token::Memo(self.below(u64::from(self.memo), "memo number")?),
            tag::PICKLE => Token::Pickle(self.blob()?),
            tag::INTS => self.ints()?,
            _ => return Err(self.corrupt(&format!("{tag} is no token"))),
        };
        self.owed -= 1;
        if let Token::Str(_)
        | Token::List(_)
        | Token::Ints { .. }
        | Token::Tuple(_)
        | Token::Dict(_)
        | Token::NamedTuple(_)
        | Token::Leaf(_) = token
        {
            self.memo =
                self.memo.checked_add(1).ok_or_else(|| self.corrupt("more than 32 bits of memo numbers"))?;
        }
        Ok(token)
    }

    #[inline]
    fn number(&mut self) -> Boxed<u64> {
        varint::take(&mut self.rest)
            .ok_or_else(|| self.corrupt("a number is cut off or not in its shortest form"))
    }

    #[inline]
    fn below(&mut self, limit: u64, what: &str) -> Boxed<u32> {
        let number = self.number()?;
        match u32::try_from(number) {
            Ok(index) if number < limit => Ok(index),
            _ => Err(self.corrupt(&format!("{what} {number}, where there are {limit}"))),
        }
    }

    /// A container's length, of which each item is `values` values.
    #[inline]
    fn length(&mut self, values: u64) -> Boxed<u32> {
        let number = self.number()?;
        let owed = number.checked_mul(values).and_then(|items| items.checked_add(self.owed));
        // The container itself is still among those owed.
        match (u32::try_from(number), owed) {
            (Ok(length), Some(owed)) if owed - 1 <= self.rest.len() as u64 => {
                self.owed = owed;
                Ok(length)
            }
            _ => Err(self.corrupt(&format!("a container of {number} with {} bytes left", self.rest.len()))),
        }
    }

    #[inline]
    fn blob(&mut self) -> Boxed<&'a [u8]> {
        let length = self.number()?;
        let blob = usize::try_from(length).ok().and_then(|length| self.rest.split_off(..length));
        blob.ok_or_else(|| self.corrupt(&format!("a length of {length} with {} bytes left", self.rest.len())))
    }

    fn ints(&mut self) -> Boxed<Token<'a>> {
        let len = self.number()?;
        let Some((&width, rest)) = self.rest.split_first() else {
            return Err(self.corrupt("a list of integers is cut off"));
        };
        self.rest = rest;
        let width = u32::from(width);
        let bytes = len.checked_mul(width.into()).and_then(|bytes| usize::try_from(bytes).ok());
        let bytes = bytes.filter(|_| len > 0 && matches!(width, 1 | 2 | 4 | 8));
        let bytes = bytes.and_then(|bytes| self.rest.split_off(..bytes));
        match bytes {
            Some(bytes) if u32::from(width_of(integers(width, bytes))) == width => {
                Ok(Token::Ints { width, bytes })
            }
            _ => Err(self.corrupt(&format!("{len} integers of {width} bytes"))),
        }
    }

    #[cold]
    fn corrupt(&self, what: &str) -> Box<Error> {
        let at = self.len - self.rest.len();
        Box::new(Error::Corrupt(format!("batch skeleton, byte {at}: {what}")))
    }

    /// Ends the reading, with the error of a bad token.
    #[cold]
    fn fail(&mut self, error: Error) -> Error {
        self.owed = 0;
        self.rest = &[];
        error
    }

    /// Ends the reading after the last token, with the error of asking for one more.
    #[cold]
    fn end(&mut self) -> Error {
        let error = match self.rest.len() {
            0 => self.corrupt("a value is asked for after the last"),
            left => self.corrupt(&format!("{left} bytes follow the value")),
        };
        self.fail(*error)
    }
}

impl<'a> Iterator for SkeletonReader<'a> {
    type Item = Result<Token<'a>>;

    #[inline]
    fn next(&mut self) -> Option<Self::Item> {
        (self.owed > 0 || !self.rest.is_empty()).then(|| self.next_token())
    }
}

impl std::iter::FusedIterator for SkeletonReader<'_> {}
