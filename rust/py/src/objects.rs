//! New objects of Python's own types. [`CollectorOff`] keeps the making of objects from running finalisers.

use std::marker::PhantomData;

use pyo3::exceptions::{PyMemoryError, PyRuntimeError, PyUnicodeDecodeError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple};
use ringloader_core::Error;
use ringloader_core::batch::Token;

/// A new object of the interpreter's.
///
/// # Errors
/// `MemoryError`.
///
/// # Safety
/// `new` is a new reference to a `T`, or none with an error set.
#[inline(always)]
unsafe fn made<T>(py: Python<'_>, new: *mut ffi::PyObject) -> PyResult<Bound<'_, T>> {
    // SAFETY: the caller's; the interpreter is attached.
    unsafe { Ok(Bound::from_owned_ptr_or_err(py, new)?.cast_into_unchecked()) }
}

/// A string from shared memory.
///
/// # Errors
/// `MemoryError`; `RuntimeError` for bytes that are not UTF-8.
pub(crate) fn decoded<'py>(py: Python<'py>, text: &[u8]) -> PyResult<Bound<'py, PyString>> {
    PyString::from_bytes(py, text).map_err(|error| not_utf8(py, error))
}

#[cold]
fn not_utf8(py: Python<'_>, error: PyErr) -> PyErr {
    if !error.is_instance_of::<PyUnicodeDecodeError>(py) {
        return error;
    }
    PyRuntimeError::new_err(Error::Corrupt(format!("text is not UTF-8: {error}")).to_string())
}

/// The value of a token that is neither text nor a container. `None` of any other.
#[inline]
pub(crate) fn plain<'py>(py: Python<'py>, token: Token<'_>) -> Option<Bound<'py, PyAny>> {
    Some(match token {
        Token::None => py.None().into_bound(py),
        Token::True => PyBool::new(py, true).to_owned().into_any(),
        Token::False => PyBool::new(py, false).to_owned().into_any(),
        Token::Int(number) => PyInt::new(py, number).into_any(),
        Token::Float(number) => PyFloat::new(py, number).into_any(),
        Token::Bytes(value) => PyBytes::new(py, value).into_any(),
        _ => return None,
    })
}

/// A list of `items`. No code of anybody's may run while they are made.
///
/// # Errors
/// `MemoryError`; that of the first item that is one.
pub(crate) fn list<'py, E: From<PyErr>>(
    py: Python<'py>,
    items: impl ExactSizeIterator<Item = Result<Bound<'py, PyAny>, E>>,
) -> Result<Bound<'py, PyList>, E> {
    let len = items.len();
    // SAFETY: the interpreter is attached. A new list, or none with an error set; it has room for `len` items, and takes the reference to each.
    unsafe {
        let list: Bound<'_, PyList> = made(py, ffi::PyList_New(len as isize))?;
        for (at, item) in items.take(len).enumerate() {
            ffi::PyList_SetItem(list.as_ptr(), at as isize, item?.into_ptr());
        }
        Ok(list)
    }
}

/// A tuple of `items`. No code of anybody's may run while they are made.
///
/// # Errors
/// As [`list`].
pub(crate) fn tuple<'py, E: From<PyErr>>(
    py: Python<'py>,
    items: impl ExactSizeIterator<Item = Result<Bound<'py, PyAny>, E>>,
) -> Result<Bound<'py, PyTuple>, E> {
    let len = items.len();
    // SAFETY: as in `list`. Nobody else has the tuple while it is filled.
    unsafe {
        let tuple: Bound<'_, PyTuple> = made(py, ffi::PyTuple_New(len as isize))?;
        for (at, item) in items.take(len).enumerate() {
            ffi::PyTuple_SetItem(tuple.as_ptr(), at as isize, item?.into_ptr());
        }
        Ok(tuple)
    }
}

/// An empty vector with room for `len` items.
///
/// # Errors
/// `MemoryError`.
pub(crate) fn vector<T>(py: Python<'_>, len: usize) -> PyResult<Vec<T>> {
    let mut vector = Vec::new();
    vector.try_reserve_exact(len).map_err(|_| no_memory(py))?;
    Ok(vector)
}

/// Appends an item.
///
/// # Errors
/// `MemoryError`.
#[inline]
pub(crate) fn push<T>(py: Python<'_>, vector: &mut Vec<T>, item: T) -> PyResult<()> {
    vector.try_reserve(1).map_err(|_| no_memory(py))?;
    vector.push(item);
    Ok(())
}

/// The items that a list has now: as many as the iterator says. Free-threaded, other threads may change the list while
/// it is read.
#[inline]
pub(crate) fn items_of<'py>(list: &Bound<'py, PyList>) -> impl ExactSizeIterator<Item = Bound<'py, PyAny>> {
    #[cfg(Py_GIL_DISABLED)]
    return list.to_tuple().into_iter();
    #[cfg(not(Py_GIL_DISABLED))]
    list.iter()
}

/// The names and values that a dict has now: as many as the iterator says. Free-threaded, other threads may change the
/// dict while it is read, and PyO3's own iterator would panic.
#[inline]
pub(crate) fn entries_of<'py>(
    dict: &Bound<'py, PyDict>,
) -> impl ExactSizeIterator<Item = (Bound<'py, PyAny>, Bound<'py, PyAny>)> {
    #[cfg(Py_GIL_DISABLED)]
    return dict.items().into_iter().map(|entry| entry.extract().expect("an item of a dict is a pair"));
    #[cfg(not(Py_GIL_DISABLED))]
    dict.iter()
}

/// `MemoryError`, as the interpreter keeps it for when there is no memory for an object.
#[cold]
pub(crate) fn no_memory(py: Python<'_>) -> PyErr {
    // SAFETY: the interpreter is attached. It sets an error, and returns nothing.
    unsafe { ffi::PyErr_NoMemory() };
    PyErr::take(py).unwrap_or_else(|| PyMemoryError::new_err(()))
}

/// Keeps the collector off, so that making an object runs no finalisers. Dropped, it leaves the collector as it was.
///
/// INVARIANT: only where the collector runs wherever an object is made, before Python 3.12. There the interpreter lock
/// keeps two threads from turning it off and on around each other.
pub(crate) struct CollectorOff<'py> {
    was_on: bool,
    _attached: PhantomData<Python<'py>>,
}

impl<'py> CollectorOff<'py> {
    pub(crate) fn new(_py: Python<'py>) -> Self {
        // SAFETY: the interpreter is attached.
        let was_on = unsafe { ffi::PyGC_Disable() } != 0;
        Self { was_on, _attached: PhantomData }
    }
}

impl Drop for CollectorOff<'_> {
    fn drop(&mut self) {
        if self.was_on {
            // SAFETY: the interpreter is attached while `'py` lasts.
            unsafe { ffi::PyGC_Enable() };
        }
    }
}
