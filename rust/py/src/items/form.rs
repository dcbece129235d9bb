//! An item as bytes, and back: a skeleton, as of a batch, without a memo.
//!
//! Numbers, strings and bytes, and plain tuples, lists and dicts of them, are tokens; any other item is pickled as a
//! whole. A list or dict that is in an item of tokens twice comes back as two. A leaf is the key of a dict that the list
//! has written once: see [`Named::name`].
//!
//! The dicts of a list mostly have the same keys. Keys are written once, after all items, and each process that reads
//! makes their strings once: an item has a number for a key, and its dict gets that string.

use std::collections::HashMap;

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBool, PyBytes, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple};
use ringloader_core::batch::{SkeletonReader, SkeletonWriter, Token};
use ringloader_core::items::Items;
use ringloader_core::number::u32_from;

use crate::gil::{self, exception};
use crate::objects;

/// Containers within containers, at most; what is deeper is pickled.
const DEPTH: u32 = 16;

/// The memory of a larger item is not kept for the next one.
const LARGEST_KEPT: usize = 1 << 20;

/// Writes items, one after the other.
#[derive(Default)]
pub(crate) struct Writer {
    skeleton: SkeletonWriter,
    pub(crate) numbers: KeyNumbers,
}

impl Writer {
    /// The bytes of `item`.
    ///
    /// # Errors
    /// The error that pickling it raises; `MemoryError`.
    pub(crate) fn item(&mut self, item: &Bound<'_, PyAny>) -> PyResult<&[u8]> {
        static DUMPS: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        if self.skeleton.as_bytes().len() > LARGEST_KEPT {
            self.skeleton = SkeletonWriter::new();
        }
        self.skeleton.clear();
        if !self.write(item, 0)? {
            self.skeleton.clear();
            // Protocol 5: that of the oldest Python there is.
            let pickled = DUMPS.import(item.py(), "pickle", "dumps")?.call1((item, 5))?;
            let pickled = pickled.cast::<PyBytes>()?.as_bytes();
            self.reserve(pickled.len())?;
            self.skeleton.pickle(pickled);
        }
        Ok(self.skeleton.as_bytes())
    }

    /// Makes room for a token of `len` bytes. Without it, a lack of memory would end the process.
    fn reserve(&mut self, len: usize) -> PyResult<()> {
        self.skeleton.reserve(len).map_err(exception)
    }

    /// Writes `value` and returns true if it is a tree of tokens. Else what was appended is of no use. Runs no Python
    /// code.
    ///
    /// # Errors
    /// `MemoryError`.
    fn write(&mut self, value: &Bound<'_, PyAny>, depth: u32) -> PyResult<bool> {
        self.reserve(0)?;
        // Exact types only: a subclass would come back as its base.
        if let Ok(text) = value.cast_exact::<PyString>() {
            let Some(text) = utf8(text) else { return Ok(false) };
            self.reserve(text.as_bytes().len())?;
            let Ok(text) = std::str::from_utf8(text.as_bytes()) else { return Ok(false) };
            self.skeleton.str(text);
        } else if let Ok(number) = value.cast_exact::<PyInt>() {
            let Ok(number) = number.extract() else { return Ok(false) };
            self.skeleton.int(number);
        } else if let Ok(number) = value.cast_exact::<PyFloat>() {
            self.skeleton.float(number.value());
        } else if value.is_none() {
            self.skeleton.none();
        } else if let Ok(truth) = value.cast_exact::<PyBool>() {
            self.skeleton.bool(truth.is_true());
        } else if let Ok(bytes) = value.cast_exact::<PyBytes>() {
            self.reserve(bytes.as_bytes().len())?;
            self.skeleton.bytes(bytes.as_bytes());
        } else if depth < DEPTH {
            return self.container(value, depth + 1);
        } else {
            return Ok(false);
        }
        Ok(true)
    }

    fn container(&mut self, value: &Bound<'_, PyAny>, depth: u32) -> PyResult<bool> {
        if let Ok(tuple) = value.cast_exact::<PyTuple>() {
            let Ok(len) = u32::try_from(tuple.len()) else { return Ok(false) };
            self.skeleton.tuple(len);
            return self.parts(tuple.iter(), depth);
        }
        if let Ok(list) = value.cast_exact::<PyList>() {
            let items = objects::items_of(list);
            let Ok(len) = u32::try_from(items.len()) else { return Ok(false) };
            self.skeleton.list(len);
            return self.parts(items, depth);
        }
        let Ok(dict) = value.cast_exact::<PyDict>() else { return Ok(false) };
        let entries = objects::entries_of(dict);
        let Ok(len) = u32::try_from(entries.len()) else { return Ok(false) };
        self.skeleton.dict(len);
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
            self.reserve(0)?;
            self.skeleton.leaf(u32_from(number as u64));
            return Ok(true);
        }
        self.write(key, depth)
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
/// The error that unpickling raises; `RuntimeError` for bytes that a [`Writer`] has not written.
pub(crate) fn read<'py>(py: Python<'py>, bytes: &[u8], named: &Named) -> PyResult<Bound<'py, PyAny>> {
    let mut reader = Reader { skeleton: SkeletonReader::new(bytes, KeyNumbers::MOST), named };
    reader.read(py, 0).map_err(|error| *error)
}

