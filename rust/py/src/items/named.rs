//! A list's items, and the strings that their dicts have as keys.
//!
//! The dicts of a list mostly have the same keys. Keys are written once, after all items, and each process that reads
//! makes their strings once: an item has a number for a key, and its dict gets that string.

use std::collections::HashMap;

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyString;
use ringloader_core::items::Items;

use crate::objects;

/// Bytes of such a key, at most: its length is one byte.
const KEY: usize = 64;

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
            return Err(PyRuntimeError::new_err("shared memory is corrupt: a list without its dicts' keys"));
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
                keys.push(objects::interned(py, key)?.unbind());
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
            into.push(key.len() as u8);
            into.extend_from_slice(key.as_bytes());
        }
    }
}

#[cold]
pub(crate) fn corrupt() -> PyErr {
    PyRuntimeError::new_err("shared memory is corrupt: the bytes of an item are none")
}
