//! Two functions, the second of which is called where the first has no answer.

use pyo3::prelude::*;

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
