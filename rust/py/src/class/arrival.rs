//! A batch that was taken and not yet handed out, as a Python class.

use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use ringloader_core::transport::delivery::Delivery;

use super::engine::{Engine, stand_in};

/// A batch that was taken from its ring and not yet handed out.
///
/// It keeps the batch's slot until it is unpacked, or gone.
#[pyclass(frozen, module = "ringloader._native")]
pub(crate) struct Arrival {
    engine: Py<Engine>,
    content: Mutex<Content>,
}

/// What there is of the batch.
pub(crate) enum Content {
    /// As it came.
    Delivery(Delivery),
    /// Unpacked, or what stands for a batch that cannot be had.
    Object(Py<PyAny>),
    /// A thread is unpacking it, or unpacking has failed.
    Gone,
}

#[pymethods]
impl Arrival {
    /// The batch; the same object each time.
    fn unpack<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let taken = std::mem::replace(&mut *self.content(), Content::Gone);
        let object = match taken {
            Content::Delivery(delivery) => self.unpacked(py, delivery),
            Content::Object(object) => Ok(object.into_bound(py)),
            Content::Gone => Err(PyRuntimeError::new_err("this batch is being unpacked elsewhere")),
        }?;
        *self.content() = Content::Object(object.clone().unbind());
        Ok(object)
    }
}

impl Arrival {
    /// # Errors
    /// What ends a program, and what interrupts it; any other error is what stands for the batch.
    fn unpacked<'py>(&self, py: Python<'py>, delivery: Delivery) -> PyResult<Bound<'py, PyAny>> {
        self.engine().unpack(py, delivery).or_else(|error| {
            let (standing, interrupt) = stand_in(py, error)?;
            match interrupt {
                None => Ok(standing),
                Some(interrupt) => {
                    *self.content() = Content::Object(standing.unbind());
                    Err(interrupt)
                }
            }
        })
    }

    pub(crate) fn of_delivery(engine: Py<Engine>, delivery: Delivery) -> Self {
        Self { engine, content: Mutex::new(Content::Delivery(delivery)) }
    }

    pub(crate) fn of_object(engine: Py<Engine>, object: Py<PyAny>) -> Self {
        Self { engine, content: Mutex::new(Content::Object(object)) }
    }

    pub(crate) fn engine(&self) -> &Engine {
        self.engine.get()
    }

    pub(crate) fn content(&self) -> MutexGuard<'_, Content> {
        self.content.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
