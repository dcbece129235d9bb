//! The parts of torch's functions that ours stand in for. torch's are called where ours are not certain to do the same, or
//! where a part is not as torch made it, so that errors, warnings and tracebacks are torch's.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};

/// A dict of variables, a name in it, and the value that it must still have.
pub(crate) type Part = (Py<PyDict>, Py<PyString>, Py<PyAny>);

/// Returns true if each of `parts` is still in its place.
pub(super) fn are_unchanged(py: Python<'_>, parts: &[Part]) -> PyResult<bool> {
    for (variables, name, value) in parts {
        if !variables.bind(py).get_item(name.bind(py))?.is_some_and(|found| found.is(value)) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The parts of `default_collate`, kept to check that it still does what torch has made it do.
pub(super) struct Unchanged {
    parts: Vec<Part>,
    /// Functions that return how many of torch's modes are active, which may change what its functions do.
    modes: Vec<Py<PyAny>>,
    /// The map that `default_collate` passes, which users may change, and what was in it.
    pub(super) fn_map: Py<PyDict>,
    torchs_fn_map: Py<PyDict>,
}

impl Unchanged {
    /// Keeps the parts as they are now.
    ///
    /// # Errors
    /// The error that copying the map raises.
    pub(super) fn new(parts: Vec<Part>, modes: Vec<Py<PyAny>>, fn_map: &Bound<'_, PyDict>) -> PyResult<Self> {
        Ok(Self { parts, modes, fn_map: fn_map.clone().unbind(), torchs_fn_map: fn_map.copy()?.unbind() })
    }

    /// Returns true if no part has changed, and no mode is active.
    ///
    /// # Errors
    /// The error that asking raises.
    pub(super) fn is_whole(&self, py: Python<'_>) -> PyResult<bool> {
        for mode in &self.modes {
            if mode.bind(py).call0()?.is_truthy()? {
                return Ok(false);
            }
        }
        Ok(are_unchanged(py, &self.parts)? && self.fn_map.bind(py).eq(&self.torchs_fn_map)?)
    }
}

/// Calls `first`, and where that returns None `then`, and after that `done`. Native, so that a traceback out of `then`
/// is as if that had been called directly.
#[pyclass(frozen, module = "ringloader._native")]
pub(crate) struct FirstOf {
    first: Py<PyAny>,
    then: Py<PyAny>,
    done: Py<PyAny>,
}

#[pymethods]
impl FirstOf {
    #[new]
    fn new(first: Py<PyAny>, then: Py<PyAny>, done: Py<PyAny>) -> Self {
        Self { first, then, done }
    }

    fn __call__<'py>(&self, argument: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let py = argument.py();
        let found = self.first.bind(py).call1((argument,))?;
        if !found.is_none() {
            return Ok(found);
        }
        let made = self.then.bind(py).call1((argument,))?;
        self.done.bind(py).call0()?;
        Ok(made)
    }
}
