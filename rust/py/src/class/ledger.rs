//! The indices of an epoch that were read, and the batches that the caller has got, as a Python class.

use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::prelude::*;
use ringloader_core::plan::{Delivered, Ledger as Core};
use ringloader_core::transport::message::TaskKind;

use crate::gil::exception;
use crate::index::codec::encode_index;

/// The position of an epoch.
#[pyclass(frozen, get_all, module = "ringloader._native")]
pub(crate) struct Position {
    /// Batches that are passed.
    batches: u64,
    /// Ranges of indices that are passed, in the order in which the sampler gives them.
    ranges: Vec<(u64, u64)>,
    /// The fingerprint of the indices that are passed; `None` where one is no int.
    passed: Option<u64>,
    /// The fingerprint of the indices whose batches the caller has got.
    fingerprint: Option<u64>,
    /// Batches of this iterator before the first that is not passed.
    tasks: u64,
}

/// Notes which indices of an epoch were read, and which batches the caller has got.
#[pyclass(frozen, module = "ringloader._native")]
pub(crate) struct Ledger(Mutex<Core>);

#[pymethods]
impl Ledger {
    /// An epoch of which `ranges` of indices in `batches` batches are passed, with the fingerprint `passed`. The index
    /// with number `k` is at `place + k * step`.
    #[new]
    #[pyo3(signature = (ranges=Vec::new(), batches=0, passed=Some(0), place=0, step=1))]
    fn new(
        ranges: Vec<(u64, u64)>,
        batches: u64,
        passed: Option<u64>,
        place: u64,
        step: u64,
    ) -> PyResult<Self> {
        let passed_ranges = Delivered::from_ranges(ranges).map_err(exception)?;
        Ok(Self(Mutex::new(Core::new(passed_ranges, batches, passed, place, step))))
    }

    /// Notes an index that was read: an int, a list of ints, or any other object.
    pub(crate) fn read(&self, index: &Bound<'_, PyAny>) -> PyResult<()> {
        match encode_index(index)? {
            Some((kind, bytes)) => self.note_read(kind, &bytes),
            None => self.note_read(TaskKind::PickledIndex, &[]),
        }
        Ok(())
    }

    /// Begins a call for a batch: one that had raised is passed.
    pub(crate) fn begin_call(&self) {
        self.core().begin_call();
    }

    /// Notes that the caller gets the batch of a task of this iterator.
    pub(crate) fn got(&self, task: u64) {
        self.core().got(task);
    }

    /// Notes that the call raised: the caller has not got its last batch.
    fn raised(&self) {
        self.core().raised();
    }

    /// Returns the position.
    fn position(&self) -> Position {
        let found = self.core().position();
        Position {
            batches: found.batches,
            ranges: found.ranges,
            passed: found.passed,
            fingerprint: found.fingerprint,
            tasks: found.tasks,
        }
    }
}

impl Ledger {
    fn core(&self) -> MutexGuard<'_, Core> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes an index that was read, by the bytes of its task.
    pub(crate) fn note_read(&self, kind: TaskKind, bytes: &[u8]) {
        let ints = bytes.chunks_exact(8).map(|word| i64::from_le_bytes(word.try_into().unwrap_or_default()));
        match kind {
            TaskKind::Index | TaskKind::Indices => self.core().read(ints.len() as u64, Some(ints)),
            _ => self.core().read(1, None),
        }
    }
}
