//! Tensors or arrays of one type and shape, copied to where their stack is written.

use std::marker::PhantomData;
use std::ops::Range;
use std::ptr::copy_nonoverlapping;

use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use ringloader_core::batch::Dtype;
use ringloader_core::batch::rows::Place;
use ringloader_core::number::usize_from;
use ringloader_core::os::Segment;
use ringloader_core::sync::Arc;
use ringloader_core::transport::copier::streaming;
use ringloader_core::transport::joint::{Claimed, JointMemory};

use super::batch_memory::BatchMemory;
use crate::gil::{self, exception, run_copy, runs_others};
use crate::strings;
use crate::torch::abi::ExchangeApi;
use crate::torch::elements::{describe, describe_plain};
use crate::torch::names::Torch;
use crate::torch::source::Bytes;
use crate::torch::tensor::contiguous_tensor;

/// Contiguous tensors or arrays of one type and shape, to become the rows of a tensor.
pub(crate) struct Rows<'a, 'py> {
    form: Option<RowForm>,
    /// INVARIANT: where the bytes of each begin. `_items` or `_buffers` keep them.
    addresses: Vec<usize>,
    _items: &'a [Bound<'py, PyAny>],
    _buffers: Vec<PyUntypedBuffer>,
}

/// Memory to which rows are copied.
///
/// INVARIANT: `address` has `nbytes` bytes while the memory's owner is borrowed, and this worker alone reads and writes
/// them.
pub(crate) struct Destination<'a> {
    address: usize,
    nbytes: u64,
    /// The segment of a window, and where in it the memory begins.
    window: Option<(&'a Arc<Segment>, u64)>,
    _owner: PhantomData<&'a ()>,
}

impl<'a> Destination<'a> {
    /// The memory of a batch, which is new.
    pub(super) fn of(memory: &'a BatchMemory<'_>) -> Self {
        Self { address: memory.address(), nbytes: memory.nbytes(), window: None, _owner: PhantomData }
    }

    /// Rows of a batch that all workers make: those of the samples that this worker has claimed.
    ///
    /// # Errors
    /// `RuntimeError` when they do not lie in the batch's window.
    pub(crate) fn in_window(
        tasks: &'a JointMemory,
        claimed: &Claimed,
        place: Place,
        samples: Range<u64>,
    ) -> PyResult<Self> {
        let corrupt = || gil::corrupt("the place of rows");
        let before = place.row_len.checked_mul(samples.start).ok_or_else(corrupt)?;
        let offset = place.offset.checked_add(before).ok_or_else(corrupt)?;
        let nbytes = place.row_len.checked_mul(samples.end - samples.start).ok_or_else(corrupt)?;
        let start = tasks.pointer(claimed, offset, nbytes).map_err(exception)?;
        let window = Some((tasks.bytes(), tasks.window_of(claimed) + offset));
        Ok(Self { address: start.as_ptr() as usize, nbytes, window, _owner: PhantomData })
    }

    /// A contiguous tensor over all of it, where it lies in a window; `None` where it has another number of bytes.
    ///
    /// # Errors
    /// The error that torch raises.
    pub(crate) fn tensor<'py>(
        &self,
        py: Python<'py>,
        dtype: Dtype,
        shape: &[i64],
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let Some((bytes, at)) = self.window else { return Ok(None) };
        if byte_len(shape.iter().copied(), dtype) != Some(usize_from(self.nbytes)) {
            return Ok(None);
        }
        contiguous_tensor(py, Bytes::Window(bytes), at, dtype, shape).map(Some)
    }
}

/// One of them.
struct RowForm {
    dtype: Dtype,
    shape: Vec<i64>,
    /// In bytes; not zero.
    len: usize,
}

