//! The bytes of a new tensor: their source, and the owner that keeps them.

use std::cell::RefCell;
use std::ptr::{NonNull, copy_nonoverlapping};

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use ringloader_core::batch::Dtype;
use ringloader_core::number::usize_from;
use ringloader_core::os::Segment;
use ringloader_core::sync::Arc;
use ringloader_core::transport::port::Chunk;
use ringloader_core::transport::received::{Backing, Received};

use super::memory::{Copies, Memory, SHARED};
use super::names::Torch;
use crate::gil::{exception, run_copy};
use crate::strings;

/// The owner that keeps the bytes of a tensor that does not own them.
pub(super) enum Keeper {
    /// A batch's slot, or its own segment.
    Batch { _backing: Arc<Backing> },
    /// Private memory into which one sample was read.
    Sample { _memory: Arc<Memory> },
    /// Bytes of the slot that this worker is filling.
    Chunk { _bytes: Chunk },
    /// A window of a batch that all workers make, in the worker that sends the batch.
    Window { _segment: Arc<Segment> },
    /// Memory in which headers and bytes of several tensors lie, this one's too.
    Shared { _memory: Arc<Memory> },
}

/// The source of a new tensor's bytes.
///
/// INVARIANT: `pointer` has `len` bytes while `location`, or the delivery that it was made of, keeps them.
pub(super) struct Source<'a> {
    pub(super) pointer: NonNull<u8>,
    pub(super) len: usize,
    pub(super) location: Location<'a>,
}

/// The location of the tensor's bytes.
pub(super) enum Location<'a> {
    /// The bytes stay where they are, and the keeper keeps them.
    Original(Keeper),
    /// The bytes are copied, to the memory after the tensor's header.
    Copied,
    /// The bytes are copied, together with those of other tensors.
    CopiedWith(&'a RefCell<Copies>),
}

impl Source<'_> {
    /// All bytes of a chunk, where they are.
    pub(super) fn of_chunk(chunk: Chunk) -> Self {
        let pointer = NonNull::new(chunk.address() as *mut u8).expect("an address inside a mapping");
        Self {
            pointer,
            len: usize_from(chunk.len()),
            location: Location::Original(Keeper::Chunk { _bytes: chunk }),
        }
    }
}

/// The bytes that tensors are made of.
#[derive(Clone, Copy)]
pub(crate) enum Bytes<'a> {
    /// The bytes of a delivered batch.
    Batch(&'a Received),
    /// The bytes of one sample, in private memory that is not written to any more.
    Sample(&'a Arc<Memory>),
    /// A window of a batch that all workers make. Offsets count from the segment's start.
    Window(&'a Arc<Segment>),
}

impl<'a> From<&'a Received> for Bytes<'a> {
    fn from(delivery: &'a Received) -> Self {
        Self::Batch(delivery)
    }
}

impl Bytes<'_> {
    fn pointer(self, offset: u64, len: u64) -> PyResult<NonNull<u8>> {
        match self {
            Self::Batch(delivery) => delivery.pointer(offset, len).map_err(exception),
            Self::Sample(memory) => memory.pointer(offset, len),
            Self::Window(segment) => segment.pointer(offset, len).map_err(exception),
        }
    }

    fn keeper(self) -> Keeper {
        match self {
            Self::Batch(delivery) => Keeper::Batch { _backing: delivery.backing().clone() },
            Self::Sample(memory) => Keeper::Sample { _memory: memory.clone() },
            Self::Window(segment) => Keeper::Window { _segment: segment.clone() },
        }
    }
}

/// Part of a batch or sample, checked to lie in it.
pub(crate) struct Span<'a> {
    bytes: Bytes<'a>,
    pointer: NonNull<u8>,
    pub(super) len: u64,
}

impl<'a> Span<'a> {
    /// `len` bytes at `offset`.
    ///
    /// # Errors
    /// `RuntimeError` when they do not lie in the batch or sample.
    pub(crate) fn new(bytes: impl Into<Bytes<'a>>, offset: u64, len: u64) -> PyResult<Self> {
        let bytes = bytes.into();
        Ok(Self { bytes, pointer: bytes.pointer(offset, len)?, len })
    }

    /// Returns the address of the span's bytes, and their number.
    pub(crate) fn address_and_len(&self) -> (*const u8, usize) {
        (self.pointer.as_ptr(), usize_from(self.len))
    }

    /// The bytes of the span where they are, or to be copied.
    pub(super) fn source<'c>(&self, copies: Option<&'c RefCell<Copies>>) -> Source<'c> {
        let location = match copies {
            None => Location::Original(self.bytes.keeper()),
            Some(copies) if usize_from(self.len) <= SHARED / 2 => Location::CopiedWith(copies),
            Some(_) => Location::Copied,
        };
        Source { pointer: self.pointer, len: usize_from(self.len), location }
    }

    /// A copy of the span as `bytes`.
    ///
    /// # Errors
    /// `MemoryError`.
    pub(crate) fn bytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        PyBytes::new_with(py, usize_from(self.len), |into| {
            // SAFETY: `pointer` has `len` bytes while what `bytes` borrows lives; `into` is new memory of that length.
            unsafe { copy_nonoverlapping(self.pointer.as_ptr(), into.as_mut_ptr(), into.len()) };
            Ok(())
        })
    }
}

/// A new tensor in pinned memory of torch's, with spans copied to offsets in it, in bytes. Other bytes are undefined.
///
/// # Errors
/// The error that torch raises.
pub(crate) fn pinned_copy<'py>(
    py: Python<'py>,
    dtype: Dtype,
    shape: Vec<i64>,
    strides: Vec<i64>,
    parts: &[(Span<'_>, u64)],
) -> PyResult<Bound<'py, PyAny>> {
    let tensor = Torch::get(py)?.new_pinned(py, dtype, shape, strides)?;
    let into = Torch::get(py)?.new_address(&tensor)?;
    let len: u64 = tensor.getattr(strings::nbytes(py))?.extract()?;
    if parts.iter().any(|(span, at)| at.checked_add(span.len).is_none_or(|end| end > len)) {
        return Err(PyRuntimeError::new_err("torch made a tensor of another size"));
    }
    let copies: Vec<_> =
        parts.iter().map(|(span, at)| (span.pointer.as_ptr() as usize, *at, span.len)).collect();
    let copy = move || {
        for (from, at, len) in copies {
            // SAFETY: the span has `len` bytes while `parts` borrows what it lies in; the tensor is new, no one else
            // knows of it, and its bytes from `at` on are as many, by the check.
            unsafe {
                copy_nonoverlapping(from as *const u8, (into + usize_from(at)) as *mut u8, usize_from(len))
            };
        }
    };
    run_copy(py, usize_from(len), copy);
    Ok(tensor)
}
