#![forbid(unsafe_code)]
//! Writing tokens.

use super::{tag, width_of};
use crate::batch::varint;
use crate::{Error, Result};

/// Writes a skeleton token by token. What takes a memo number returns it.
///
/// The writer does not check that containers get the items they announce; the reader does.
#[derive(Debug, Default)]
pub struct SkeletonWriter {
    bytes: Vec<u8>,
    memo: u32,
}

impl SkeletonWriter {
    /// An empty skeleton.
    pub fn new() -> Self {
        Self::default()
    }

    /// Forgets what was written and keeps the memory.
    pub fn clear(&mut self) {
        self.bytes.clear();
        self.memo = 0;
    }

    /// Makes room for the next token, with `len` bytes of text or content: it takes no memory then.
    ///
    /// # Errors
    /// [`Error::Memory`] when there is none.
    pub fn reserve(&mut self, len: usize) -> Result<()> {
        let error = |_| Error::allocation(len as u64);
        self.bytes.try_reserve(len.saturating_add(16)).map_err(error)
    }

    /// Returns the bytes that were written so far.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Memo numbers taken so far.
    pub fn memo_count(&self) -> u32 {
        self.memo
    }

    /// `None`.
    pub fn none(&mut self) {
        self.bytes.push(tag::NONE);
    }

    /// `True` or `False`.
    pub fn bool(&mut self, value: bool) {
        self.bytes.push(if value { tag::TRUE } else { tag::FALSE });
    }

    /// An integer.
    pub fn int(&mut self, value: i64) {
        self.number(tag::INT, varint::zigzag(value));
    }

    /// A float, bit for bit.
    pub fn float(&mut self, value: f64) {
        self.bytes.push(tag::FLOAT);
        self.bytes.extend_from_slice(&value.to_le_bytes());
    }

    /// A string. Returns its memo number.
    pub fn str(&mut self, value: &str) -> u32 {
        self.blob(tag::STR, value.as_bytes());
        self.take_memo()
    }

    /// A `bytes` object.
    pub fn bytes(&mut self, value: &[u8]) {
        self.blob(tag::BYTES, value);
    }

    /// A list; `len` values must follow. Returns its memo number.
    pub fn list(&mut self, len: u32) -> u32 {
        self.number(tag::LIST, u64::from(len));
        self.take_memo()
    }

    /// A list of integers, at least one. Returns its memo number.
    #[expect(clippy::cast_possible_truncation, reason = "they are as wide as the widest of them")]
    pub fn ints(&mut self, values: &[i64]) -> u32 {
        let width = width_of(values.iter().copied());
        self.number(tag::INTS, values.len() as u64);
        self.bytes.push(width);
        match width {
            1 => self.bytes.extend(values.iter().map(|&value| value as u8)),
            2 => self.bytes.extend(values.iter().flat_map(|&value| (value as i16).to_le_bytes())),
            4 => self.bytes.extend(values.iter().flat_map(|&value| (value as i32).to_le_bytes())),
            _ => self.bytes.extend(values.iter().flat_map(|&value| value.to_le_bytes())),
        }
        self.take_memo()
    }

    /// A tuple; `len` values must follow. Returns its memo number, to be used only once its items are written.
    pub fn tuple(&mut self, len: u32) -> u32 {
        self.number(tag::TUPLE, u64::from(len));
        self.take_memo()
    }

    /// A dict; `pairs` times a key and a value must follow. Returns its memo number.
    pub fn dict(&mut self, pairs: u32) -> u32 {
        self.number(tag::DICT, u64::from(pairs));
        self.take_memo()
    }

    /// A named tuple; `len` values must follow: the module and the name of its class, and its items. Returns its memo
    /// number, to be used only once its items are written.
    pub fn named_tuple(&mut self, len: u32) -> u32 {
        self.number(tag::NAMED_TUPLE, u64::from(len));
        self.take_memo()
    }

    /// A leaf of the table. Returns its memo number.
    pub fn leaf(&mut self, index: u32) -> u32 {
        self.number(tag::LEAF, u64::from(index));
        self.take_memo()
    }

    /// The object with this memo number once more.
    pub fn memo(&mut self, number: u32) {
        self.number(tag::MEMO, u64::from(number));
    }

    /// A pickled object.
    pub fn pickle(&mut self, value: &[u8]) {
        self.blob(tag::PICKLE, value);
    }

    fn take_memo(&mut self) -> u32 {
        let number = self.memo;
        self.memo += 1;
        number
    }

    fn number(&mut self, tag: u8, value: u64) {
        self.bytes.push(tag);
        varint::put(&mut self.bytes, value);
    }

    fn blob(&mut self, tag: u8, value: &[u8]) {
        self.number(tag, value.len() as u64);
        self.bytes.extend_from_slice(value);
    }
}
