//! A worker's claim of a task that all workers share, as a Python class, with the index that the task asks for.

use std::ops::Range;

use pyo3::prelude::*;
use ringloader_core::number::usize_from;
use ringloader_core::plan::TaskPlaces;
use ringloader_core::sync::Arc;
use ringloader_core::transport::joint::Claimed as CoreClaimed;
use ringloader_core::transport::message::{TaskIndex, TaskKind};
use ringloader_core::transport::queues::{Queues, TaskRun};
use ringloader_core::transport::run_times::TimedRun;

use crate::gil::exception;
use crate::sampling::codec::decode_index;
use crate::sampling::places::{self, part, placed, without_places};
use crate::timing::{BatchTimes, ThreadClocks};

/// The queues between threads.
pub(crate) type Core = Queues<Index, Made>;

/// The object that a thread has made.
pub(crate) struct Made {
    pub(crate) object: Py<PyAny>,
    pub(crate) times: BatchTimes,
}

impl Made {
    pub(super) fn plain(object: Py<PyAny>) -> Self {
        Self { object, times: BatchTimes::default() }
    }
}

/// The index that a task asks for.
pub(crate) enum Index {
    /// An index of plain numbers, or of `None`.
    Plain(TaskIndex),
    /// Any other index, as the sampler's own object; or a whole message of torch's protocol.
    Object(Py<PyAny>),
    /// One of these with the places of its samples.
    Placed(Box<Index>, TaskPlaces),
}

impl Index {
    /// The index of a task as it is sent.
    ///
    /// # Errors
    /// `RuntimeError` for places that cannot be read.
    pub(super) fn of_task((kind, bytes): TaskIndex) -> PyResult<Self> {
        if kind != TaskKind::Seeded {
            return Ok(Self::Plain((kind, bytes)));
        }
        let (places, kind, bytes) = places::split(&bytes)?;
        Ok(Self::Placed(Box::new(Self::Plain((kind, bytes.to_vec()))), places))
    }

    /// Returns the number of the samples; 1 where it is not known.
    pub(super) fn samples(&self) -> u64 {
        if let Self::Placed(_, places) = self { places.len() } else { 1 }
    }

    /// The index of `samples` of a batch, with their places.
    ///
    /// # Errors
    /// The error that the index raises where it is iterated.
    pub(super) fn part<'py>(&self, py: Python<'py>, samples: Range<u64>) -> PyResult<Bound<'py, PyAny>> {
        let Self::Placed(index, places) = self else { return Err(without_places()) };
        if let Self::Plain((TaskKind::Indices, bytes)) = &**index {
            let of_part = bytes.get(8 * usize_from(samples.start)..8 * usize_from(samples.end));
            let index = decode_index(py, TaskKind::Indices, of_part.ok_or_else(without_places)?)?;
            return placed(index, &places.part(samples));
        }
        part(index.plain(py)?, places, samples)
    }

    /// `samples` of the batch in place of its index, with its places.
    pub(super) fn with_samples<'py>(&self, samples: Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let Self::Placed(_, places) = self else { return Err(without_places()) };
        placed(samples, places)
    }

    /// Returns the index as the worker gets it.
    pub(super) fn decode<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        match self {
            Self::Placed(index, places) => placed(index.plain(py)?, places),
            _ => self.plain(py),
        }
    }

    /// Returns the index alone.
    pub(crate) fn plain<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        match self {
            Self::Plain((kind, bytes)) => decode_index(py, *kind, bytes),
            Self::Object(object) => Ok(object.bind(py).clone()),
            Self::Placed(index, _) => index.plain(py),
        }
    }

    pub(crate) fn clone_ref(&self, py: Python<'_>) -> Self {
        match self {
            Self::Plain(plain) => Self::Plain(plain.clone()),
            Self::Object(object) => Self::Object(object.clone_ref(py)),
            Self::Placed(index, places) => Self::Placed(Box::new(index.clone_ref(py)), places.clone()),
        }
    }
}