/// Reads the tokens of an item. In a box, an error fits into a register.
struct Reader<'a> {
    skeleton: SkeletonReader<'a>,
    named: &'a Named,
}

impl Reader<'_> {
    fn read<'py>(&mut self, py: Python<'py>, depth: u32) -> Result<Bound<'py, PyAny>, Box<PyErr>> {
        Ok(match self.skeleton.next_token().map_err(exception)? {
            Token::Str(text) => objects::decoded(py, text)?.into_any(),
            Token::Leaf(number) => self.named.name(py, number as usize)?.into_any(),
            Token::Tuple(len) if depth < DEPTH => objects::tuple(py, self.parts(py, len, depth))?.into_any(),
            Token::List(len) if depth < DEPTH => objects::list(py, self.parts(py, len, depth))?.into_any(),
            Token::Dict(len) if depth < DEPTH => {
                let dict = PyDict::new(py);
                for _ in 0..len {
                    let key = self.read(py, depth + 1)?;
                    dict.set_item(key, self.read(py, depth + 1)?)?;
                }
                dict.into_any()
            }
            Token::Pickle(pickled) if depth == 0 => {
                static LOADS: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
                // A copy: what unpickles may keep the bytes longer than the list lives.
                LOADS.import(py, "pickle", "loads")?.call1((PyBytes::new(py, pickled),))?
            }
            plain => objects::plain(py, plain).ok_or_else(corrupt)?,
        })
    }

    /// The parts of a tuple or list, each read when it is asked for: no vector of them in between.
    fn parts<'py>(
        &mut self,
        py: Python<'py>,
        len: u32,
        depth: u32,
    ) -> impl ExactSizeIterator<Item = Result<Bound<'py, PyAny>, Box<PyErr>>> {
        (0..len).map(move |_| self.read(py, depth + 1))
    }
}

/// Bytes of such a key, at most: its length is one byte.
const KEY: usize = 64;

/// A list's items, and the strings that their dicts have as keys.
///
/// INVARIANT: `items` has at least one item: the last, which has the keys.
pub(crate) struct Named {
    items: Items,
    keys: PyOnceLock<Vec<Py<PyString>>>,
}

impl Named {
    /// # Errors
    /// `RuntimeError` when there is no item for the keys.
    pub(crate) fn new(items: Items) -> PyResult<Self> {
        if items.is_empty() {
            return Err(gil::corrupt("a list without its dicts' keys"));
        }
        Ok(Self { items, keys: PyOnceLock::new() })
    }

    /// Items, without that of the keys.
    pub(crate) fn len(&self) -> usize {
        self.items.len() - 1
    }

    /// Returns the bytes of one item. The keys are the item after all others.
    pub(crate) fn get(&self, index: usize) -> Option<&[u8]> {
        self.items.get(index)
    }

    pub(crate) fn items(&self) -> &Items {
        &self.items
    }

    /// The key of a number.
    ///
    /// # Errors
    /// `RuntimeError` when there is none.
    pub(crate) fn name<'py>(&self, py: Python<'py>, number: usize) -> PyResult<Bound<'py, PyString>> {
        let keys = self.keys.get_or_try_init(py, || {
            let mut rest = self.get(self.len()).unwrap_or_default();
            let mut keys = Vec::new();
            while let Some((&len, text)) = rest.split_first() {
                let (key, behind) = text.split_at_checked(len.into()).ok_or_else(corrupt)?;
                let key = std::str::from_utf8(key).map_err(|_| corrupt())?;
                // Interned, as the strings of a program are that look for a key: then they are found by their address.
                keys.push(PyString::intern(py, key).unbind());
                rest = behind;
            }
            Ok::<_, PyErr>(keys)
        })?;
        let key = keys.get(number).ok_or_else(corrupt)?;
        Ok(key.bind(py).clone())
    }
}

/// The numbers of keys, while a list is built.
#[derive(Default)]
pub(crate) struct KeyNumbers(HashMap<String, usize>);

impl KeyNumbers {
    /// Keys of one list that have a number, at most.
    pub(crate) const MOST: u32 = 1024;

    /// The number of a key; `None` of one that is written out.
    pub(crate) fn of(&mut self, key: &str) -> Option<usize> {
        if let Some(&number) = self.0.get(key) {
            return Some(number);
        }
        let number = self.0.len();
        if number == Self::MOST as usize || key.len() > KEY {
            return None;
        }
        self.0.insert(key.to_owned(), number);
        Some(number)
    }

    /// Writes the item of the keys, in the order of their numbers: each key's length and its UTF-8.
    pub(crate) fn write(&self, into: &mut Vec<u8>) {
        let mut keys: Vec<_> = self.0.iter().collect();
        keys.sort_by_key(|&(_, number)| number);
        for (key, _) in keys {
            into.push(key.len().to_le_bytes()[0]);
            into.extend_from_slice(key.as_bytes());
        }
    }
}

#[cold]
pub(crate) fn corrupt() -> PyErr {
    gil::corrupt("the bytes of an item are none")
}
