//! A tensor of indices, read in place.

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use ringloader_core::plan::Indices;

use crate::torch::names::Torch;

/// The int64 elements of a tensor, as a sampler's indices.
#[derive(Debug)]
pub(crate) struct TensorIndices {
    address: usize,
    len: usize,
    /// Keeps the memory, which is not written again: torch drew it for this alone.
    _tensor: Py<PyAny>,
}

impl TensorIndices {
    /// # Errors
    /// `RuntimeError` unless it is a contiguous one-dimensional int64 tensor on the CPU.
    pub(crate) fn new(tensor: &Bound<'_, PyAny>) -> PyResult<Self> {
        let torch = Torch::get(tensor.py())?;
        let plain = torch.int64_vector(tensor)?;
        let Some((address, len)) = plain else {
            let text = format!("indices must be a contiguous int64 vector on the CPU, not {tensor:?}");
            return Err(PyRuntimeError::new_err(text));
        };
        Ok(Self { address, len, _tensor: tensor.clone().unbind() })
    }
}

impl Indices for TensorIndices {
    fn as_slice(&self) -> &[i64] {
        if self.len == 0 {
            return &[];
        }
        // SAFETY: torch's contiguous int64 memory of that length, aligned for it, which `_tensor` keeps and
        // which is not written again.
        unsafe { std::slice::from_raw_parts(self.address as *const i64, self.len) }
    }
}
