//! The form of an item: an object to bytes, and back.
//!
//! An item is a tag and its content. Numbers, strings and bytes, and plain tuples, lists and dicts of them, have a form
//! of their own; any other item is pickled as a whole.

use pyo3::exceptions::PyMemoryError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBool, PyBytes, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple};

use super::named::{KeyNumbers, Named, corrupt};
use crate::objects;

/// The first byte of an item, or of a part of it.
pub(crate) mod tag {
    pub(crate) const PICKLE: u8 = 0;
    pub(crate) const NONE: u8 = 1;
    pub(crate) const FALSE: u8 = 2;
    pub(crate) const TRUE: u8 = 3;
    pub(crate) const SMALL: u8 = 4;
    pub(crate) const INT: u8 = 5;
    pub(crate) const FLOAT: u8 = 6;
    pub(crate) const STR: u8 = 7;
    pub(crate) const BYTES: u8 = 8;
    pub(crate) const TUPLE: u8 = 9;
    pub(crate) const LIST: u8 = 10;
    pub(crate) const DICT: u8 = 11;
    /// The number of a key: see [`Named::name`](super::Named::name).
    pub(crate) const NAME: u8 = 12;
}

/// Containers within containers, at most; what is deeper is pickled.
const DEPTH: u32 = 16;

/// Lists and dicts of one item that are compared; with more, the item is pickled.
const MUTABLE: usize = 64;

/// Appends `item`. On an error, what was appended is of no use.
///
/// # Errors
/// The error that pickling it raises; `MemoryError`.
pub(crate) fn write(item: &Bound<'_, PyAny>, numbers: &mut KeyNumbers, into: &mut Vec<u8>) -> PyResult<()> {
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

/// Makes room for `len` bytes, a tag, and a length or a number. Without it, a lack of memory would end the process.
fn reserve(into: &mut Vec<u8>, len: usize) -> PyResult<()> {
    into.try_reserve(len.saturating_add(16))
        .map_err(|_| PyMemoryError::new_err(format!("{len} bytes of private memory could not be allocated")))
}

struct Plain<'a> {
    into: &'a mut Vec<u8>,
    numbers: &'a mut KeyNumbers,
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
            let items = objects::items_of(list);
            self.head(tag::LIST, items.len());
            return Ok(self.is_new(value) && self.parts(items, depth)?);
        }
        let Ok(dict) = value.cast_exact::<PyDict>() else { return Ok(false) };
        let entries = objects::entries_of(dict);
        self.head(tag::DICT, entries.len());
        if !self.is_new(value) {
            return Ok(false);
        }
        for (key, part) in entries {
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

/// A new object each time.
///
/// # Errors
/// The error that unpickling raises; `RuntimeError` for bytes that `write` has not written.
pub(crate) fn read<'py>(py: Python<'py>, bytes: &[u8], named: &Named) -> PyResult<Bound<'py, PyAny>> {
    static LOADS: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    if let [tag::PICKLE, pickled @ ..] = bytes {
        // A copy: what unpickles may keep the bytes longer than the list lives.
        return LOADS
            .import(py, "pickle", "loads")?
            .call1(objects::arguments(py, [objects::bytes(py, pickled)?.into_any()])?);
    }
    read_plain(py, bytes, named).map_err(|error| *error)
}

/// As `read`, of an item that is not pickled: runs no Python code. In a box, an error fits into a register.
///
/// # Errors
/// As `read`.
#[inline]
pub(crate) fn read_plain<'py>(
    py: Python<'py>,
    bytes: &[u8],
    named: &Named,
) -> Result<Bound<'py, PyAny>, Box<PyErr>> {
    // The small items first: at these, one more call would be seen.
    Ok(match bytes {
        [tag::SMALL, byte] => objects::int(py, i64::from(*byte as i8))?.into_any(),
        &[tag::INT, a, b, c, d, e, f, g, h] => {
            objects::int(py, i64::from_le_bytes([a, b, c, d, e, f, g, h]))?.into_any()
        }
        &[tag::FLOAT, a, b, c, d, e, f, g, h] => {
            objects::float(py, f64::from_le_bytes([a, b, c, d, e, f, g, h]))?.into_any()
        }
        _ => return Reader { rest: bytes, named }.read(py, 0),
    })
}

struct Reader<'a> {
    rest: &'a [u8],
    named: &'a Named,
}

impl<'a> Reader<'a> {
    fn read<'py>(&mut self, py: Python<'py>, depth: u32) -> Result<Bound<'py, PyAny>, Box<PyErr>> {
        let [tag] = self.array()?;
        Ok(match tag {
            tag::STR => PyString::from_bytes(py, self.bytes()?)?.into_any(),
            tag::SMALL => objects::int(py, i64::from(i8::from_le_bytes(self.array()?)))?.into_any(),
            tag::INT => objects::int(py, i64::from_le_bytes(self.array()?))?.into_any(),
            tag::FLOAT => objects::float(py, f64::from_le_bytes(self.array()?))?.into_any(),
            tag::NONE => py.None().into_bound(py),
            tag::FALSE | tag::TRUE => PyBool::new(py, tag == tag::TRUE).to_owned().into_any(),
            tag::BYTES => objects::bytes(py, self.bytes()?)?.into_any(),
            tag::NAME => self.named.name(py, self.len()?)?.into_any(),
            tag::TUPLE if depth < DEPTH => objects::tuple(py, self.parts(py, depth)?)?.into_any(),
            tag::LIST if depth < DEPTH => objects::list(py, self.parts(py, depth)?)?.into_any(),
            tag::DICT if depth < DEPTH => {
                let dict = objects::dict(py)?;
                for _ in 0..self.len()? {
                    let key = self.read(py, depth + 1)?;
                    dict.set_item(key, self.read(py, depth + 1)?)?;
                }
                dict.into_any()
            }
            _ => return Err(Box::new(corrupt())),
        })
    }

    /// The parts of a tuple or list, each read when it is asked for: no vector of them in between.
    fn parts<'py>(
        &mut self,
        py: Python<'py>,
        depth: u32,
    ) -> PyResult<impl ExactSizeIterator<Item = Result<Bound<'py, PyAny>, Box<PyErr>>>> {
        let len = self.len()?;
        // Each part takes a byte at least.
        if len > self.rest.len() {
            return Err(corrupt());
        }
        Ok((0..len).map(move |_| self.read(py, depth + 1)))
    }

    fn array<const N: usize>(&mut self) -> PyResult<[u8; N]> {
        let (array, rest) = self.rest.split_first_chunk().ok_or_else(corrupt)?;
        self.rest = rest;
        Ok(*array)
    }

    fn bytes(&mut self) -> PyResult<&'a [u8]> {
        let len = self.len()?;
        let (bytes, rest) = self.rest.split_at_checked(len).ok_or_else(corrupt)?;
        self.rest = rest;
        Ok(bytes)
    }

    fn len(&mut self) -> PyResult<usize> {
        let mut len = 0;
        for shift in (0..usize::BITS).step_by(7) {
            let [byte] = self.array()?;
            len |= usize::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Ok(len);
            }
        }
        Err(corrupt())
    }
}
