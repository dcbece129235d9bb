//! Finds a tensor's elements, by torch's C function.

use pyo3::prelude::*;
use ringloader_core::batch::Dtype;
use ringloader_core::batch::wire::MAX_NDIM;

use super::abi::{CPU, DlTensor, ExchangeApi};
use super::names::Torch;

/// A plain CPU tensor, as it lies in memory.
pub(crate) struct Described {
    pub(crate) address: usize,
    pub(crate) dtype: Dtype,
    pub(crate) ndim: usize,
}

/// Describes a strided tensor by torch's C function `api`, and appends its shape and then its strides to `dims`;
/// `None` for what that function refuses or is not on the CPU.
pub(crate) fn describe(
    torch: &Torch,
    api: ExchangeApi,
    tensor: &Bound<'_, PyAny>,
    dims: &mut Vec<i64>,
) -> Option<Described> {
    let mut found = DlTensor {
        data: std::ptr::null_mut(),
        device_type: 0,
        device_id: 0,
        ndim: 0,
        code: 0,
        bits: 0,
        lanes: 0,
        shape: std::ptr::null_mut(),
        strides: std::ptr::null_mut(),
        byte_offset: 0,
    };
    // SAFETY: `describe` is torch's, the interpreter is attached and the object is a tensor; it fills
    // in a view whose pointers are valid while the tensor is, which the caller holds.
    let described = unsafe {
        if (api.describe)(tensor.as_ptr().cast(), &raw mut found) != 0 {
            drop(PyErr::take(tensor.py()));
            return None;
        }
        let ndim = usize::try_from(found.ndim).ok().filter(|&ndim| ndim <= MAX_NDIM)?;
        if found.device_type != CPU {
            return None;
        }
        let dtype = Dtype::from_dlpack(found.code, found.bits, found.lanes)?;
        if ndim > 0 {
            dims.extend_from_slice(std::slice::from_raw_parts(found.shape, ndim));
            dims.extend_from_slice(std::slice::from_raw_parts(found.strides, ndim));
        }
        Described { address: found.data as usize + found.byte_offset as usize, dtype, ndim }
    };
    // DLPack takes some of torch's types for others: integers of less than a byte.
    let is_its_own = described.dtype.itemsize() > 1
        || torch.dtype_of(tensor).is_ok_and(|dtype| dtype == Some(described.dtype));
    is_its_own.then_some(described)
}
