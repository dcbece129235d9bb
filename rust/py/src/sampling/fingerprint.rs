//! Compares the indices of two runs of an epoch: by their values, as numbers, and by a fingerprint of many.
//!
//! INVARIANT: equal values are equal numbers, in any process.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyList};
use ringloader_core::plan::{OrdinalSet, fingerprint_of};
use ringloader_core::sync::Lock;

use crate::gil::exception;

/// The index of a task, counted and compared.
pub(crate) struct Values {
    /// The number of samples: the length of a list, or 1.
    pub(crate) samples: u64,
    /// A number for each sample; `None` if one of them cannot be compared.
    pub(crate) numbers: Option<Vec<i64>>,
    /// True for a list, which is a batch.
    pub(crate) is_batch: bool,
}

/// Returns the values of an index. An int of 64 bits is its own number, whatever its type: `numpy.int64(5)`,
/// `torch.tensor(5)` and 5 are equal.
pub(crate) fn values_of(index: &Bound<'_, PyAny>) -> Values {
    match index.cast_exact::<PyList>() {
        Ok(list) => {
            let numbers = list.iter().map(|item| number(&item)).collect();
            Values { samples: list.len() as u64, numbers, is_batch: true }
        }
        Err(_) => Values { samples: 1, numbers: number(index).map(|one| vec![one]), is_batch: false },
    }
}

/// Returns the number of a value; `None` for an object whose value is not known, such as one of the program's classes.
/// An error of its methods is none of the loader's.
fn number(value: &Bound<'_, PyAny>) -> Option<i64> {
    value.extract().ok().or_else(|| other(value))
}

/// Returns the number of a value that is no int of 64 bits, by the bytes that `marshal` writes. Before its third version
/// these depend on nothing but the value.
#[cold]
fn other(value: &Bound<'_, PyAny>) -> Option<i64> {
    static DUMPS: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let bytes = DUMPS.import(value.py(), "marshal", "dumps").ok()?.call1((value, 2)).ok()?;
    let bytes = bytes.cast_exact::<PyBytes>().ok()?.as_bytes();
    let words = bytes.chunks(8).map(|chunk| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        i64::from_le_bytes(word)
    });
    Some(fingerprint_of(bytes.len() as u64, 1, words) as i64)
}

/// Compares the indices that an epoch passes over with the indices of a state.
#[pyclass(frozen, module = "ringloader._native")]
pub(crate) struct Passing {
    ranges: OrdinalSet,
    /// The sum to find; `None`: nothing is compared.
    expected: Option<u64>,
    /// The text of the error where the indices are others.
    message: String,
    passed: Lock<Passed>,
}

struct Passed {
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
        let ranges = OrdinalSet::from_ranges(ranges).map_err(exception)?;
        let passed = Lock::new(Passed { count: 0, sum: Some(0) });
        Ok(Self { ranges, expected, message: message.into(), passed })
    }

    /// Notes that `ordinals` indices are passed over: `index` is a list of them, the first at `place`, or the only one.
    ///
    /// Raises `ValueError` if they were the last, and the indices are others than expected.
    pub(crate) fn note(&self, index: &Bound<'_, PyAny>, place: u64, ordinals: u64) -> PyResult<()> {
        self.add(ordinals, values_of(index).numbers.map(|numbers| fingerprint_of(place, 1, numbers)))
    }

    /// Raises `ValueError` if the indices ended before all were passed over, and are others than expected. A position
    /// that other code has edited may lie after the end.
    pub(crate) fn finish(&self) -> PyResult<()> {
        let found = self.passed.lock();
        if found.count < self.ranges.count() { self.compare(&found) } else { Ok(()) }
    }

    /// The fingerprint of what was passed over so far; `None` where an index is no int.
    #[getter]
    fn sum(&self) -> Option<u64> {
        self.passed.lock().sum
    }
}

impl Passing {
    pub(crate) fn ranges(&self) -> &OrdinalSet {
        &self.ranges
    }

    /// Notes that `ordinals` indices are passed over, which have the fingerprint `sum`.
    pub(crate) fn add(&self, ordinals: u64, sum: Option<u64>) -> PyResult<()> {
        let mut found = self.passed.lock();
        found.count += ordinals;
        found.sum = found.sum.zip(sum).map(|(one, other)| one.wrapping_add(other));
        if found.count >= self.ranges.count() { self.compare(&found) } else { Ok(()) }
    }

    fn compare(&self, found: &Passed) -> PyResult<()> {
        let is_other = self.expected.is_some_and(|expected| found.sum != Some(expected));
        if is_other { Err(PyValueError::new_err(self.message.clone())) } else { Ok(()) }
    }
}
