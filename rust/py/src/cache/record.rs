//! A sample's record in private memory: made of an object, or read; and the object of it.
//!
//! A record has the parts of a batch: storages, each at a multiple of 64, then the table. The object that is made of a
//! record lies over its memory, so each record that is read or made has memory of its own.

use std::mem::MaybeUninit;

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use ringloader_core::batch::Meta;
use ringloader_core::number::usize_from;
use ringloader_core::samples::{Samples, record};
use ringloader_core::sync::Arc;

use crate::batch::decode;
use crate::batch::encode::{Encoded, Spare};
use crate::batch::write::Target;
use crate::gil::{DETACH, exception, no_memory_for, run_copy, without_interpreter};
use crate::torch::memory::Memory;
use crate::torch::source::Bytes;

/// The table of a record is compared with no slot's generation.
const GENERATION: u64 = 0;

/// A record.
///
/// INVARIANT: all bytes of `memory` were written, and nobody writes to it before the object of the record is made.
pub(super) struct Record {
    memory: Arc<Memory>,
    /// Start of the table.
    table: usize,
}

impl Record {
    /// The record of `sample` at an index, sealed.
    ///
    /// # Errors
    /// The error that pickling raises; `MemoryError`.
    pub(super) fn of(
        sample: &Bound<'_, PyAny>,
        index: usize,
        samples: &Samples,
        spare: &Spare,
    ) -> PyResult<Self> {
        let mut made = spare.with(Encoded::exact, |encoded| {
            encoded.encode(sample)?;
            Self::written(sample, encoded)
        })?;
        let table = made.table;
        let memory = Arc::get_mut(&mut made.memory).ok_or_else(|| PyRuntimeError::new_err("in use"))?;
        // SAFETY: all bytes were written (the invariant).
        let bytes = unsafe { memory.bytes_mut() };
        run_copy(sample.py(), bytes.len(), || samples.seal(bytes, index, table));
        Ok(made)
    }

    fn written(sample: &Bound<'_, PyAny>, encoded: &mut Encoded) -> PyResult<Self> {
        let py = sample.py();
        let found = encoded.settle(sample, "sample was", |encoded| {
            encoded.form(py, 0..0)?;
            let table = usize_from(encoded.lay_out(Some(record::HEADER as u64)));
            // Before the last look at the addresses: nothing of Python's may be made after it.
            new_memory(table + encoded.meta.encoded_len()).map(|memory| Some((memory, table)))
        })?;
        let (mut memory, table) = found.ok_or_else(|| PyRuntimeError::new_err("no memory"))?;
        let Encoded { meta, drafts, groups, .. } = encoded;
        let uninit = memory.uninit();
        let len = uninit.len();
        uninit[..record::HEADER].fill(MaybeUninit::new(0));
        for piece in groups.copies() {
            // The gap after a storage.
            let end = usize_from(piece.to + piece.len);
            uninit[end..end.next_multiple_of(64).min(len)].fill(MaybeUninit::new(0));
        }
        let block = meta.finish(GENERATION);
        Target::Private(&memory).write(py, groups.copies(), &drafts.held, table as u64, block)?;
        Ok(Self { memory: Arc::new(memory), table })
    }

    /// The record that is kept of an index; `None` if none is.
    ///
    /// # Errors
    /// `MemoryError`.
    pub(super) fn read(py: Python<'_>, samples: &Samples, index: usize) -> PyResult<Option<Self>> {
        let Some(found) = samples.find(index) else { return Ok(None) };
        let mut memory = new_memory(usize_from(found.len()))?;
        let mut read = || samples.read(&found, memory.uninit()).map(|(_, table)| table);
        // A disk may take its time, and long bytes do.
        let table = if samples.is_on_disk() || found.len() >= DETACH as u64 {
            without_interpreter(py, read)
        } else {
            read()
        };
        Ok(table.map(|table| Self { memory: Arc::new(memory), table }))
    }

    pub(super) fn bytes(&self) -> &[u8] {
        // SAFETY: the invariant.
        unsafe { self.memory.bytes() }
    }

    /// A new object. Its large tensors and arrays lie in the record's memory, so this is called once.
    ///
    /// # Errors
    /// `RuntimeError` for what is no record; the error that unpickling raises.
    pub(super) fn object<'py>(self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let (_, table) = self.bytes().split_at(self.table);
        let meta = Meta::parse(table, GENERATION, self.table as u64).map_err(exception)?;
        decode::read(py, Bytes::Sample(&self.memory), &meta, true)
    }
}

fn new_memory(len: usize) -> PyResult<Memory> {
    Memory::new(len).ok_or_else(|| no_memory_for(len as u64))
}
