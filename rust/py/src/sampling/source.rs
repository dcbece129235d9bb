//! The source of a scheduler's indices in one epoch, as a Python class.

use std::sync::{MutexGuard, OnceLock};

use pyo3::exceptions::PyStopIteration;
use pyo3::prelude::*;
use pyo3::{PyTraverseError, PyVisit};
use ringloader_core::plan::{TaskPlaces, WorkerProgress as CoreProgress};
use ringloader_core::transport::message::TaskIndex;

use super::codec::encode_index_or_pickle;
use super::ledger::{Ledger, WorkerProgress};
use super::places::{Places, with_places};
use super::stream::Stream;
use crate::python::{Callbacks, Draws};

/// A native stream over what torch draws, or Python's `next`.
#[pyclass(frozen, module = "ringloader._native")]
pub(crate) struct IndexSource {
    /// `None`: Python iterates the sampler.
    draws: Option<Py<PyAny>>,
    /// Made at the first request, as torch's generators begin their bodies then; `None` inside: Python iterates the
    /// sampler after all.
    stream: OnceLock<Option<Py<Stream>>>,
    /// Notes what is read and what the caller gets, for a loader that has a state.
    ledger: Option<Py<Ledger>>,
    /// For workers that seed their generators by places: gives them to tasks.
    places: Option<Py<Places>>,
    /// Counts the batches of each worker, for a loader whose dataset has a part in the state.
    progress: OnceLock<Py<WorkerProgress>>,
}

#[pymethods]
impl IndexSource {
    /// One epoch of a sampler of torch's own, read natively. `places`: tasks get the places of their samples.
    #[staticmethod]
    #[pyo3(signature = (draws, ledger=None, places=None))]
    fn native(draws: Py<PyAny>, ledger: Option<Py<Ledger>>, places: Option<Py<Places>>) -> Self {
        Self { draws: Some(draws), stream: OnceLock::new(), ledger, places, progress: OnceLock::new() }
    }

    /// Any other, read by torch's `_next_index`.
    #[staticmethod]
    #[pyo3(signature = (ledger=None, places=None))]
    fn python(ledger: Option<Py<Ledger>>, places: Option<Py<Places>>) -> Self {
        Self { draws: None, stream: OnceLock::new(), ledger, places, progress: OnceLock::new() }
    }

    /// Counts the batches of each worker in `progress` too. The first task goes to the worker that `progress` names.
    fn count(&self, progress: Py<WorkerProgress>) {
        let _ = self.progress.set(progress);
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.draws)?;
        visit.call(self.stream.get().and_then(Option::as_ref))?;
        visit.call(&self.places)
    }
}

impl IndexSource {
    fn progress(&self) -> Option<MutexGuard<'_, CoreProgress>> {
        self.progress.get().map(|progress| progress.get().core())
    }

    /// Returns true if a native stream exists, and has been read from.
    pub(crate) fn is_native(&self) -> bool {
        matches!(self.stream.get(), Some(Some(_)))
    }

    /// Begins a call for a batch.
    pub(crate) fn begin_call(&self) {
        if let Some(ledger) = &self.ledger {
            ledger.get().begin_call();
        }
        if let Some(mut progress) = self.progress() {
            progress.begin_call();
        }
    }

    /// Notes that the task that was read last could not be sent.
    pub(crate) fn lose_last(&self) {
        if let Some(ledger) = &self.ledger {
            ledger.get().lose_last();
        }
    }

    /// Notes that the caller gets the batch of a task, which a worker has made.
    pub(crate) fn record_got(&self, task: u64, worker: u32) {
        if let Some(ledger) = &self.ledger {
            ledger.get().got(task);
        }
        if let Some(mut progress) = self.progress() {
            progress.record_got(worker);
        }
    }

    /// Notes that the task that was read last went to a worker.
    pub(crate) fn record_sent(&self, worker: u32) {
        if let Some(mut progress) = self.progress() {
            progress.record_sent(worker);
        }
    }

    /// Notes that a worker was lost. `awaited` counts the tasks that it has not answered.
    pub(crate) fn record_lost(&self, worker: u32, awaited: impl FnOnce() -> u64) {
        if let Some(mut progress) = self.progress() {
            progress.record_lost(worker, awaited());
        }
    }

    /// Returns the worker that gets the first task.
    pub(crate) fn first_worker(&self) -> u32 {
        self.progress().map_or(0, |progress| progress.first())
    }

    /// The next index, as a task's bytes, which may be unpickled more than once if `again`; `None` at the sampler's
    /// end.
    ///
    /// # Errors
    /// The error that the sampler raises, or that torch raises for it.
    pub(crate) fn read(&self, callbacks: &Callbacks<'_, '_>, again: bool) -> PyResult<Option<TaskIndex>> {
        let read =
            self.read_as(callbacks, again, |index| index, |index| encode_index_or_pickle(index, again))?;
        Ok(read.map(|(index, places)| match places {
            None => index,
            Some(places) => with_places(index, &places),
        }))
    }

    /// As [`read`](Self::read): `natively` makes an index of what a native stream has, and `by_python` of an object.
    /// The places of the samples, if there are any, come with it.
    ///
    /// # Errors
    /// The error that the sampler raises, or that torch raises for it, or that `by_python` returns.
    pub(crate) fn read_as<I>(
        &self,
        callbacks: &Callbacks<'_, '_>,
        again: bool,
        natively: impl FnOnce(TaskIndex) -> I,
        by_python: impl FnOnce(&Bound<'_, PyAny>) -> PyResult<I>,
    ) -> PyResult<Option<(I, Option<TaskPlaces>)>> {
        let py = callbacks.py();
        if let Some(draws) = &self.draws {
            let draws = Draws(draws.bind(py));
            if self.stream.get().is_none() {
                let made = draws.open()?;
                // None where torch refuses the sampler too, in words of its own.
                let made = if made.is_none() { None } else { Some(made.cast_into::<Stream>()?.unbind()) };
                let _ = self.stream.set(made);
            }
            if let Some(Some(stream)) = self.stream.get() {
                let read = stream.get().read(&draws, again, self.ledger.is_some())?;
                if let (Some(ledger), Some(read)) = (&self.ledger, &read) {
                    ledger.get().read_task(read);
                }
                return Ok(read.map(|read| (natively(read.index), self.take_places(read.samples))));
            }
        }
        match callbacks.next_index() {
            Ok(index) => {
                let (index, samples) = match &self.places {
                    None => (index, 0),
                    Some(places) => places.get().counted(index)?,
                };
                // First: an index that cannot be sent is lost, and keeps its places.
                let places = self.take_places(samples);
                let found = by_python(&index)?;
                if let Some(ledger) = &self.ledger {
                    ledger.get().read(&index);
                }
                Ok(Some((found, places)))
            }
            Err(error) if error.is_instance_of::<PyStopIteration>(py) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Returns the places of the next task that is sent, which has `samples` samples.
    fn take_places(&self, samples: u64) -> Option<TaskPlaces> {
        self.places.as_ref().map(|places| places.get().take(samples))
    }
}
