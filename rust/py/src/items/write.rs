//! An object to the bytes of an item.

use pyo3::exceptions::PyMemoryError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBool, PyBytes, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple};

use super::named::Numbers;
use super::{DEPTH, tag};

/// Lists and dicts of one item that are compared; with more, the item is pickled.
const MUTABLE: usize = 64;

/// Appends `item`. On an error, what was appended is of no use.
///
/// # Errors
/// The error that pickling it raises; `MemoryError`.
pub(crate) fn write(item: &Bound<'_, PyAny>, numbers: &mut Numbers, into: &mut Vec<u8>) -> PyResult<()> {
    static DUMPS: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let start = into.len();
    if (Plain { into, numbers, mutable: Vec::new() }).write(item, 0)? {
        return Ok(());
    }
    into.truncate(start);
    let py = item.py();
    // Protocol 5: that of the oldest Python there is.
    let pickled = DUMPS.import(py, "pickle", "dumps")?.call1((item, 5))?;
    let pickled = pickled.cast::<PyBytes>()?.as_bytes();
    reserve(into, pickled.len())?;
    into.push(tag::PICKLE);
    into.extend_from_slice(pickled);
    Ok(())
}

/// Makes room for so many bytes, a tag, and a length or a number. Without it, a lack of memory would end the process.
fn reserve(into: &mut Vec<u8>, len: usize) -> PyResult<()> {
    into.try_reserve(len.saturating_add(16))
        .map_err(|_| PyMemoryError::new_err(format!("{len} bytes of private memory could not be allocated")))
}

struct Plain<'a> {
    into: &'a mut Vec<u8>,
    numbers: &'a mut Numbers,
    /// Addresses of the lists and dicts so far. One that is in the item twice must be one object again.
    mutable: Vec<usize>,
}

impl Plain<'_> {
    /// Writes `value` and returns true if it has a form of its own. Else what was appended is of no use. Runs no Python
    /// code.
    ///
    /// # Errors
    /// `MemoryError`.
    fn write(&mut self, value: &Bound<'_, PyAny>, depth: u32) -> PyResult<bool> {
        reserve(self.into, 0)?;
        // Exact types only: a subclass would come back as its base.
        if let Ok(text) = value.cast_exact::<PyString>() {
            let Some(text) = utf8(text) else { return Ok(false) };
            self.bytes(tag::STR, text.as_bytes())?;
        } else if let Ok(number) = value.cast_exact::<PyInt>() {
            let Ok(number) = number.extract::<i64>() else { return Ok(false) };
            if let Ok(small) = i8::try_from(number) {
                self.into.extend_from_slice(&[tag::SMALL, small as u8]);
            } else {
                self.into.push(tag::INT);
                self.into.extend_from_slice(&number.to_le_bytes());
            }
        } else if let Ok(number) = value.cast_exact::<PyFloat>() {
            self.into.push(tag::FLOAT);
            self.into.extend_from_slice(&number.value().to_le_bytes());
        } else if value.is_none() {
            self.into.push(tag::NONE);
        } else if let Ok(truth) = value.cast_exact::<PyBool>() {
            self.into.push(if truth.is_true() { tag::TRUE } else { tag::FALSE });
        } else if let Ok(bytes) = value.cast_exact::<PyBytes>() {
            self.bytes(tag::BYTES, bytes.as_bytes())?;
        } else if depth < DEPTH {
            return self.container(value, depth + 1);
        } else {
            return Ok(false);
        }
        Ok(true)
    }

    fn container(&mut self, value: &Bound<'_, PyAny>, depth: u32) -> PyResult<bool> {
        if let Ok(tuple) = value.cast_exact::<PyTuple>() {
            self.head(tag::TUPLE, tuple.len());
            return self.parts(tuple.iter(), depth);
        }
        if let Ok(list) = value.cast_exact::<PyList>() {
            self.head(tag::LIST, list.len());
            return Ok(self.is_new(value) && self.parts(list.iter(), depth)?);
        }
        let Ok(dict) = value.cast_exact::<PyDict>() else { return Ok(false) };
        self.head(tag::DICT, dict.len());
        if !self.is_new(value) {
            return Ok(false);
        }
        for (key, part) in dict {
            if !(self.key(&key, depth)? && self.write(&part, depth)?) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn parts<'py>(
        &mut self,
        mut parts: impl Iterator<Item = Bound<'py, PyAny>>,
        depth: u32,
    ) -> PyResult<bool> {
        parts.try_fold(true, |all, part| Ok(all && self.write(&part, depth)?))
    }

    fn key(&mut self, key: &Bound<'_, PyAny>, depth: u32) -> PyResult<bool> {
        if let Ok(text) = key.cast_exact::<PyString>()
            && let Some(text) = utf8(text)
            && let Some(number) =
                std::str::from_utf8(text.as_bytes()).ok().and_then(|key| self.numbers.of(key))
        {
            reserve(self.into, 0)?;
            self.head(tag::NAME, number);
            return Ok(true);
        }
        self.write(key, depth)
    }

    fn is_new(&mut self, value: &Bound<'_, PyAny>) -> bool {
        let address = value.as_ptr() as usize;
        let is_new = self.mutable.len() < MUTABLE && !self.mutable.contains(&address);
        self.mutable.push(address);
        is_new
    }

    fn bytes(&mut self, tag: u8, bytes: &[u8]) -> PyResult<()> {
        reserve(self.into, bytes.len())?;
        self.head(tag, bytes.len());
        self.into.extend_from_slice(bytes);
        Ok(())
    }

    /// A tag and a length: seven bits in each byte, the lowest first, the eighth set in all but the last.
    fn head(&mut self, tag: u8, mut len: usize) {
        self.into.push(tag);
        while len > 0x7f {
            self.into.push(len as u8 | 0x80);
            len >>= 7;
        }
        self.into.push(len as u8);
    }
}

/// A string's UTF-8; `None` with lone surrogates. It is not asked for by `to_str`, which leaves it in the string for
/// as long as that lives: the program's own list would grow.
fn utf8<'py>(text: &Bound<'py, PyString>) -> Option<Bound<'py, PyBytes>> {
    text.encode_utf8().ok()
}
