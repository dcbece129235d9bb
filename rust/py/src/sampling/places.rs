//! The places of a task's samples in their epoch, on the way to the worker that seeds its generators by them.

use std::ops::Range;

use pyo3::exceptions::{PyException, PyRuntimeError};
use pyo3::prelude::*;
use pyo3::types::{PyInt, PyList};
use ringloader_core::number::usize_from;
use ringloader_core::plan::{Places as Core, TaskPlaces};
use ringloader_core::sync::Lock;
use ringloader_core::transport::message::{TaskIndex, TaskKind};

use crate::gil::exception;

/// Gives the tasks of one epoch their places, as they are read from the sampler.
#[pyclass(frozen, module = "ringloader._native")]
pub(crate) struct Places {
    core: Lock<Core>,
    /// True if an index is a batch's.
    batches: bool,
    /// True if batch `k` has the places from `k << 32` on, as in `Ledger.read_whole`.
    whole: bool,
}

#[pymethods]
impl Places {
    /// `key`: of the epoch. `first`, `step`: the place of the sampler's first sample, and how far the next one is.
    /// `passed`: the samples that the epoch passes over, as ranges of their numbers. `batches`: an index is a batch's.
    /// `whole`: the numbers are those of batches.
    #[new]
    #[pyo3(signature = (key, first, step, passed, batches, whole=false))]
    fn new(
        key: u64,
        first: u64,
        step: u64,
        passed: Vec<(u64, u64)>,
        batches: bool,
        whole: bool,
    ) -> PyResult<Self> {
        let core = Core::new(key, first, step, passed).map_err(exception)?;
        Ok(Self { core: Lock::new(core), batches, whole })
    }

    /// Returns an index that a loader without workers has read, with the places of its samples: a `Placed`.
    fn placed<'py>(&self, index: Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let (index, samples) = self.counted(index)?;
        placed(index, &self.take(samples))
    }
}

impl Places {
    /// Returns the places of the next task, which has `samples` samples.
    pub(crate) fn take(&self, samples: u64) -> TaskPlaces {
        let mut core = self.core.lock();
        if self.whole { core.take_batch(samples) } else { core.take(samples) }
    }

    /// Returns an index that Python has read, and the number of its samples. An index of a batch that has no length
    /// becomes a list.
    ///
    /// # Errors
    /// The error that its length, or its iteration, raises. What torch refuses is refused in the worker, as torch does.
    pub(crate) fn counted<'py>(&self, index: Bound<'py, PyAny>) -> PyResult<(Bound<'py, PyAny>, u64)> {
        if !self.batches {
            return Ok((index, 1));
        }
        let py = index.py();
        let refused = |error: PyErr| {
            if error.is_instance_of::<PyException>(py) { Ok(()) } else { Err(error) }
        };
        match index.len() {
            Ok(samples) => return Ok((index, samples as u64)),
            Err(error) => refused(error)?,
        }
        match index.try_iter() {
            Ok(items) => {
                let items = items.collect::<PyResult<Vec<_>>>()?;
                let samples = items.len() as u64;
                Ok((PyList::new(py, items)?.into_any(), samples))
            }
            Err(error) => refused(error).map(|()| (index, 1)),
        }
    }
}

/// An index, and where its samples stand in the epoch.
#[pyclass(frozen, get_all, module = "ringloader._native")]
pub(crate) struct Placed {
    /// The index of the task.
    index: Py<PyAny>,
    /// The key of the epoch.
    key: Py<PyAny>,
    /// The place of the first sample; of the next one, if the index asks for none.
    first: Py<PyAny>,
    /// The places of all samples, in the order of the index.
    places: Py<PyAny>,
}

/// Returns the bytes of a task for `index` with the places of its samples.
pub(crate) fn with_places((kind, index): TaskIndex, places: &TaskPlaces) -> TaskIndex {
    let mut bytes = (kind as u64).to_le_bytes().to_vec();
    places.to_bytes(&mut bytes);
    bytes.extend(index);
    (TaskKind::Seeded, bytes)
}

/// Takes the bytes of a task of [`with_places`] apart: its places, and the kind and bytes of its index.
///
/// # Errors
/// `RuntimeError` for other bytes.
pub(crate) fn split(bytes: &[u8]) -> PyResult<(TaskPlaces, TaskKind, &[u8])> {
    let split = || {
        let (kind, rest) = bytes.split_first_chunk()?;
        let kind =
            TaskKind::from_number(u64::from_le_bytes(*kind)).filter(|&kind| kind != TaskKind::Seeded)?;
        let (places, index) = TaskPlaces::from_bytes(rest)?;
        Some((places, kind, index))
    };
    split().ok_or_else(|| PyRuntimeError::new_err("a task without the places of its samples"))
}

/// Returns the number of a task's samples: 1 for an index without places.
pub(crate) fn samples_of((kind, bytes): &TaskIndex) -> u64 {
    match kind {
        TaskKind::Seeded => split(bytes).map_or(1, |(places, ..)| places.len()),
        _ => 1,
    }
}

/// Returns an index with its places, as a worker gets it.
///
/// # Errors
/// `MemoryError`.
pub(crate) fn placed<'py>(index: Bound<'py, PyAny>, places: &TaskPlaces) -> PyResult<Bound<'py, PyAny>> {
    let py = index.py();
    let int = |number: u64| PyInt::new(py, number).into_any().unbind();
    let all = PyList::new(py, &places.all)?.into_any();
    let (key, first) = (int(places.key), int(places.first));
    Ok(Bound::new(py, Placed { index: index.unbind(), key, first, places: all.unbind() })?.into_any())
}

/// Returns the index of some of a batch's samples, with their places. Of an index that gives another number of samples
/// than its length says, the last part has more, or later parts have none.
///
/// # Errors
/// The error that the index raises where it is iterated.
pub(crate) fn part<'py>(
    index: Bound<'py, PyAny>,
    places: &TaskPlaces,
    samples: Range<u64>,
) -> PyResult<Bound<'py, PyAny>> {
    let py = index.py();
    let items = index.try_iter()?.collect::<PyResult<Vec<_>>>()?;
    let is_last = samples.end == places.len();
    let end = if is_last { items.len() } else { items.len().min(usize_from(samples.end)) };
    let start = end.min(usize_from(samples.start));
    let of_part = PyList::new(py, &items[start..end])?;
    placed(of_part.into_any(), &places.part(samples))
}

/// The error for a task of which no part can be made.
pub(crate) fn without_places() -> PyErr {
    PyRuntimeError::new_err("a task without the places of its samples, or with fewer samples than places")
}
