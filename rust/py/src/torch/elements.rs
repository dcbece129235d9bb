//! Finds the elements of tensors and arrays in memory, by torch's C function and numpy's C structure.

use std::ffi::{c_char, c_int, c_void};

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::PyCapsule;
use ringloader_core::batch::Dtype;
use ringloader_core::batch::wire::MAX_NDIM;
use ringloader_core::number::usize_from;
use ringloader_core::plan::Indices;

use super::abi::{CPU, DlTensor, ExchangeApi};
use super::names::Torch;
use crate::strings;

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
        Described { address: found.data as usize + usize_from(found.byte_offset), dtype, ndim }
    };
    // DLPack takes some of torch's types for others: integers of less than a byte.
    let is_its_own = described.dtype.itemsize() > 1
        || torch.dtype_of(tensor).is_ok_and(|dtype| dtype == Some(described.dtype));
    is_its_own.then_some(described)
}

/// As [`describe`], of a tensor of torch's own class that is no more than its elements, and of whose type torch makes
/// tensors without a warning; `None` of any other object.
///
/// # Errors
/// The error that torch raises.
pub(crate) fn describe_plain(
    torch: &Torch,
    object: &Bound<'_, PyAny>,
    dims: &mut Vec<i64>,
) -> PyResult<Option<Described>> {
    let Some(api) = torch.exchange else { return Ok(None) };
    if !object.get_type().is(&torch.tensor) || torch.is_more(object)? {
        return Ok(None);
    }
    Ok(describe(torch, api, object, dims).filter(|found| found.dtype != Dtype::C32))
}

/// numpy's `PyArrayInterface`, which `__array_struct__` shows of every array, whatever its type.
#[repr(C)]
struct ArrayInterface {
    two: c_int,
    ndim: c_int,
    kind: c_char,
    itemsize: c_int,
    flags: c_int,
    shape: *const isize,
    strides: *const isize,
    data: *const c_void,
    descr: *const c_void,
}

/// Returns the address of a contiguous array's content, and the number of its bytes. Runs no foreign code: neither
/// numpy's C function nor what it makes brings the collector about.
///
/// # Errors
/// The error that numpy raises.
pub(crate) fn memory_of_array(array: &Bound<'_, PyAny>) -> PyResult<Option<(usize, u64)>> {
    let shown = array.getattr(strings::array_struct(array.py()))?.cast_into::<PyCapsule>()?;
    let Ok(shown) = shown.pointer_checked(None) else { return Ok(None) };
    // SAFETY: by numpy's array protocol such a capsule points to that structure, whose `shape` has `ndim` numbers, and
    // which lives as long as the capsule.
    let (data, itemsize, shape) = unsafe {
        let ArrayInterface { ndim, itemsize, shape, data, .. } = shown.cast::<ArrayInterface>().read();
        let ndim = usize::try_from(ndim).unwrap_or(0);
        (data, itemsize, if ndim == 0 { &[] } else { std::slice::from_raw_parts(shape, ndim) })
    };
    let len = shape.iter().try_fold(itemsize as u64, |len, &size| len.checked_mul(size as u64));
    Ok(len.map(|len| (data as usize, len)))
}

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
