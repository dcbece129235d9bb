//! An object to the bytes of an item.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBool, PyBytes, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple};

use super::{DEPTH, tag};

/// Lists and dicts of one item that are compared; with more, the item is pickled.
const MUTABLE: usize = 64;

/// Appends `item`.
///
/// # Errors
/// What pickling it raises.
pub(crate) fn write(item: &Bound<'_, PyAny>, into: &mut Vec<u8>) -> PyResult<()> {
    static DUMPS: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let start = into.len();
    if (Plain { into, mutable: Vec::new() }).write(item, 0) {
        return Ok(());
    }
    into.truncate(start);
    let py = item.py();
    // Protocol 5: that of the oldest Python there is.
    let pickled = DUMPS.import(py, "pickle", "dumps")?.call1((item, 5))?;
    into.push(tag::PICKLE);
    into.extend_from_slice(pickled.cast::<PyBytes>()?.as_bytes());
    Ok(())
}

struct Plain<'a> {
    into: &'a mut Vec<u8>,
    /// Addresses of the lists and dicts so far. One that is in the item twice must be one object again.
    mutable: Vec<usize>,
}

impl Plain<'_> {
    /// Whether `value` has a form of its own; else what was appended is of no use. Runs no Python code.
    fn write(&mut self, value: &Bound<'_, PyAny>, depth: u32) -> bool {
        // Exact types only: a subclass would come back as its base.
        if let Ok(text) = value.cast_exact::<PyString>() {
            // Lone surrogates have no UTF-8.
            let Ok(text) = text.to_str() else { return false };
            self.bytes(tag::STR, text.as_bytes());
        } else if let Ok(number) = value.cast_exact::<PyInt>() {
            let Ok(number) = number.extract::<i64>() else { return false };
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
            self.bytes(tag::BYTES, bytes.as_bytes());
        } else if depth < DEPTH {
            return self.container(value, depth + 1);
        } else {
            return false;
        }
        true
    }

    fn container(&mut self, value: &Bound<'_, PyAny>, depth: u32) -> bool {
        if let Ok(tuple) = value.cast_exact::<PyTuple>() {
            self.head(tag::TUPLE, tuple.len());
            tuple.iter_borrowed().all(|part| self.write(&part, depth))
        } else if let Ok(list) = value.cast_exact::<PyList>() {
            self.head(tag::LIST, list.len());
            self.is_new(value) && list.iter().all(|part| self.write(&part, depth))
        } else if let Ok(dict) = value.cast_exact::<PyDict>() {
            self.head(tag::DICT, dict.len());
            self.is_new(value)
                && dict.iter().all(|(key, part)| self.write(&key, depth) && self.write(&part, depth))
        } else {
            false
        }
    }

    fn is_new(&mut self, value: &Bound<'_, PyAny>) -> bool {
        let address = value.as_ptr() as usize;
        let is_new = self.mutable.len() < MUTABLE && !self.mutable.contains(&address);
        self.mutable.push(address);
        is_new
    }

    fn bytes(&mut self, tag: u8, bytes: &[u8]) {
        self.head(tag, bytes.len());
        self.into.extend_from_slice(bytes);
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
