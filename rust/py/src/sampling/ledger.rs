//! The position of an epoch, as Python classes: the indices that were read, and the batches that the caller has got.
//!
//! [`Ledger`] counts samples, for any loader that has a state; [`WorkerProgress`] counts batches of each worker, for a dataset
//! that has a part in the state.

use std::sync::MutexGuard;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use ringloader_core::plan::{Ledger as CoreLedger, OrdinalSet, WorkerProgress as CoreProgress};
use ringloader_core::sync::Lock;
use ringloader_core::transport::message::TaskKind;

use super::codec::ints;
use super::fingerprint::{Values, values_of};
use super::stream::Read;
use crate::gil::exception;

/// The position of an epoch.
#[pyclass(frozen, get_all, module = "ringloader._native")]
pub(crate) struct Position {
    /// Batches that are passed.
    batches: u64,
    /// Ranges of ordinals that are passed: the sampler's first index has ordinal 0.
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
pub(crate) struct Ledger {
    core: Lock<CoreLedger>,
    /// True if a batch is one ordinal.
    whole: bool,
}

#[pymethods]
impl Ledger {
    /// An epoch of which `ranges` of ordinals are passed, in `batches` batches. Ordinal `k` is at `place + k * step`.
    #[new]
    #[pyo3(signature = (ranges, batches, passed, fingerprint, place=0, step=1, whole=false))]
    fn new(
        ranges: Vec<(u64, u64)>,
        batches: u64,
        passed: Option<u64>,
        fingerprint: Option<u64>,
        place: u64,
        step: u64,
        whole: bool,
    ) -> PyResult<Self> {
        let base = OrdinalSet::from_ranges(ranges).map_err(exception)?;
        Ok(Self { core: Lock::new(CoreLedger::new(base, place, step, passed, fingerprint, batches)), whole })
    }

    /// Begins a call for a batch: one that had raised is passed.
    pub(crate) fn begin_call(&self) {
        self.core().begin_call();
    }

    /// Notes an index that was read: an int, a list of ints, or any other object. Returns the number of its task.
    pub(crate) fn read(&self, index: &Bound<'_, PyAny>) -> u64 {
        let Values { samples, numbers, is_batch } = values_of(index);
        self.note(samples, numbers.map(Vec::into_iter), is_batch)
    }

    /// Notes that the caller gets the batch of a task that was read, and not got before, unless the call raises.
    pub(crate) fn got(&self, task: u64) {
        self.core().record_got(task);
    }

    /// Notes an index that is read and whose batch the caller gets, unless the call raises.
    fn take(&self, index: &Bound<'_, PyAny>) {
        let task = self.read(index);
        self.core().record_got(task);
    }

    /// Notes that the batch is left out, and that the call takes the next one.
    fn left_out(&self) {
        self.core().record_left_out();
    }

    /// Notes that a call raised. Calls before it have returned `returned` batches.
    fn raised(&self, returned: u64) {
        self.core().record_raised(returned);
    }

    /// Batches of this iterator before the first that is not passed.
    #[getter]
    fn tasks(&self) -> u64 {
        self.core().settled()
    }

    /// Returns the position of a caller to whom calls have returned `returned` batches; by default, all batches got.
    #[pyo3(signature = (returned=u64::MAX))]
    fn position(&self, returned: u64) -> Position {
        let found = self.core().position(returned);
        Position {
            batches: found.batches,
            ranges: found.ranges,
            passed: found.passed_sum,
            fingerprint: found.sum,
            tasks: found.tasks,
        }
    }
}

impl Ledger {
    fn core(&self) -> MutexGuard<'_, CoreLedger> {
        self.core.lock()
    }

    /// Notes that the task that was read last could not be sent.
    pub(crate) fn lose_last(&self) {
        self.core().lose_last();
    }

    /// As [`read`](Self::read), of an index that a native stream has given.
    pub(crate) fn read_task(&self, read: &Read) {
        let (kind, bytes) = &read.index;
        match (kind, &read.object) {
            (_, Some(Values { samples, numbers, is_batch })) => {
                self.note(*samples, numbers.as_ref().map(|numbers| numbers.iter().copied()), *is_batch);
            }
            (TaskKind::Index | TaskKind::Indices, None) => {
                self.note(read.samples, Some(ints(bytes)), *kind == TaskKind::Indices);
            }
            (_, None) => {
                self.note(read.samples, None::<std::iter::Empty<i64>>, true);
            }
        }
    }

    /// Notes a task of `samples` samples. `values` are the numbers of its indices, if these can be compared.
    fn note(&self, samples: u64, values: Option<impl Iterator<Item = i64>>, is_batch: bool) -> u64 {
        if self.whole && is_batch {
            self.core().read_whole(values)
        } else {
            self.core().read(samples, values)
        }
    }
}

/// Counts the batches of each worker that are passed.
#[pyclass(frozen, module = "ringloader._native")]
pub(crate) struct WorkerProgress(Lock<CoreProgress>);

#[pymethods]
impl WorkerProgress {
    /// An epoch of `workers` workers, whose first task goes to worker `first`.
    #[new]
    #[pyo3(signature = (workers, first=0))]
    fn new(workers: u32, first: u32) -> PyResult<Self> {
        if first >= workers {
            return Err(PyValueError::new_err(format!("worker {first} is none of {workers}")));
        }
        Ok(Self(Lock::new(CoreProgress::new(workers, first))))
    }

    /// Notes that a caller without workers asks for a batch, and gets it unless the call raises.
    fn take(&self) {
        let mut core = self.core();
        core.begin_call();
        core.record_got(0);
    }

    /// Notes that a call raised. Calls before it have returned `returned` batches. Returns the worker of the batch that
    /// the call would have returned, if there is one.
    fn raised(&self, returned: u64) -> Option<u32> {
        self.core().record_raised(returned)
    }

    /// Returns the number of batches of each worker that are passed, and the worker whose batch is next in turn, for a
    /// caller to whom calls have returned `returned` batches; by default, all batches got.
    #[pyo3(signature = (returned=u64::MAX))]
    fn position(&self, returned: u64) -> (Vec<u64>, u32) {
        self.core().position(returned)
    }

    /// Returns how many tasks a worker had answered when it was lost, and how many of its batches are passed.
    fn when_lost(&self, worker: u32) -> (u64, u64) {
        self.core().when_lost(worker)
    }
}

impl WorkerProgress {
    pub(crate) fn core(&self) -> MutexGuard<'_, CoreProgress> {
        self.0.lock()
    }
}