impl<'a, 'py> Rows<'a, 'py> {
    fn new(items: &'a [Bound<'py, PyAny>]) -> Self {
        Self { form: None, addresses: Vec::with_capacity(items.len()), _items: items, _buffers: Vec::new() }
    }

    /// `None` unless all of `items` are plain tensors or plain arrays that may be rows, and there are any.
    ///
    /// # Errors
    /// The error that torch raises.
    pub(crate) fn of(torch: &Torch, items: &'a [Bound<'py, PyAny>]) -> PyResult<Option<Self>> {
        let kind = items[0].get_type();
        if kind.is(&torch.tensor) {
            Self::of_tensors(torch, items)
        } else {
            Ok(if kind.is(&torch.ndarray) { Self::of_arrays(torch, items) } else { None })
        }
    }

    /// `None` unless all of `items` are plain tensors whose values are their bytes, and there are any.
    ///
    /// # Errors
    /// The error that torch raises.
    fn of_tensors(torch: &Torch, items: &'a [Bound<'py, PyAny>]) -> PyResult<Option<Self>> {
        let Some(api) = torch.exchange else { return Ok(None) };
        let mut dims = Vec::new();
        if !are_their_bytes(torch, api, items, &mut dims)? {
            return Ok(None);
        }
        let mut rows = Self::new(items);
        for tensor in items {
            dims.clear();
            let Some(found) = describe_plain(torch, tensor, &mut dims)? else { return Ok(None) };
            let (shape, strides) = dims.split_at(found.ndim);
            if !is_contiguous(shape, strides) || !rows.push(found.address, found.dtype, shape.iter().copied())
            {
                return Ok(None);
            }
        }
        Ok(Some(rows))
    }

    /// `None` unless all of `items` are plain arrays that torch takes without a warning, and there are any.
    fn of_arrays(torch: &Torch, items: &'a [Bound<'py, PyAny>]) -> Option<Self> {
        let mut rows = Self::new(items);
        let mut asked = false;
        for array in items {
            if !array.get_type().is(&torch.ndarray) {
                return None;
            }
            let buffer = PyUntypedBuffer::get(array).ok()?;
            let dtype = dtype_of_format(buffer.format().to_bytes(), buffer.item_size())?;
            let is_plain = !buffer.readonly() && buffer.is_c_contiguous() && buffer.dimensions() > 0;
            let shape = || buffer.shape().iter().map(|&size| size as i64);
            if !is_plain
                || !rows.push(buffer.buf_ptr() as usize, dtype, shape())
                || (buffer.shape().contains(&1) && {
                    asked = true;
                    !has_strides_of_torch(array, dtype, 0)
                })
            {
                return None;
            }
            rows._buffers.push(buffer);
        }
        // Their strides are objects, which may bring finalisers about: what these did to an array is torch's matter.
        let is_still = |(array, &address)| {
            PyUntypedBuffer::get(array).is_ok_and(|now| now.buf_ptr() as usize == address)
        };
        (!asked || items.iter().zip(&rows.addresses).all(is_still)).then_some(rows)
    }

    /// Adds a contiguous row. Returns true if it is like those before it.
    fn push(
        &mut self,
        address: usize,
        dtype: Dtype,
        shape: impl ExactSizeIterator<Item = i64> + Clone,
    ) -> bool {
        let is_like = match &self.form {
            // One by one: `memcmp` of no bytes at the address that an empty `Vec` has takes 100 ns.
            Some(form) => form.dtype == dtype && form.shape.iter().copied().eq(shape),
            None => {
                let Some(len) = byte_len(shape.clone(), dtype) else { return false };
                self.form = Some(RowForm { dtype, shape: shape.collect(), len });
                len > 0
            }
        };
        self.addresses.push(address);
        // A tensor whose elements have no memory is one of some other kind.
        is_like && address != 0
    }

    /// Returns the type, shape and bytes of the stacked rows.
    pub(crate) fn stacked(&self) -> Option<(Dtype, Vec<i64>, u64)> {
        let form = self.form.as_ref()?;
        let shape = std::iter::once(self.addresses.len() as i64).chain(form.shape.iter().copied()).collect();
        Some((form.dtype, shape, form.len.checked_mul(self.addresses.len())? as u64))
    }

    /// Copies all rows to `to`, one after the other. `false` where torch must make the batch.
    ///
    /// # Errors
    /// `RuntimeError` if the memory has another number of bytes, or if a tensor is larger than its storage.
    pub(crate) fn copy_to(&self, py: Python<'py>, to: &Destination<'_>) -> PyResult<bool> {
        let (Some(form), Some((.., len))) = (&self.form, self.stacked()) else { return Ok(false) };
        if len != to.nbytes {
            return Err(PyRuntimeError::new_err(format!("{} bytes for {len}", to.nbytes)));
        }
        let (nbytes, to) = (usize_from(to.nbytes), to.address);
        let (addresses, each) = (&self.addresses, form.len);
        let copy = || {
            let targets = (to..).step_by(each);
            // SAFETY: each address has `each` bytes, and the memory has room for all; its bytes have no other user.
            // Nothing is assumed of alignment. No foreign code has run since the addresses were taken, or was seen to
            // have left them as they are. Where other threads may run, buffers and storages are held; those threads must
            // not resize these storages, as while torch stacks the samples.
            unsafe {
                copy_rows(addresses.iter().copied().zip(targets), each, nbytes);
            }
        };
        if !runs_others(nbytes) {
            copy();
            return Ok(true);
        }
        // Arrays have their buffers.
        let tensors = if self._buffers.is_empty() { self._items } else { &[] };
        let spans = addresses.iter().map(|&address| (address, each as u64));
        let Some(_held) = Torch::get(py)?.storages_of(tensors, spans)? else { return Ok(false) };
        run_copy(py, nbytes, copy);
        Ok(true)
    }
}

/// Batches of this many bytes and more go past the caches: a batch would not fit into a core's part of the last cache,
/// beside the batches before it.
const STREAMED: usize = 8 << 20;
/// The shortest row for which that pays.
const LONG: usize = 4 << 10;

