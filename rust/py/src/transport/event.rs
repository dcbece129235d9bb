//! Messages for the parent, and stand-ins for lost batches.

use std::convert::Infallible;

use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use ringloader_core::sync::Lock;

use crate::caught::caught;
use crate::python;

/// The stand-in of a batch whose arrival an interrupt has ended. The interrupt was raised in the batch's place.
#[derive(Default)]
pub(crate) struct Unsent(Lock<Option<(i64, Py<PyAny>)>>);

impl Unsent {
    /// Returns true if there is a stand-in.
    pub(crate) fn is_some(&self) -> bool {
        self.0.lock().is_some()
    }

    /// The message of the stand-in.
    pub(crate) fn take<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let found = self.0.lock().take();
        found.map(|(seq, data)| message(py, seq, data.into_bound(py))).transpose()
    }

    /// Keeps a stand-in, whose message must be made later.
    pub(crate) fn keep(&self, seq: i64, data: Py<PyAny>) {
        let before = self.0.lock().replace((seq, data));
        // After the lock is released: the end of an object may run any code.
        drop(before);
    }
}

/// The message of torch's protocol that carries the data of a task.
pub(crate) fn message<'py>(
    py: Python<'py>,
    seq: i64,
    data: Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyAny>> {
    Ok((seq, data).into_pyobject(py)?.into_any())
}

/// Returns a stand-in for a batch whose arrival has failed, which torch raises in the batch's turn. Also returns the
/// error itself if it interrupts or ends the program, so that it must be raised at once; or another such error that
/// came meanwhile.
///
/// # Errors
/// None that is known. If there were no stand-in for a batch, the program would wait for it.
pub(crate) fn stand_in(py: Python<'_>, error: PyErr) -> PyResult<(Bound<'_, PyAny>, Option<PyErr>)> {
    let Err(error) = caught(py, || Err::<Infallible, _>(error));
    let interrupts = |error: &PyErr| !error.is_instance_of::<PyException>(py);
    let was_raised = interrupts(&error);
    let (standing, other) = python::failed_arrival(py, &error, was_raised)?;
    let interrupt = if was_raised { Some(error) } else { other.filter(interrupts) };
    Ok((standing, interrupt))
}
