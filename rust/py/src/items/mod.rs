//! Python objects as items of a list in shared memory.
//!
//! | file | about |
//! |---|---|
//! | `shared_items.rs` | the class |
//! | `look.rs` | a look at an item, as a slot of the interpreter's |
//! | `named.rs` | the items with the keys of their dicts, which stand there once |
//! | `write.rs`, `read.rs` | an object to bytes, and back |
//!
//! An item is a tag and what belongs to it. Numbers, strings and bytes, and plain tuples, lists and dicts of
//! them, have a form of their own; any other item is pickled as a whole. Behind the items lies one more, the
//! strings that the items' dicts have as keys.

#[allow(unsafe_code, reason = "is called by the interpreter, without what PyO3 puts in between")]
pub(crate) mod look;
pub(crate) mod named;
pub(crate) mod read;
pub(crate) mod shared_items;
pub(crate) mod write;

/// The first byte of an item, or of a part of it.
pub(crate) mod tag {
    pub(crate) const PICKLE: u8 = 0;
    pub(crate) const NONE: u8 = 1;
    pub(crate) const FALSE: u8 = 2;
    pub(crate) const TRUE: u8 = 3;
    pub(crate) const SMALL: u8 = 4;
    pub(crate) const INT: u8 = 5;
    pub(crate) const FLOAT: u8 = 6;
    pub(crate) const STR: u8 = 7;
    pub(crate) const BYTES: u8 = 8;
    pub(crate) const TUPLE: u8 = 9;
    pub(crate) const LIST: u8 = 10;
    pub(crate) const DICT: u8 = 11;
    /// The number of a key: see [`Named::name`](super::named::Named::name).
    pub(crate) const NAME: u8 = 12;
}

/// Containers within containers, at most; what is deeper is pickled.
pub(crate) const DEPTH: u32 = 16;
