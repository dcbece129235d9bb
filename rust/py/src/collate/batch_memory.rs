//! Memory for a tensor of a batch: in the slot of this worker, or torch's own.

use pyo3::prelude::*;
use ringloader_core::batch::Dtype;
use ringloader_core::transport::port::Chunk;

use crate::class::port::Port;
use crate::torch::names::Torch;
use crate::torch::tensor::tensor_over_chunk;

/// Memory of so many elements in a row, whose bytes are to be written.
pub(super) struct BatchMemory<'py> {
    dtype: Dtype,
    shape: Vec<i64>,
    /// INVARIANT: so many bytes are at the place.
    nbytes: u64,
    place: Place<'py>,
}

enum Place<'py> {
    Slot(Chunk),
    /// Torch's tensor, and where its bytes begin.
    Own(Bound<'py, PyAny>, usize),
}

impl<'py> BatchMemory<'py> {
    /// In the slot that `port` fills, if there is one and room in it. `None` for no bytes, or more than there can be.
    ///
    /// # Errors
    /// `OSError` when pages cannot be had; what torch raises.
    pub(super) fn new(
        py: Python<'py>,
        port: Option<&Port>,
        dtype: Dtype,
        shape: Vec<i64>,
    ) -> PyResult<Option<Self>> {
        let itemsize = dtype.itemsize() as i64;
        let Some(nbytes) = shape.iter().try_fold(itemsize, |len, &size| len.checked_mul(size)) else {
            return Ok(None);
        };
        let Some(nbytes) = u64::try_from(nbytes).ok().filter(|&nbytes| nbytes > 0) else { return Ok(None) };
        let chunk = port.map(|port| port.allocate(nbytes)).transpose()?.flatten();
        let place = match chunk {
            Some(chunk) => Place::Slot(chunk),
            None => {
                let torch = Torch::get(py)?;
                let strides = (0..shape.len()).map(|dim| shape[dim + 1..].iter().product()).collect();
                let tensor = torch.new_on_cpu(py, dtype, shape.clone(), strides)?;
                let address = torch.new_address(&tensor)?;
                Place::Own(tensor, address)
            }
        };
        Ok(Some(Self { dtype, shape, nbytes, place }))
    }

    /// Whether code that is not ours may have run in making it.
    pub(super) fn is_torchs(&self) -> bool {
        matches!(self.place, Place::Own(..))
    }

    /// Where its bytes begin, which have no other user.
    pub(super) fn address(&self) -> usize {
        match &self.place {
            Place::Slot(chunk) => chunk.address(),
            Place::Own(_, address) => *address,
        }
    }

    pub(super) fn nbytes(&self) -> u64 {
        self.nbytes
    }

    /// The tensor, contiguous.
    ///
    /// # Errors
    /// What torch raises.
    pub(super) fn into_tensor(self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        match self.place {
            Place::Slot(chunk) => tensor_over_chunk(py, chunk, self.dtype, &self.shape),
            Place::Own(tensor, _) => Ok(tensor),
        }
    }
}
