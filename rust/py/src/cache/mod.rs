//! Samples that all processes share, as a Python class.
//!
//! `record.rs` makes a sample's record in private memory, and an object of a record.

#[allow(unsafe_code, reason = "vouches for the bytes of a record that were written")]
mod record;

use std::os::fd::{AsRawFd, RawFd};

use pyo3::exceptions::{PyIndexError, PyValueError};
use pyo3::prelude::*;
use ringloader_core::samples::{Bound as Limit, Samples, Stored};

use self::record::Record;
use crate::batch::encode::Spare;
use crate::gil::{exception, without_interpreter};
use crate::process::duplicate;

/// Samples of a dataset, each of which is kept once.
#[pyclass(frozen, module = "ringloader._native")]
pub(crate) struct SampleCache {
    samples: Samples,
    max_bytes: Option<u64>,
    ranks: u64,
    spare: Spare,
}

impl SampleCache {
    fn over(samples: Samples, max_bytes: Option<u64>, ranks: u64) -> Self {
        Self { samples, max_bytes, ranks, spare: Spare::default() }
    }

    fn index(&self, index: usize) -> PyResult<usize> {
        if index < self.samples.len() {
            return Ok(index);
        }
        Err(PyIndexError::new_err(format!("index {index} of {} samples", self.samples.len())))
    }
}

/// What [`SampleCache::attach`] needs in addition to the descriptors: length, bound, ranks, and the version of a file with
/// a name.
type Terms = (usize, Option<u64>, u64, Option<String>);

/// The result of [`SampleCache::stats`]: items, bytes, bound, hits, misses, and whether a sample had no room.
type Stats = (u64, u64, u64, u64, u64, bool);

#[pymethods]
impl SampleCache {
    /// Samples in memory. `ranks`: the processes of this machine that take equal parts of what it has left.
    #[staticmethod]
    fn in_memory(length: usize, max_bytes: Option<u64>, ranks: u64) -> PyResult<Self> {
        let samples = Samples::in_memory(length, Limit::new(max_bytes, ranks)).map_err(exception)?;
        Ok(Self::over(samples, max_bytes, ranks))
    }

    /// Samples in a file that was opened by its name; the descriptor stays the caller's. `ValueError`: the file is
    /// none of ours, or another dataset's.
    #[staticmethod]
    fn open(
        py: Python<'_>,
        fd: RawFd,
        length: usize,
        version: &str,
        max_bytes: Option<u64>,
    ) -> PyResult<Self> {
        let fd = duplicate(fd)?;
        let open = || Samples::open(fd, length, version, Limit::new(max_bytes, 1));
        Ok(Self::over(without_interpreter(py, open).map_err(exception)?, max_bytes, 1))
    }

    /// The samples of another process, by their descriptors, which stay the caller's, and its `terms`.
    #[staticmethod]
    fn attach(fds: Vec<RawFd>, terms: Terms) -> PyResult<Self> {
        let (length, max_bytes, ranks, version) = terms;
        let mut fds = fds.into_iter().map(duplicate).collect::<PyResult<Vec<_>>>()?.into_iter();
        let memory = fds.next().ok_or_else(|| PyValueError::new_err("no descriptor"))?;
        let named = fds.next().zip(version.as_deref());
        let samples =
            Samples::attach(memory, named, length, Limit::new(max_bytes, ranks)).map_err(exception)?;
        Ok(Self::over(samples, max_bytes, ranks))
    }

    /// A new object of the sample that is kept; `default` where none is.
    fn get<'py>(
        &self,
        py: Python<'py>,
        index: usize,
        default: Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        match Record::read(py, &self.samples, self.index(index)?)? {
            Some(record) => {
                self.samples.count_hit();
                record.object(py)
            }
            None => Ok(default),
        }
    }

    /// Keeps a sample that was made, if there is room. Returns a copy, of which nobody else knows, and true if it is too
    /// large to be kept. Raises what pickling or unpickling it does.
    fn put<'py>(&self, index: usize, sample: &Bound<'py, PyAny>) -> PyResult<(Bound<'py, PyAny>, bool)> {
        let py = sample.py();
        let index = self.index(index)?;
        self.samples.count_miss();
        let record = Record::of(sample, index, &self.samples, &self.spare)?;
        let stored = without_interpreter(py, || self.samples.store(index, record.bytes()));
        Ok((record.object(py)?, stored == Stored::TooLarge))
    }

    /// Forgets all samples. `OSError`: the disk does not take it.
    fn clear(&self, py: Python<'_>) -> PyResult<()> {
        without_interpreter(py, || self.samples.clear()).map_err(exception)
    }

    fn stats(&self, py: Python<'_>) -> Stats {
        let stats = without_interpreter(py, || self.samples.stats());
        (stats.items, stats.bytes, stats.max_bytes, stats.hits, stats.misses, stats.full)
    }

    /// The descriptors that `attach` needs, for as long as this lives: of the memory, and of a file with a name.
    fn filenos(&self) -> PyResult<Vec<RawFd>> {
        let (memory, named) = self.samples.fds().map_err(exception)?;
        Ok([Some(memory), named].into_iter().flatten().map(|fd| fd.as_raw_fd()).collect())
    }

    #[getter]
    fn terms(&self) -> Terms {
        (self.samples.len(), self.max_bytes, self.ranks, self.samples.version().map(str::to_owned))
    }

    fn __len__(&self) -> usize {
        self.samples.len()
    }
}
