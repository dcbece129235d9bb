//! Panics, as errors.
//!
//! A panic that unwinds out of a call from Python would become PyO3's `PanicException`, which no program expects. Where
//! no memory is left for that exception, it would end the process.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::objects::no_memory;

/// PyO3's panic where the interpreter has no memory for an object.
const NO_OBJECT: &str = "PyObject pointer is null";

/// Returns what `work` returns, or an error where it panics. The error has its object: to make that later may need
/// memory.
///
/// The state that `work` changes must be right for others at each moment, or be put right when it is dropped.
///
/// # Errors
/// The error of `work`; `MemoryError` where it panicked because there was no memory, and `RuntimeError` with the
/// panic's message for any other panic.
pub(crate) fn caught<T>(py: Python<'_>, work: impl FnOnce() -> PyResult<T>) -> PyResult<T> {
    let work = || {
        work().inspect_err(|error| {
            error.value(py);
        })
    };
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| Err(error(py, &*panic)))
}

#[cold]
fn error(py: Python<'_>, panic: &(dyn Any + Send)) -> PyErr {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("without a message");
    if text == NO_OBJECT {
        return no_memory(py);
    }
    let text = format!("ringloader's native code panicked: {text}; please report this bug");
    let error = PyRuntimeError::new_err(text);
    error.value(py);
    error
}
