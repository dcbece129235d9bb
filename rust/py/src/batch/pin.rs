//! A batch whose tensors lie in torch's pinned memory.
//!
//! INVARIANT: each tensor's storage begins at its block's start. torch then knows the block by the storage's address, and
//! does not give it out again before copies to a device that still read it are done.

use std::cell::RefCell;

use pyo3::exceptions::PyRuntimeError;
use pyo3::intern;
use pyo3::prelude::*;
use ringloader_core::transport::copier::{Copier, CopyJob, CopyPart};
use ringloader_core::transport::delivery::Delivery;

use super::template::TemplateCache;
use crate::torch::names::Torch;
use crate::torch::tensor::Form;

/// Tensors from this size on are copied by the copier's thread. Below it, handing a copy over costs more than the copy.
const LARGE: u64 = 128 << 10;

/// A pinned batch. INVARIANT: the job writes to memory of the batch's tensors, so it is over before they go.
pub(crate) struct PinnedBatch<'py> {
    pub(crate) job: Option<CopyJob>,
    pub(crate) batch: Bound<'py, PyAny>,
}

/// The batch of a delivery, each tensor pinned as `Tensor.pin_memory` pins it; `None` if there is more to it than
/// tensors with a memory each in lists, tuples and dicts.
///
/// # Errors
/// What torch raises.
pub(crate) fn pin<'py, 'c>(
    py: Python<'py>,
    cache: &TemplateCache,
    delivery: &Delivery,
    copier: impl FnOnce() -> &'c Copier,
) -> PyResult<Option<PinnedBatch<'py>>> {
    let torch = Torch::get(py)?;
    let parts = RefCell::new(Vec::new());
    let pinned = |form: &Form<'_>| {
        if form.nbytes() >= LARGE
            && let Some(span) = form.dense_bytes(delivery)?
        {
            let (shape, strides) = form.shape_and_strides();
            let tensor = torch.new_pinned(py, form.dtype(), shape, strides)?;
            let (from, len) = span.place();
            let into: usize = tensor.call_method0(intern!(py, "data_ptr"))?.extract()?;
            if tensor.getattr(intern!(py, "nbytes"))?.extract::<usize>()? != len {
                return Err(PyRuntimeError::new_err("torch made a tensor of another size"));
            }
            // SAFETY: the span's bytes stay while the job has the backing; the tensor's stay until the job is over, by
            // the invariant of `PinnedBatch`, and no one else knows of it before.
            parts.borrow_mut().push(unsafe { CopyPart::new(from, into as *mut u8, len) });
            return Ok(tensor);
        }
        form.tensor(py, delivery, None)?.call_method0(intern!(py, "pin_memory"))
    };
    let batch = cache.with(py, delivery, |template| template.make_of(py, &pinned))?;
    let Some(batch) = batch else { return Ok(None) };
    let parts = parts.into_inner();
    let job = (!parts.is_empty()).then(|| copier().copy(parts, delivery.backing().clone()));
    Ok(Some(PinnedBatch { job, batch }))
}
