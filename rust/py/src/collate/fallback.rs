//! A function of torch's that ours stands in for.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};

/// The function has the last word: it is called wherever ours is not certain to do the same, so that errors,
/// warnings and tracebacks are torch's.
pub(crate) struct Fallback {
    function: Py<PyAny>,
    parts: Vec<Part>,
}

/// A dict of variables, a name in it, and the value that it must still have.
pub(crate) type Part = (Py<PyDict>, Py<PyString>, Py<PyAny>);

impl Fallback {
    /// `parts` is what the function is made of.
    pub(crate) fn new(function: Py<PyAny>, parts: Vec<Part>) -> Self {
        Self { function, parts }
    }

    /// Returns true if each part is still in its place.
    pub(crate) fn is_whole(&self, py: Python<'_>) -> PyResult<bool> {
        are_in_place(py, &self.parts)
    }

    /// Returns what the function makes of `argument`.
    pub(crate) fn call<'py>(
        &self,
        argument: &Bound<'py, PyAny>,
        options: Option<&Bound<'py, PyDict>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.function.bind(argument.py()).call((argument,), options)
    }
}

/// Returns true if each of `parts` is still in its place.
pub(super) fn are_in_place(py: Python<'_>, parts: &[Part]) -> PyResult<bool> {
    for (variables, name, value) in parts {
        if !variables.bind(py).get_item(name.bind(py))?.is_some_and(|found| found.is(value)) {
            return Ok(false);
        }
    }
    Ok(true)
}
