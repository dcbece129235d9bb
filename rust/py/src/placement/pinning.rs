//! Batches whose tensors lie in torch's pinned memory, as a Python class.
//!
//! INVARIANT: each tensor's storage begins at its block's start. torch then knows the block by the storage's address,
//! and does not give it out again before copies to a device that still read it are done.

use std::cell::{Cell, RefCell};
use std::sync::OnceLock;

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use ringloader_core::transport::copier::{Copier, CopyPart};
use ringloader_core::transport::received::Received;

use super::arrival::{Arrival, Content, Pinned};
use crate::batch::template::TemplateCache;
use crate::caught::caught;
use crate::strings;
use crate::torch::names::Torch;
use crate::torch::source::Span;
use crate::torch::tensor::TensorForm;

/// Copies batches to torch's pinned memory; large tensors on a thread of its own, which begins with the first of them.
#[pyclass(frozen, module = "ringloader._native")]
pub(crate) struct Pinner(OnceLock<Copier>);

#[pymethods]
impl Pinner {
    #[new]
    fn new() -> Self {
        Self(OnceLock::new())
    }

    /// Begins to pin; the same object each time. Its slot goes back once it is copied. None, and nothing happens, for a
    /// batch that is more than tensors, each with memory of its own, in lists, tuples and dicts.
    fn pin(&self, py: Python<'_>, arrival: &Arrival) -> PyResult<Option<Py<Pinned>>> {
        if let Content::Pinned(pinned) = &*arrival.content.lock() {
            return Ok(Some(pinned.clone_ref(py)));
        }
        let Some(mut lent) = arrival.lend() else { return Ok(None) };
        let delivery = lent.delivery();
        let pinned = caught(py, || {
            let made = pin(py, arrival.engine().templates(), delivery, || self.0.get_or_init(Copier::new))?;
            made.map(|made| Py::new(py, made)).transpose()
        })?;
        if let Some(pinned) = &pinned {
            lent.replace(Content::Pinned(pinned.clone_ref(py)));
        }
        Ok(pinned)
    }
}

/// Tensors from this size on are copied by the copier's thread. Below it, handing a copy over costs more than the copy.
const LARGE: u64 = 128 << 10;

/// The batch of a delivery, each tensor pinned as `Tensor.pin_memory` pins it; `None` if there is more to it than
/// tensors with a memory each in lists, tuples and the values of dicts, or a class that pins itself.
///
/// # Errors
/// The error that torch raises.
fn pin<'c>(
    py: Python<'_>,
    cache: &TemplateCache,
    delivery: &Received,
    copier: impl FnOnce() -> &'c Copier,
) -> PyResult<Option<Pinned>> {
    let torch = Torch::get(py)?;
    let made = cache.with(py, delivery, |template| {
        if !template.is_pinned_by_leaves {
            return Ok(None);
        }
        let prototypes = template.prototypes(|form| prototype(py, torch, delivery, form))?;
        let count = Cell::new(0);
        let parts = RefCell::new(Vec::new());
        let batch = template.make_of(py, &|form| {
            let number = count.replace(count.get() + 1);
            let dense = form.dense_bytes(delivery)?;
            if form.nbytes() >= LARGE
                && let Some(span) = dense
            {
                let (shape, strides) = form.shape_and_strides();
                let tensor = torch.new_pinned(py, form.dtype(), shape, strides)?;
                parts.borrow_mut().push(part(torch, &span, &tensor)?);
                Ok(tensor)
            } else if let Some(prototype) = prototypes.and_then(|all| all[number].as_ref())
                && let Some(span) = dense
            {
                let tensor = torch.pinned_like(prototype.bind(py))?;
                part(torch, &span, &tensor)?.copy_now();
                Ok(tensor)
            } else {
                form.tensor(py, delivery, None)?.call_method0(strings::pin_memory(py))
            }
        })?;
        Ok(Some((batch, parts.into_inner())))
    })?;
    let Some((batch, parts)) = made.flatten() else { return Ok(None) };
    let job = (!parts.is_empty()).then(|| copier().copy(parts, delivery.backing().clone()));
    Ok(Some(Pinned { job, batch: batch.unbind() }))
}

/// A tensor that is small and dense is made like another one.
fn prototype(
    py: Python<'_>,
    torch: &Torch,
    delivery: &Received,
    form: &TensorForm<'_>,
) -> PyResult<Option<Py<PyAny>>> {
    if form.nbytes() >= LARGE || form.dense_bytes(delivery)?.is_none() {
        return Ok(None);
    }
    let (shape, strides) = form.shape_and_strides();
    torch.new_on_cpu(py, form.dtype(), shape, strides).map(|tensor| Some(tensor.unbind()))
}

/// Returns the part to copy to fill a new tensor.
fn part(torch: &Torch, span: &Span<'_>, tensor: &Bound<'_, PyAny>) -> PyResult<CopyPart> {
    let (from, len) = span.address_and_len();
    if tensor.getattr(strings::nbytes(tensor.py()))?.extract::<usize>()? != len {
        return Err(PyRuntimeError::new_err("torch made a tensor of another size"));
    }
    let into = torch.new_address(tensor)? as *mut u8;
    // SAFETY: the span's bytes stay while the delivery does, or the job that has its backing; the tensor's are in
    // this process's memory, by the check, stay until the job is over, by the invariant of `Pinned`, and no one
    // else knows of it before.
    Ok(unsafe { CopyPart::new(from, into, len) })
}