/// Copies rows of `len` bytes, `nbytes` in all, each from one address to another.
///
/// # Safety
/// The bytes and the room for them are there, and do not overlap. Nothing is assumed of alignment.
pub(super) unsafe fn copy_rows(rows: impl Iterator<Item = (usize, usize)>, len: usize, nbytes: usize) {
    // SAFETY: the caller's.
    unsafe {
        match len {
            1 => rows.for_each(|(from, to)| *(to as *mut u8) = *(from as *const u8)),
            4 => rows.for_each(|(from, to)| {
                (to as *mut u32).write_unaligned((from as *const u32).read_unaligned());
            }),
            8 => rows.for_each(|(from, to)| {
                (to as *mut u64).write_unaligned((from as *const u64).read_unaligned());
            }),
            LONG.. if nbytes >= STREAMED => {
                rows.for_each(|(from, to)| streaming::copy(from as *const u8, to as *mut u8, len));
            }
            _ => rows.for_each(|(from, to)| copy_nonoverlapping(from as *const u8, to as *mut u8, len)),
        }
    }
}

/// Returns true if the values of all tensors are their bytes. Called before their addresses are taken: torch lets other
/// threads run while it answers. `dims` is written over.
///
/// # Errors
/// The error that torch raises.
pub(super) fn are_their_bytes(
    torch: &Torch,
    api: ExchangeApi,
    items: &[Bound<'_, PyAny>],
    dims: &mut Vec<i64>,
) -> PyResult<bool> {
    let is_tensor = |item: &Bound<'_, PyAny>| item.get_type().is(&torch.tensor);
    let Some(first) = items.first().filter(|first| is_tensor(first)) else { return Ok(false) };
    let Some(found) = describe(torch, api, first, dims) else { return Ok(false) };
    if Torch::may_be_lazy(found.dtype) {
        for item in items {
            if !is_tensor(item) || torch.is_lazy(item, found.dtype)? {
                return Ok(false);
            }
        }
    }
    Ok(true)
}

/// Returns the bytes of a contiguous tensor; `None` if a size is negative, or if their number overflows.
pub(super) fn byte_len(shape: impl Iterator<Item = i64>, dtype: Dtype) -> Option<usize> {
    let sizes = shape.map(|size| usize::try_from(size).ok());
    sizes.chain([Some(dtype.itemsize())]).try_fold(1usize, |len, size| len.checked_mul(size?))
}

/// The element type of an array's buffer, by the letters of Python's `struct`: of this machine's byte order,
/// and where torch takes it too, which refuses C's `unsigned long long`.
pub(super) fn dtype_of_format(format: &[u8], itemsize: usize) -> Option<Dtype> {
    let dtype = match (format, itemsize) {
        (b"?", _) => Dtype::Bool,
        (b"b", _) => Dtype::I8,
        (b"h", _) => Dtype::I16,
        (b"i", _) => Dtype::I32,
        (b"l" | b"q", _) => Dtype::I64,
        (b"B", _) => Dtype::U8,
        (b"H", _) => Dtype::U16,
        (b"I", _) => Dtype::U32,
        (b"L", _) => Dtype::U64,
        (b"e", _) => Dtype::F16,
        (b"f", _) => Dtype::F32,
        (b"d", _) => Dtype::F64,
        (b"Zf", _) => Dtype::C64,
        (b"Zd", _) => Dtype::C128,
        _ => return None,
    };
    (dtype.itemsize() == itemsize).then_some(dtype)
}

/// Returns true if torch takes the strides of an array, leaving out the first `skipped` dimensions. The array's buffer
/// has other strides, which are made up where a dimension is of size 1.
///
/// MIRRORS torch/csrc/utils/tensor_numpy.cpp::tensor_from_numpy
pub(super) fn has_strides_of_torch(array: &Bound<'_, PyAny>, dtype: Dtype, skipped: usize) -> bool {
    let strides = array.getattr(strings::strides(array.py())).and_then(|strides| strides.extract());
    strides.is_ok_and(|strides: Vec<isize>| {
        strides
            .iter()
            .skip(skipped)
            .all(|&stride| stride >= 0 && (stride as usize).is_multiple_of(dtype.itemsize()))
    })
}

/// MIRRORS torch c10/core/Contiguity.h: the stride of a dimension of size 1 says nothing.
pub(super) fn is_contiguous(shape: &[i64], strides: &[i64]) -> bool {
    let mut expected = 1i64;
    shape.iter().zip(strides).rev().all(|(&size, &stride)| {
        let fits = size == 1 || stride == expected;
        // In a tensor without elements, the product may be any number.
        expected = expected.wrapping_mul(size);
        fits
    })
}

/// Writes the bytes of memory.
///
/// # Errors
/// `RuntimeError` if the memory has another number of bytes.
pub(super) fn fill(to: &Destination<'_>, bytes: &[u8]) -> PyResult<()> {
    if bytes.len() as u64 != to.nbytes {
        return Err(PyRuntimeError::new_err(format!("{} bytes for {}", to.nbytes, bytes.len())));
    }
    // SAFETY: the memory has `bytes.len()` bytes, by the check, which have no other user; `bytes` is private memory.
    unsafe { copy_nonoverlapping(bytes.as_ptr(), to.address as *mut u8, bytes.len()) };
    Ok(())
}