/// A worker's claim of a batch: a run of samples, or the collation.
#[pyclass(frozen, module = "ringloader._native")]
pub(crate) struct Claimed {
    pub(crate) core: CoreClaimed,
    index: Arc<Index>,
    /// True for a batch of an epoch that was given up: nobody wants it.
    #[pyo3(get)]
    is_stale: bool,
}

impl Claimed {
    pub(super) fn new(TaskRun { claimed: core, index, is_stale }: TaskRun<Index>) -> Self {
        Self { core, index, is_stale }
    }

    /// Notes the seconds that the samples of the run took.
    #[expect(clippy::cast_possible_truncation, reason = "no run takes so many nanoseconds")]
    pub(super) fn note_time(&self, queues: &Core, seconds: f64) -> PyResult<()> {
        let samples = self.__len__().max(1) as f64;
        queues.note_time((seconds * 1e9 / samples) as u64).map_err(exception)
    }

    /// Gives the run's samples to the thread that will collate. Returns true if the worker answers for the batch.
    pub(super) fn finish(
        &self,
        queues: &Core,
        times: &ThreadClocks,
        worker: u32,
        samples: Option<Py<PyAny>>,
    ) -> PyResult<bool> {
        // A whole batch has moments of its own.
        let clock = times.of(worker).filter(|_| !self.core.is_whole());
        let made = samples.map(|samples| {
            let stamps = clock.map(|clock| Box::new((worker, clock.run_sent())));
            Made { object: samples, times: BatchTimes { stamps, runs: Vec::new() } }
        });
        let is_noted = made.is_some();
        let is_last = queues.finish(worker, &self.core, made).map_err(exception)?;
        if let Some(clock) = clock.filter(|_| is_last && is_noted) {
            clock.note_last();
        }
        Ok(is_last)
    }

    /// Takes the samples of all runs of the batch, run by run; `None` if some are not there.
    pub(super) fn parts(
        &self,
        queues: &Core,
        times: &ThreadClocks,
        worker: u32,
    ) -> PyResult<Option<Vec<Py<PyAny>>>> {
        let Some(made) = queues.take_parts(&self.core).map_err(exception)? else { return Ok(None) };
        let (mut parts, mut runs) = (Vec::new(), Vec::new());
        for (number, Made { object, times }) in (0..).zip(made) {
            parts.push(object);
            runs.extend(times.stamps.map(|made| TimedRun {
                worker: made.0,
                stamps: made.1,
                samples: self.core.samples_of(number),
            }));
        }
        if !runs.is_empty() {
            times.keep_runs(worker, runs);
        }
        Ok(Some(parts))
    }
}

#[pymethods]
impl Claimed {
    /// The number of the task.
    #[getter]
    fn seq(&self) -> u64 {
        self.core.plan.seq
    }

    /// True if the run is the whole batch.
    #[getter]
    pub(super) fn is_whole(&self) -> bool {
        self.core.is_whole()
    }

    /// True for the collation of a batch whose samples others have made.
    #[getter]
    fn is_collation(&self) -> bool {
        self.core.claim.run.is_none()
    }

    /// The number of the run's first sample in the batch.
    #[getter]
    fn first(&self) -> u64 {
        self.core.samples().start
    }

    /// The number of the run's samples.
    pub(super) fn __len__(&self) -> usize {
        let samples = self.core.samples();
        usize_from(samples.end - samples.start)
    }

    /// The index of the whole batch, with the places of its samples, as a task has it.
    fn whole_index<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.index.decode(py)
    }

    /// The index of the run, as that of a batch.
    fn run_index<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        if self.is_whole() { self.index.decode(py) } else { self.index.part(py, self.core.samples()) }
    }

    /// The samples of the batch in place of its index, with their places.
    fn with_samples<'py>(&self, samples: Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        self.index.with_samples(samples)
    }
}
