#![forbid(unsafe_code)]
//! The tree around the leaves, as a flat stream of tokens in prefix order.
//!
//! A token is one byte that says which it is, then its fields: lengths and indices as shortest LEB128, integers
//! zigzag first, floats as eight bytes, text and bytes after their length. A list of integers is one token, with as few
//! bytes for each as all of them need: text that was made numbers has thousands of them. One value makes a skeleton; a
//! container is followed by its items. Nothing is nested in the encoding, so how deep a reader recurses is its own
//! concern: the depth is bounded only by the bytes.
//!
//! **Memo.** A list, dict, tuple, named tuple, leaf or string takes the next number, from 0, when its token is met,
//! by the writer and the reader alike, so that no number is on the wire. [`Token::Memo`] stands for the object
//! with a number that is already taken. A list or dict may be meant from inside itself: readers make it before its
//! items. A tuple may not; a reader must refuse a number whose object is not made yet.
//!
//! **Classes.** The first two values of a named tuple are strings: the module and the name of its class. Of a class that
//! comes again they are memo numbers.

mod reader;
mod writer;

pub use reader::SkeletonReader;
pub use writer::SkeletonWriter;

/// One token of a skeleton.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum Token<'a> {
    /// `None`.
    None,
    /// `True`.
    True,
    /// `False`.
    False,
    /// An exact `int` of 64 bits.
    Int(i64),
    /// A list whose items are all exact `int`s of 64 bits, at least one: see [`integers`]. Memoised.
    Ints {
        /// Bytes of an item: 1, 2, 4 or 8, the fewest that all of them need.
        ///
        /// Not a `u8`: beside the tag, it would cut every copy of a token into parts that are read before they are whole.
        width: u32,
        /// The items.
        bytes: &'a [u8],
    },
    /// An exact `float`, bit for bit.
    Float(f64),
    /// An exact `str`, in UTF-8. Memoised. The reader does not look at its bytes: whoever makes a string of them does.
    Str(&'a [u8]),
    /// An exact `bytes` object, small enough to lie in the skeleton.
    Bytes(&'a [u8]),
    /// A list with this number of items, which follow. Memoised.
    List(u32),
    /// A tuple with this number of items, which follow. Memoised.
    Tuple(u32),
    /// A dict with this number of pairs, which follow: key, value, key, value. Memoised.
    Dict(u32),
    /// A named tuple. This number of values follow: two strings, the module and the name of its class, and its items.
    /// Memoised.
    NamedTuple(u32),
    /// The leaf with this index in the table. Memoised.
    Leaf(u32),
    /// The object with this memo number once more.
    Memo(u32),
    /// A pickled object.
    Pickle(&'a [u8]),
}

/// The items of [`Token::Ints`].
pub fn integers(width: u32, bytes: &[u8]) -> impl ExactSizeIterator<Item = i64> {
    bytes.chunks_exact(width.max(1) as usize).map(|item| match *item {
        [one] => i64::from(one as i8),
        [one, two] => i64::from(i16::from_le_bytes([one, two])),
        [one, two, three, four] => i64::from(i32::from_le_bytes([one, two, three, four])),
        _ => item.first_chunk().map_or(0, |item| i64::from_le_bytes(*item)),
    })
}

/// The fewest bytes for each of these integers.
fn width_of(values: impl Iterator<Item = i64>) -> u8 {
    // A sign, and the bits that differ from it.
    let bits = values.fold(0, |bits, value| bits | value ^ value >> 63);
    match bits {
        ..0x80 => 1,
        0x80..0x8000 => 2,
        0x8000..0x8000_0000 => 4,
        _ => 8,
    }
}

mod tag {
    pub(super) const NONE: u8 = 0;
    pub(super) const TRUE: u8 = 1;
    pub(super) const FALSE: u8 = 2;
    pub(super) const INT: u8 = 3;
    pub(super) const FLOAT: u8 = 4;
    pub(super) const STR: u8 = 5;
    pub(super) const BYTES: u8 = 6;
    pub(super) const LIST: u8 = 7;
    pub(super) const TUPLE: u8 = 8;
    pub(super) const DICT: u8 = 9;
    pub(super) const NAMED_TUPLE: u8 = 10;
    pub(super) const LEAF: u8 = 12;
    pub(super) const MEMO: u8 = 13;
    pub(super) const PICKLE: u8 = 14;
    pub(super) const INTS: u8 = 15;
}
