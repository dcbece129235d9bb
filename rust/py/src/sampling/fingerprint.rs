//! Compares the indices of two runs of an epoch: by their values, as numbers, and by a fingerprint of many.
//!
//! INVARIANT: equal values are equal numbers, in any process.

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyFloat, PyInt, PyList, PyString, PyTuple};
use ringloader_core::plan::{OrdinalSet, fingerprint_of, hash_of_words};
use ringloader_core::sync::Lock;

use crate::gil::exception;
use crate::strings;
use crate::torch::names::Torch;

/// Levels of tuples and lists inside each other that are looked into.
const MOST_LEVELS: u32 = 16;
/// Begin the words of a value of each kind, so that values of two kinds are different numbers.
const NONE: u64 = 1;
const LONG: u64 = 2;
const FLOAT: u64 = 3;
const TEXT: u64 = 4;
const BYTES: u64 = 5;
const SEQUENCE: u64 = 6;

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
    let Ok(list) = index.cast_exact::<PyList>() else {
        return Values { samples: 1, numbers: number(index, 0).map(|one| vec![one]), is_batch: false };
    };
    let mut numbers = Some(Vec::with_capacity(list.len()));
    for item in list.iter() {
        let Some(found) = &mut numbers else { break };
        match number(&item, 0) {
            Some(number) => found.push(number),
            None => numbers = None,
        }
    }
    Values { samples: list.len() as u64, numbers, is_batch: true }
}

/// Returns the number of a value; `None` for an object whose value is not known, such as one of the program's classes.
fn number(value: &Bound<'_, PyAny>, level: u32) -> Option<i64> {
    if value.is_exact_instance_of::<PyInt>() {
        return value.extract().ok().or_else(|| long(value));
    }
    if value.is_none() {
        return Some(hashed(NONE, []));
    }
    if let Ok(text) = value.cast_exact::<PyString>() {
        return Some(bytes(TEXT, text.to_str().ok()?.as_bytes()));
    }
    if let Ok(found) = value.cast_exact::<PyBytes>() {
        return Some(bytes(BYTES, found.as_bytes()));
    }
    if let Ok(float) = value.cast_exact::<PyFloat>() {
        return Some(hashed(FLOAT, [float.value().to_bits()]));
    }
    if let Ok(tuple) = value.cast_exact::<PyTuple>() {
        return sequence(tuple.iter(), level);
    }
    if let Ok(list) = value.cast_exact::<PyList>() {
        return sequence(list.iter(), level);
    }
    other(value, level)
}

/// Returns the number of an int of another type, and of a tensor or array by its elements. An error of its methods is
/// none of the loader's: then the value is not known.
#[cold]
fn other(value: &Bound<'_, PyAny>, level: u32) -> Option<i64> {
    let py = value.py();
    if let Ok(int) = value.cast::<PyInt>() {
        return int.extract().ok().or_else(|| long(value));
    }
    let torch = Torch::get(py).ok()?;
    let kinds =
        [torch.numpy_scalar.bind(py), torch.tensor.bind(py).as_any(), torch.ndarray.bind(py).as_any()];
    if !kinds.into_iter().any(|kind| value.is_instance(kind).unwrap_or(false)) {
        return None;
    }
    let found = value.call_method0(strings::tolist(py)).ok()?;
    // A value that is no int, float or list of them would come here again.
    (level < MOST_LEVELS && !found.get_type().is(value.get_type())).then(|| number(&found, level + 1))?
}

fn sequence<'py>(items: impl ExactSizeIterator<Item = Bound<'py, PyAny>>, level: u32) -> Option<i64> {
    if level == MOST_LEVELS {
        return None;
    }
    let numbers: Option<Vec<u64>> =
        items.map(|item| number(&item, level + 1).map(|one| one as u64)).collect();
    Some(hashed(SEQUENCE, numbers?))
}

/// Returns the number of an int of more than 64 bits.
fn long(value: &Bound<'_, PyAny>) -> Option<i64> {
    let digits = value.str().ok()?;
    Some(bytes(LONG, digits.to_str().ok()?.as_bytes()))
}

fn bytes(kind: u64, bytes: &[u8]) -> i64 {
    let words = bytes.chunks(8).map(|chunk| {
        let mut word = [0; 8];
        word[..chunk.len()].copy_from_slice(chunk);
        u64::from_le_bytes(word)
    });
    hashed(kind, [bytes.len() as u64].into_iter().chain(words))
}

fn hashed(kind: u64, words: impl IntoIterator<Item = u64>) -> i64 {
    hash_of_words([kind].into_iter().chain(words)) as i64
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
