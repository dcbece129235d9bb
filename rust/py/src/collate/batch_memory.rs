//! Memory for a tensor of a batch: in the slot of this worker, shared as torch's workers have it, or torch's own.

use pyo3::prelude::*;
use ringloader_core::batch::Dtype;
use ringloader_core::transport::port::Chunk;

use crate::torch::names::Torch;
use crate::torch::tensor::tensor_over_chunk;
use crate::transport::port::Port;

/// The memory that this process has for batches.
#[derive(Clone, Copy)]
pub(super) struct Allocator<'a, 'py> {
    pub(super) py: Python<'py>,
    /// The port, in a worker of ours.
    pub(super) port: Option<&'a Port>,
    /// In another worker: torch's function that takes a number of bytes and makes a storage, or returns None.
    pub(super) new_shared: Option<&'a Bound<'py, PyAny>>,
}

/// Memory for the elements of a contiguous tensor. The caller writes their bytes.
pub(super) struct BatchMemory<'py> {
    dtype: Dtype,
    shape: Vec<i64>,
    /// INVARIANT: the number of bytes that `allocation` has.
    nbytes: u64,
    allocation: Allocation<'py>,
}

enum Allocation<'py> {
    Slot(Chunk),
    /// Torch's tensor, and where its bytes begin.
    Own(Bound<'py, PyAny>, usize),
}

impl<'py> Allocator<'_, 'py> {
    fn torchs(self, dtype: Dtype, shape: &[i64], nbytes: u64) -> PyResult<Allocation<'py>> {
        let (py, torch) = (self.py, Torch::get(self.py)?);
        let strides = (0..shape.len()).map(|dim| shape[dim + 1..].iter().product()).collect();
        let shared = self.new_shared.map(|new_shared| new_shared.call1((nbytes,))).transpose()?;
        let tensor = match shared.filter(|storage| !storage.is_none()) {
            Some(storage) => torch.tensor_in(&storage, dtype, 0, shape.to_vec(), strides)?,
            None => torch.new_on_cpu(py, dtype, shape.to_vec(), strides)?,
        };
        let address = torch.new_address(&tensor)?;
        Ok(Allocation::Own(tensor, address))
    }
}

impl<'py> BatchMemory<'py> {
    /// `None` for no bytes, or more than there can be.
    ///
    /// # Errors
    /// `OSError` when no pages are left; what torch raises.
    pub(super) fn new(
        allocator: Allocator<'_, 'py>,
        dtype: Dtype,
        shape: Vec<i64>,
    ) -> PyResult<Option<Self>> {
        let itemsize = dtype.itemsize() as i64;
        let Some(nbytes) = shape.iter().try_fold(itemsize, |len, &size| len.checked_mul(size)) else {
            return Ok(None);
        };
        let Some(nbytes) = u64::try_from(nbytes).ok().filter(|&nbytes| nbytes > 0) else { return Ok(None) };
        let allocation = match allocator.port.map(|port| port.allocate(nbytes)).transpose()?.flatten() {
            Some(chunk) => Allocation::Slot(chunk),
            None => allocator.torchs(dtype, &shape, nbytes)?,
        };
        Ok(Some(Self { dtype, shape, nbytes, allocation }))
    }

    /// Takes such memory in the slot of this worker; `None` where the slot has no room either.
    ///
    /// # Errors
    /// `OSError` when no pages are left.
    pub(super) fn in_slot(port: &Port, dtype: Dtype, shape: Vec<i64>, nbytes: u64) -> PyResult<Option<Self>> {
        let chunk = port.allocate(nbytes)?;
        Ok(chunk.map(|chunk| Self { dtype, shape, nbytes: chunk.len(), allocation: Allocation::Slot(chunk) }))
    }

    /// Returns true if code that is not ours may have run while this was made.
    pub(super) fn is_torchs(&self) -> bool {
        matches!(self.allocation, Allocation::Own(..))
    }

    /// Returns the address of the bytes, which have no other user.
    pub(super) fn address(&self) -> usize {
        match &self.allocation {
            Allocation::Slot(chunk) => chunk.address(),
            Allocation::Own(_, address) => *address,
        }
    }

    pub(super) fn nbytes(&self) -> u64 {
        self.nbytes
    }

    /// The tensor, contiguous.
    ///
    /// # Errors
    /// The error that torch raises.
    pub(super) fn into_tensor(self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        match self.allocation {
            Allocation::Slot(chunk) => tensor_over_chunk(py, chunk, self.dtype, &self.shape),
            Allocation::Own(tensor, _) => Ok(tensor),
        }
    }
}
