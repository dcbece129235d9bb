//! A batch that all workers have made, as it is sent.

use std::ops::Range;
use std::os::fd::OwnedFd;

use pyo3::prelude::*;
use ringloader_core::os::Segment;
use ringloader_core::os::memory::MemoryProbe;
use ringloader_core::transport::joint::{Claimed as Core, JointMemory};

use crate::batch::encode::Encoded;
use crate::batch::write::Target;
use crate::gil::exception;

/// The window of a batch whose rows are all written.
pub(super) struct JointBatch<'a> {
    pub(super) tasks: &'a JointMemory,
    pub(super) claimed: &'a Core,
    /// Where the rows end, from the start of the window.
    pub(super) end: u64,
    pub(super) probe: &'a MemoryProbe,
}

impl<'a> JointBatch<'a> {
    pub(super) fn window(&self) -> u32 {
        self.claimed.plan.window
    }

    /// The addresses of the window, up to the end of the rows.
    ///
    /// # Errors
    /// `RuntimeError` for a window that there is not.
    pub(super) fn filled(&self) -> PyResult<Range<usize>> {
        let start = self.tasks.pointer(self.claimed, 0, self.end).map_err(exception)?.as_ptr() as usize;
        Ok(start..start + self.end as usize)
    }

    /// Finds room for what is no row, for the table, and for `extra` bytes after it; `None`: there is none.
    ///
    /// # Errors
    /// `MemoryError` when the machine or the control group has not enough left.
    pub(super) fn reserve(&self, encoded: &mut Encoded, extra: u64) -> PyResult<Option<Reserved>> {
        let table = encoded.meta.encoded_len() as u64;
        let len = encoded.lay_out(Some(0)) + table + extra;
        let start = self.tasks.after_rows(self.claimed, self.end, len, self.probe).map_err(exception)?;
        let Some(start) = start else { return Ok(None) };
        // INVARIANT: as long as at 0, since `start` is a multiple of every alignment.
        let meta_at = encoded.lay_out(Some(start));
        let meta_end = meta_at + table;
        Ok(Some(Reserved { own: None, meta_at, meta_end, end: meta_end + extra }))
    }

    pub(super) fn target(&self) -> Target<'a, 'a> {
        Target::Part { tasks: self.tasks, claimed: self.claimed, start: 0 }
    }
}

/// The memory that is reserved for a batch: in the slot, in a window, or in a segment of its own.
pub(super) struct Reserved {
    pub(super) own: Option<(Segment, OwnedFd)>,
    /// The start of the batch's table.
    pub(super) meta_at: u64,
    pub(super) meta_end: u64,
    /// The end of all that travels.
    pub(super) end: u64,
}
