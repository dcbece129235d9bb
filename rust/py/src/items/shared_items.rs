//! A list in shared memory, as a Python class.

use std::os::fd::{AsRawFd, RawFd};
use std::sync::Arc;

use pyo3::exceptions::{PyIndexError, PyOverflowError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyInt, PySlice, PyType};
use ringloader_core::items::{self, Builder, Items};

use super::form::{Named, Writer, read};
use crate::gil::{exception, without_interpreter};
use crate::process::duplicate;

/// A list of any objects in shared memory, or every `step`-th of its items.
///
/// INVARIANT: `start + step * i` is an index of `items` for each `i` below `len`.
#[pyclass(module = "ringloader._native", subclass, frozen)]
pub(crate) struct SharedItems {
    items: Arc<Named>,
    start: isize,
    step: isize,
    len: usize,
}

impl SharedItems {
    fn all(items: Items) -> PyResult<Self> {
        let items = Named::new(items)?;
        let len = items.len();
        Ok(Self { items: Arc::new(items), start: 0, step: 1, len })
    }

    /// Makes a list of items, one by one.
    fn of<'py>(py: Python<'py>, items: impl Iterator<Item = PyResult<Bound<'py, PyAny>>>) -> PyResult<Self> {
        let mut builder = Builder::new().map_err(exception)?;
        let mut writer = Writer::default();
        for (position, item) in items.enumerate() {
            let item = item?;
            let bytes = writer.item(&item).map_err(|error| unpicklable(&item, position, error))?;
            builder.add(bytes).map_err(exception)?;
            if builder.end_item() {
                without_interpreter(py, || builder.flush()).map_err(exception)?;
                // An iterator without Python code would run to its end.
                py.check_signals()?;
            }
        }
        writer.numbers.write(builder.buffer());
        let _ = builder.end_item();
        Self::all(without_interpreter(py, || builder.finish()).map_err(exception)?)
    }

    fn part(&self, start: isize, step: isize, len: usize) -> PyResult<Self> {
        let is_there = |at: Option<isize>| at.is_some_and(|at| at >= 0 && (at as usize) < self.items.len());
        let last = |len: usize| step.checked_mul(len as isize - 1)?.checked_add(start);
        if len > self.items.len() || len > 0 && !(is_there(Some(start)) && is_there(last(len))) {
            return Err(PyValueError::new_err(format!(
                "{len} items from {start} in steps of {step} are not in a list of {}",
                self.items.len()
            )));
        }
        Ok(Self { items: Arc::clone(&self.items), start, step, len })
    }

    fn item(&self, index: usize) -> Option<&[u8]> {
        self.items.get((self.start + self.step * index as isize) as usize)
    }
}

#[pymethods]
impl SharedItems {
    /// Makes a list of an iterable, item by item. Of another such list, it shares the memory.
    #[new]
    #[pyo3(signature = (iterable, /))]
    fn new(iterable: &Bound<'_, PyAny>) -> PyResult<Self> {
        if let Ok(other) = iterable.cast::<Self>() {
            let other = other.get();
            return other.part(other.start, other.step, other.len);
        }
        Self::of(iterable.py(), iterable.try_iter()?)
    }

    fn __len__(&self) -> usize {
        self.len
    }

    fn __getitem__<'py>(slf: &Bound<'py, Self>, key: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let (py, this) = (slf.py(), slf.get());
        if !key.is_exact_instance_of::<PyInt>()
            && let Ok(slice) = key.cast::<PySlice>()
        {
            let slice = slice.indices(this.len as isize)?;
            let start = this.start + this.step * slice.start;
            let part = this.part(start, this.step.saturating_mul(slice.step), slice.slicelength)?;
            // The class may be a subclass.
            return slf.get_type().call1((Bound::new(py, part)?,));
        }
        let index: isize = key.extract().map_err(|error: PyErr| {
            if error.is_instance_of::<PyOverflowError>(py) {
                return PyIndexError::new_err("cannot fit 'int' into an index-sized integer");
            }
            error
        })?;
        let index = if index < 0 { index + this.len as isize } else { index };
        match usize::try_from(index).ok().filter(|&index| index < this.len).and_then(|at| this.item(at)) {
            Some(bytes) => read(py, bytes, &this.items),
            None => Err(PyIndexError::new_err("list index out of range")),
        }
    }

    /// Returns true if both are the same items of the same memory.
    fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.items, &other.items)
            && (self.start, self.step, self.len) == (other.start, other.step, other.len)
    }

    /// Bytes of shared memory; of a part, those of the whole.
    #[getter]
    fn nbytes(&self) -> usize {
        self.items.items().bytes().len()
    }

    /// The descriptor of the memory, for as long as this lives.
    fn fileno(&self) -> PyResult<RawFd> {
        Ok(self.items.items().fd().map_err(exception)?.as_raw_fd())
    }

    /// Returns the start, step and length that `attach` needs in addition to the descriptor.
    fn extent(&self) -> (isize, isize, usize) {
        (self.start, self.step, self.len)
    }

    /// The list that another process has built, by its descriptor, which stays the caller's.
    #[staticmethod]
    fn attach(fd: RawFd, start: isize, step: isize, len: usize) -> PyResult<Self> {
        Self::all(Items::attach(duplicate(fd)?).map_err(exception)?)?.part(start, step, len)
    }

    /// The items as bytes, without the memory; of a part, only its items.
    fn to_bytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        if (self.start, self.step, self.len) == (0, 1, self.items.len()) {
            return Ok(PyBytes::new(py, self.items.items().bytes()));
        }
        let items = (0..self.len).map(|index| read(py, self.item(index).unwrap_or_default(), &self.items));
        Ok(PyBytes::new(py, Self::of(py, items)?.items.items().bytes()))
    }

    /// A list of its own of what `to_bytes` gave.
    #[staticmethod]
    fn from_bytes(bytes: &[u8]) -> PyResult<Self> {
        Self::all(items::from_bytes(bytes).map_err(exception)?)
    }
}

/// Names the item that could not be pickled. What is no `Exception` stays as it is.
fn unpicklable(item: &Bound<'_, PyAny>, position: usize, error: PyErr) -> PyErr {
    static PICKLING_ERROR: PyOnceLock<Py<PyType>> = PyOnceLock::new();
    let py = item.py();
    if !error.is_instance_of::<pyo3::exceptions::PyException>(py) {
        return error;
    }
    let made = PICKLING_ERROR.import(py, "pickle", "PicklingError").and_then(|class| {
        let kind = item.get_type().name()?;
        class.call1((format!("item {position} of the list, of type {kind}, cannot be pickled: {error}"),))
    });
    match made {
        Ok(made) => {
            let named = PyErr::from_value(made);
            named.set_cause(py, Some(error));
            named
        }
        Err(_) => error,
    }
}
