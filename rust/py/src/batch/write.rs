//! A batch's bytes, copied to where the batch is written.

use std::ptr::{NonNull, copy_nonoverlapping};

use pyo3::prelude::*;
use ringloader_core::number::usize_from;
use ringloader_core::os::Segment;
use ringloader_core::transport::joint::{Claimed, JointMemory};
use ringloader_core::transport::port::Commit;

use crate::gil::{DETACH, exception, without_interpreter};
use crate::torch::memory::Memory;

/// One copy: from an object's memory to an offset of the batch's memory.
#[derive(Debug, Clone, Copy)]
pub(crate) struct CopyRange {
    pub(crate) from: usize,
    pub(crate) to: u64,
    pub(crate) len: u64,
    /// True if the bytes stay where they are while their object is held, whatever other threads do.
    pub(crate) keeps: bool,
}

/// The memory into which a batch is written.
pub(crate) enum Target<'a, 'p> {
    Slot(&'a Commit<'p>),
    Own(&'a Segment),
    /// Private memory, that of one sample.
    Private(&'a Memory),
    /// A part of a batch that all workers make, in bytes that were reserved for it.
    Part {
        tasks: &'a JointMemory,
        claimed: &'a Claimed,
        start: u64,
    },
}

impl Target<'_, '_> {
    fn pointer(&self, offset: u64, len: u64) -> PyResult<NonNull<u8>> {
        match self {
            Self::Slot(commit) => commit.pointer(offset, len).map_err(exception),
            Self::Own(segment) => segment.pointer(offset, len).map_err(exception),
            Self::Private(memory) => memory.pointer(offset, len),
            Self::Part { tasks, claimed, start } => {
                tasks.pointer(claimed, start.saturating_add(offset), len).map_err(exception)
            }
        }
    }

    /// Copies all `pieces` of objects in `held`, and `meta` to its offset. No foreign code has run since the pieces'
    /// addresses were taken.
    ///
    /// # Errors
    /// `RuntimeError` when a range does not lie in that memory.
    pub(crate) fn write(
        &self,
        py: Python<'_>,
        pieces: &[CopyRange],
        held: &[Py<PyAny>],
        meta_at: u64,
        meta: &[u8],
    ) -> PyResult<()> {
        // The pieces point into these objects: the caller still has them.
        let _ = held;
        let mut large = Vec::new();
        for piece in pieces {
            let to = self.pointer(piece.to, piece.len)?.as_ptr();
            if piece.keeps && piece.len >= DETACH as u64 {
                large.push((piece.from, to as usize, usize_from(piece.len)));
                continue;
            }
            // SAFETY: `from` has `len` bytes, by the description of an object that `held` keeps, and the interpreter
            // was not let go since; `to` was checked to lie in memory that this worker alone writes, and which no
            // source overlaps: it comes after all bytes of the slot that objects have.
            unsafe { copy_nonoverlapping(piece.from as *const u8, to, usize_from(piece.len)) };
        }
        let to = self.pointer(meta_at, meta.len() as u64)?;
        // SAFETY: as above; `meta` is private memory.
        unsafe { copy_nonoverlapping(meta.as_ptr(), to.as_ptr(), meta.len()) };
        if !large.is_empty() {
            // Last, and all at once: other threads may do anything meanwhile, and nothing is looked at after.
            without_interpreter(py, || {
                for (from, to, len) in large {
                    // SAFETY: as above. `held` also has the storage or `bytes` object that keeps the bytes.
                    unsafe { copy_nonoverlapping(from as *const u8, to as *mut u8, len) };
                }
            });
        }
        Ok(())
    }
}
