//! A worker's claim of a batch that all workers make, as a Python class.

use pyo3::prelude::*;
use ringloader_core::transport::joint::Claimed as Core;
use ringloader_core::transport::message::{TaskIndex, TaskKind};

use crate::sampling::codec::decode_index;
use crate::sampling::places::{self, part, placed, without_places};

/// A worker's claim of a batch: a run of samples, or the collation.
#[pyclass(frozen, module = "ringloader._native")]
pub(crate) struct Claimed {
    pub(super) core: Core,
    pub(super) index: TaskIndex,
    /// The number of the task.
    #[pyo3(get)]
    pub(super) seq: u64,
    /// True for a batch of an epoch that was given up: nobody wants it.
    #[pyo3(get)]
    pub(super) is_stale: bool,
}

impl Claimed {
    pub(crate) fn core(&self) -> &Core {
        &self.core
    }
}

#[pymethods]
impl Claimed {
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
        (samples.end - samples.start) as usize
    }

    /// The index of the whole batch, with the places of its samples, as a task has it.
    fn whole_index<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let (kind, bytes) = &self.index;
        match kind {
            TaskKind::Seeded => {
                let (places, kind, bytes) = places::split(bytes)?;
                placed(decode_index(py, kind, bytes)?, &places)
            }
            kind => decode_index(py, *kind, bytes),
        }
    }

    /// The index of the run, as that of a batch.
    fn run_index<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        if self.core.is_whole() {
            return self.whole_index(py);
        }
        let (kind, bytes) = &self.index;
        let TaskKind::Seeded = kind else { return Err(without_places()) };
        let (places, kind, bytes) = places::split(bytes)?;
        let samples = self.core.samples();
        if kind == TaskKind::Indices {
            let of_run = bytes.get(8 * samples.start as usize..8 * samples.end as usize);
            let index = decode_index(py, kind, of_run.ok_or_else(without_places)?)?;
            return placed(index, &places.part(samples));
        }
        part(decode_index(py, kind, bytes)?, &places, samples)
    }

    /// The samples of the batch in place of its index, with their places.
    fn with_samples<'py>(&self, samples: Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let (TaskKind::Seeded, bytes) = &self.index else { return Err(without_places()) };
        placed(samples, &places::split(bytes)?.0)
    }
}
