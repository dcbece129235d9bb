//! A batch that was taken and not yet handed out, as a Python class.

use std::sync::OnceLock;

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use ringloader_core::sync::Lock;
use ringloader_core::transport::copier::CopyJob;
use ringloader_core::transport::received::Received;

use crate::batch::layout::Layout;
use crate::caught::caught;
use crate::gil::without_interpreter;
use crate::transport::engine::Engine;
use crate::transport::event::stand_in;

/// A batch that was taken from its ring and not yet handed out.
///
/// The arrival keeps the batch's slot until it is unpacked, or gone.
#[pyclass(frozen, module = "ringloader._native")]
pub(crate) struct Arrival {
    /// `None` for what came as an object.
    engine: Option<Py<Engine>>,
    pub(super) content: Lock<Content>,
    layout: OnceLock<Option<Py<Layout>>>,
}

/// The form of the batch.
pub(crate) enum Content {
    /// The batch as it came.
    Received(Received),
    /// Unpacked, or what stands for a lost batch.
    Object(Py<PyAny>),
    /// Pinned, or on its way there.
    Pinned(Py<Pinned>),
    /// A thread is unpacking it, or unpacking has failed.
    Gone,
}

#[pymethods]
impl Arrival {
    /// The batch; the same object each time.
    fn unpack<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        // INVARIANT: nothing here panics: what is taken out comes back in some form.
        let taken = std::mem::replace(&mut *self.content.lock(), Content::Gone);
        let object = match taken {
            Content::Received(delivery) => self.unpacked(py, delivery),
            Content::Object(object) => Ok(object.into_bound(py)),
            Content::Pinned(pinned) => Ok(pinned.get().result(py).into_bound(py)),
            Content::Gone => Err(PyRuntimeError::new_err("this batch is being unpacked elsewhere")),
        }?;
        *self.content.lock() = Content::Object(object.clone().unbind());
        Ok(object)
    }

    /// Returns how the batch's tensors travel to a device. None for a batch that is more than dense tensors, each with
    /// memory of its own, in lists, tuples and dicts.
    fn layout(&self, py: Python<'_>) -> PyResult<Option<Py<Layout>>> {
        if self.layout.get().is_none() {
            let found = self.with_delivery(py, |delivery| self.engine().layout(py, delivery))?;
            let _ = self.layout.set(found.flatten());
        }
        Ok(self.layout.get().and_then(Option::as_ref).map(|layout| layout.clone_ref(py)))
    }

    /// Returns the address of the batch's window, and the number of its bytes that the batch uses. None if the batch
    /// has a segment of its own.
    fn window(&self, py: Python<'_>) -> PyResult<Option<(usize, u64)>> {
        let window = |delivery: &mut Received| {
            let window = delivery.backing().window();
            Ok(window.map(|window| (window.address, delivery.len())))
        };
        Ok(self.with_delivery(py, window)?.flatten())
    }

    /// The layout's packed tensors in one pinned tensor of bytes, block by block; None if it has none.
    fn stage<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let layout = self.known_layout()?;
        Ok(self.with_delivery(py, |delivery| layout.stage(py, delivery))?.flatten())
    }

    /// The layout's other tensors, copied to pinned memory.
    fn stage_large<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let layout = self.known_layout()?;
        let large = |delivery: &mut Received| layout.stage_large(py, delivery, true);
        Ok(self.with_delivery(py, large)?.unwrap_or_default())
    }

    /// The layout's other tensors where they lie; they keep the slot. None if the user holds too much already.
    fn large<'py>(&self, py: Python<'py>) -> PyResult<Option<Vec<Bound<'py, PyAny>>>> {
        let layout = self.known_layout()?;
        let large = |delivery: &mut Received| {
            delivery.lease().then(|| layout.stage_large(py, delivery, false)).transpose()
        };
        Ok(self.with_delivery(py, large)?.flatten())
    }
}

impl Arrival {
    /// # Errors
    /// The error that ends or interrupts a program. For any other error, a stand-in for the batch is returned.
    fn unpacked<'py>(&self, py: Python<'py>, delivery: Received) -> PyResult<Bound<'py, PyAny>> {
        self.engine().unpack_unregistered(py, delivery).or_else(|error| {
            let (standing, interrupt) = stand_in(py, error)?;
            match interrupt {
                None => Ok(standing),
                Some(interrupt) => {
                    *self.content.lock() = Content::Object(standing.unbind());
                    Err(interrupt)
                }
            }
        })
    }

    /// Runs `work` with the batch as it came, and returns the result; `None` if the batch is in another form by
    /// now. Another thread finds the batch gone meanwhile.
    fn with_delivery<T>(
        &self,
        py: Python<'_>,
        work: impl FnOnce(&mut Received) -> PyResult<T>,
    ) -> PyResult<Option<T>> {
        let Some(mut lent) = self.lend() else { return Ok(None) };
        caught(py, || work(lent.delivery())).map(Some)
    }

    /// The batch as it came; `None` if it is not that any more. Another thread finds it gone meanwhile: what is done
    /// with it may wait for the interpreter, and a thread that has it for the lock.
    pub(crate) fn lend(&self) -> Option<Lent<'_>> {
        let mut content = self.content.lock();
        match std::mem::replace(&mut *content, Content::Gone) {
            Content::Received(delivery) => Some(Lent { arrival: self, delivery: Some(delivery) }),
            other => {
                *content = other;
                None
            }
        }
    }

    fn known_layout(&self) -> PyResult<&Layout> {
        let layout = self.layout.get().and_then(Option::as_ref);
        layout.map(Py::get).ok_or_else(|| PyRuntimeError::new_err("this batch has no layout"))
    }

    pub(crate) fn of_delivery(engine: Py<Engine>, delivery: Received) -> Self {
        let content = Lock::new(Content::Received(delivery));
        Self { engine: Some(engine), content, layout: OnceLock::new() }
    }

    pub(crate) fn of_object(object: Py<PyAny>) -> Self {
        Self { engine: None, content: Lock::new(Content::Object(object)), layout: OnceLock::new() }
    }

    pub(crate) fn engine(&self) -> &Engine {
        self.engine.as_ref().expect("what has a delivery has an engine").get()
    }
}

/// A batch as it came, put back when dropped.
pub(crate) struct Lent<'a> {
    arrival: &'a Arrival,
    delivery: Option<Received>,
}

impl Lent<'_> {
    pub(crate) fn delivery(&mut self) -> &mut Received {
        self.delivery.as_mut().expect("only taken at the end")
    }

    /// Puts this there instead. The batch as it came is gone.
    pub(crate) fn replace(mut self, content: Content) {
        self.delivery = None;
        *self.arrival.content.lock() = content;
    }
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        if let Some(delivery) = self.delivery.take() {
            *self.arrival.content.lock() = Content::Received(delivery);
        }
    }
}

/// A batch in pinned memory, whose large tensors may still be on their way.
#[pyclass(frozen, module = "ringloader._native")]
pub(crate) struct Pinned {
    // INVARIANT: dropped before the batch, to whose memory it writes.
    pub(super) job: Option<CopyJob>,
    pub(super) batch: Py<PyAny>,
}

#[pymethods]
impl Pinned {
    /// The batch, once all of it has come.
    pub(crate) fn result(&self, py: Python<'_>) -> Py<PyAny> {
        if let Some(job) = &self.job
            && !job.is_over()
        {
            without_interpreter(py, || job.finish());
        }
        self.batch.clone_ref(py)
    }
}
