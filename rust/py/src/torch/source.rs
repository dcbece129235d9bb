//! Where a new tensor's bytes come from, and what keeps them.

use std::cell::RefCell;
use std::ptr::{NonNull, copy_nonoverlapping};

use pyo3::prelude::*;
use pyo3::types::PyBytes;
use ringloader_core::sync::Arc;
use ringloader_core::transport::delivery::{Backing, Delivery};
use ringloader_core::transport::port::Chunk;

use super::memory::{Copies, Memory, SHARED};
use crate::gil::exception;

/// What keeps the bytes of a tensor that does not own them.
pub(super) enum Keeper {
    /// A batch's slot, or its own segment.
    Batch { _backing: Arc<Backing> },
    /// Bytes of the slot that this worker is filling.
    Chunk { _bytes: Chunk },
    /// Memory in which headers and bytes of several tensors lie, this one's too.
    Shared { _memory: Arc<Memory> },
}

/// Where the bytes of a new tensor come from.
///
/// INVARIANT: `pointer` has `len` bytes while `place`, or the delivery that it was made of, keeps them.
pub(super) struct Source<'a> {
    pub(super) pointer: NonNull<u8>,
    pub(super) len: usize,
    pub(super) place: Place<'a>,
}

/// Where they stay.
pub(super) enum Place<'a> {
    /// Where they are.
    There(Keeper),
    /// Copied, with the header.
    Copied,
    /// Copied, with others.
    CopiedTo(&'a RefCell<Copies>),
}

impl Source<'_> {
    /// All bytes of a chunk, where they are.
    pub(super) fn of_chunk(chunk: Chunk) -> Self {
        let pointer = NonNull::new(chunk.address() as *mut u8).expect("an address inside a mapping");
        Self { pointer, len: chunk.len() as usize, place: Place::There(Keeper::Chunk { _bytes: chunk }) }
    }
}

/// Part of a delivered batch, checked to lie in it.
pub(crate) struct Span<'a> {
    delivery: &'a Delivery,
    pointer: NonNull<u8>,
    pub(super) len: u64,
}

impl<'a> Span<'a> {
    /// `len` bytes at `offset`.
    ///
    /// # Errors
    /// `RuntimeError` when they do not lie in the batch.
    pub(crate) fn new(delivery: &'a Delivery, offset: u64, len: u64) -> PyResult<Self> {
        Ok(Self { delivery, pointer: delivery.pointer(offset, len).map_err(exception)?, len })
    }

    /// Where its bytes begin, and how many there are.
    pub(crate) fn place(&self) -> (*const u8, usize) {
        (self.pointer.as_ptr(), self.len as usize)
    }

    /// The bytes of the span where they are, or to be copied.
    pub(super) fn source<'c>(&self, copies: Option<&'c RefCell<Copies>>) -> Source<'c> {
        let place = match copies {
            None => Place::There(Keeper::Batch { _backing: self.delivery.backing().clone() }),
            Some(copies) if self.len as usize <= SHARED / 2 => Place::CopiedTo(copies),
            Some(_) => Place::Copied,
        };
        Source { pointer: self.pointer, len: self.len as usize, place }
    }

    /// A copy of the span as `bytes`.
    ///
    /// # Errors
    /// `MemoryError`.
    pub(crate) fn bytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        PyBytes::new_with(py, self.len as usize, |into| {
            // SAFETY: `pointer` has `len` bytes while `delivery` lives; `into` is new memory of that length.
            unsafe { copy_nonoverlapping(self.pointer.as_ptr(), into.as_mut_ptr(), into.len()) };
            Ok(())
        })
    }
}
