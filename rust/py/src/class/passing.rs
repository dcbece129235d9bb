//! Indices that an epoch passes over because they were delivered before, as a Python class.

use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use ringloader_core::plan::{Delivered, Fingerprint};
use ringloader_core::transport::message::TaskKind;

use super::ledger::length;
use crate::gil::exception;
use crate::index::codec::encode_index;

/// Compares the indices that an epoch passes over with those that a state has seen.
#[pyclass(frozen, module = "ringloader._native")]
pub(crate) struct Passing {
    ranges: Delivered,
    place: u64,
    step: u64,
    /// True if a batch is one ordinal, as in `Ledger.read_whole`.
    whole: bool,
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
    /// An epoch that passes over `ranges`, whose fingerprint must be `expected`.
    #[new]
    #[pyo3(signature = (ranges, expected, message, place=0, step=1, whole=false))]
    fn new(
        ranges: Vec<(u64, u64)>,
        expected: Option<u64>,
        message: String,
        place: u64,
        step: u64,
        whole: bool,
    ) -> PyResult<Self> {
        let ranges = Delivered::from_ranges(ranges).map_err(exception)?;
        let found = Mutex::new(Found { count: 0, sum: Some(0) });
        Ok(Self { ranges, place, step, whole, expected, message, found })
    }

    /// Notes an index that is passed over: an int, a list of ints, or any other object.
    ///
    /// Raises `ValueError` if it was the last, and they are others than expected.
    pub(crate) fn note(&self, index: &Bound<'_, PyAny>) -> PyResult<()> {
        match encode_index(index)? {
            Some((TaskKind::Index | TaskKind::Indices, bytes)) => {
                let ints: Vec<i64> = bytes
                    .chunks_exact(8)
                    .map(|word| i64::from_le_bytes(word.try_into().unwrap_or_default()))
                    .collect();
                self.note_ints(&ints)
            }
            _ => self.note_objects(length(index)),
        }
    }

    /// Raises `ValueError` if the indices ended before all were passed over.
    pub(crate) fn finish(&self) -> PyResult<()> {
        let is_short = self.found().count < self.ranges.count();
        if self.expected.is_some() && is_short { Err(self.error()) } else { Ok(()) }
    }

    /// The fingerprint of what was passed over so far; `None` where an index is no int.
    #[getter]
    fn sum(&self) -> Option<u64> {
        self.found().sum
    }
}

impl Passing {
    fn found(&self) -> MutexGuard<'_, Found> {
        self.found.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn error(&self) -> PyErr {
        PyValueError::new_err(self.message.clone())
    }

    pub(crate) fn ranges(&self) -> Delivered {
        self.ranges.clone()
    }

    /// Notes ints that are passed over, as many as come next.
    pub(crate) fn note_ints(&self, mut ints: &[i64]) -> PyResult<()> {
        let mut found = self.found();
        if self.whole {
            let mut sum = Fingerprint::new(self.ordinal(found.count).unwrap_or_default() << 32, 1);
            sum.add(ints);
            found.sum = found.sum.map(|so_far| so_far.wrapping_add(sum.sum()));
            found.count += 1;
            return self.check(&found);
        }
        while let (Some(ordinal), false) = (self.ordinal(found.count), ints.is_empty()) {
            let left =
                self.ranges.ranges().find(|&(_, stop)| ordinal < stop).map_or(1, |(_, stop)| stop - ordinal);
            let (part, rest) = ints.split_at(ints.len().min(usize::try_from(left).unwrap_or(usize::MAX)));
            let place = self.place.wrapping_add(ordinal.wrapping_mul(self.step));
            let mut sum = Fingerprint::new(place, self.step);
            sum.add(part);
            found.sum = found.sum.map(|so_far| so_far.wrapping_add(sum.sum()));
            found.count += part.len() as u64;
            ints = rest;
        }
        self.check(&found)
    }

    /// Notes so many indices that are no ints.
    pub(crate) fn note_objects(&self, count: u64) -> PyResult<()> {
        let mut found = self.found();
        found.sum = None;
        found.count += if self.whole { 1 } else { count };
        self.check(&found)
    }

    fn check(&self, found: &Found) -> PyResult<()> {
        let is_done = found.count >= self.ranges.count();
        let is_other = self.expected.is_some_and(|expected| found.sum != Some(expected));
        if is_done && is_other { Err(self.error()) } else { Ok(()) }
    }

    /// The ordinal that is passed over after `count` others.
    fn ordinal(&self, count: u64) -> Option<u64> {
        let mut left = count;
        for (start, stop) in self.ranges.ranges() {
            if left < stop - start {
                return Some(start + left);
            }
            left -= stop - start;
        }
        None
    }
}
