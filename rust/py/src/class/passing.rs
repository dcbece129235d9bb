//! Indices that an epoch passes over because they were delivered before, as a Python class.

use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use ringloader_core::plan::{Delivered, fingerprint_of};

use crate::gil::exception;
use crate::index::values::values_of;

/// Compares the indices that an epoch passes over with those that a state has seen.
#[pyclass(frozen, module = "ringloader._native")]
pub(crate) struct Passing {
    ranges: Delivered,
    /// The sum to find; `None`: nothing is compared.
    expected: Option<u64>,
    /// The text of the error where the indices are others.
    message: String,
    found: Mutex<Found>,
}

struct Found {
    /// Ordinals that were passed.
    count: u64,
    /// Their fingerprint; `None` where an index is no int.
    sum: Option<u64>,
}

#[pymethods]
impl Passing {
    /// An epoch that passes over `ranges` of ordinals, whose fingerprint must be `expected`.
    #[new]
    #[pyo3(signature = (ranges, expected=None, message=""))]
    fn new(ranges: Vec<(u64, u64)>, expected: Option<u64>, message: &str) -> PyResult<Self> {
        let ranges = Delivered::from_ranges(ranges).map_err(exception)?;
        let found = Mutex::new(Found { count: 0, sum: Some(0) });
        Ok(Self { ranges, expected, message: message.into(), found })
    }

    /// Notes that so many ordinals are passed over. `index` has their indices: a list, the first of them at
    /// `place`, or one object.
    ///
    /// Raises `ValueError` if they were the last, and the indices are others than expected.
    pub(crate) fn note(&self, index: &Bound<'_, PyAny>, place: u64, ordinals: u64) -> PyResult<()> {
        self.add(ordinals, values_of(index).numbers.map(|numbers| fingerprint_of(place, 1, numbers)))
    }

    /// Raises `ValueError` if the indices ended before all were passed over, and are others than expected. A position
    /// that other code has edited may lie behind the end.
    pub(crate) fn finish(&self) -> PyResult<()> {
        let found = self.found();
        if found.count < self.ranges.count() { self.compare(&found) } else { Ok(()) }
    }

    /// The fingerprint of what was passed over so far; `None` where an index is no int.
    #[getter]
    fn sum(&self) -> Option<u64> {
        self.found().sum
    }
}

impl Passing {
    pub(crate) fn ranges(&self) -> &Delivered {
        &self.ranges
    }

    /// Notes that so many ordinals are passed over, with the fingerprint of their indices.
    pub(crate) fn add(&self, ordinals: u64, sum: Option<u64>) -> PyResult<()> {
        let mut found = self.found();
        found.count += ordinals;
        found.sum = found.sum.zip(sum).map(|(one, other)| one.wrapping_add(other));
        if found.count >= self.ranges.count() { self.compare(&found) } else { Ok(()) }
    }

    fn compare(&self, found: &Found) -> PyResult<()> {
        let is_other = self.expected.is_some_and(|expected| found.sum != Some(expected));
        if is_other { Err(PyValueError::new_err(self.message.clone())) } else { Ok(()) }
    }

    fn found(&self) -> MutexGuard<'_, Found> {
        self.found.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
