//! Memory of Python objects: described, copied to where a batch is written, read as indices.

use std::ffi::{c_char, c_int, c_void};
use std::ptr::{NonNull, copy_nonoverlapping};

use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyCFunction, PyCapsule, PyString};
use pyo3::{ffi, intern};
use ringloader_core::batch::Dtype;
use ringloader_core::batch::wire::MAX_NDIM;
use ringloader_core::os::Segment;
use ringloader_core::plan::Indices;
use ringloader_core::transport::port::{Chunk, Commit};

use super::dlpack::{CPU, DETACH, DlTensor, ExchangeApi};
use super::enter::{exception, without_interpreter};
use super::torch::Torch;

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

/// A method of one of torch's classes without arguments, asked by its C function where it is one. Of one class only.
pub(crate) struct Question {
    name: Py<PyString>,
    /// Looked up for the first object that is asked: a tensor made for it would go by the default device, or by a mode.
    function: PyOnceLock<Option<ffi::PyCFunction>>,
}

impl Question {
    pub(crate) fn new(py: Python<'_>, name: &str) -> Self {
        Self { name: PyString::new(py, name).unbind(), function: PyOnceLock::new() }
    }

    /// The answer for an exact object of the class.
    ///
    /// # Errors
    /// What the method raises.
    pub(crate) fn ask<'py>(&self, object: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let py = object.py();
        let name = self.name.bind(py);
        match self.function.get_or_init(py, || c_function(object, name)) {
            // SAFETY: the function belongs to a method of the class, of which `object` is one, and takes no
            // arguments; the interpreter is attached. It returns a new reference, or none with an error set.
            Some(function) => unsafe {
                Bound::from_owned_ptr_or_err(py, function(object.as_ptr(), std::ptr::null_mut()))
            },
            None => object.call_method0(name),
        }
    }

    /// Whether asking calls the C function and nothing else.
    pub(crate) fn is_direct(&self, py: Python<'_>) -> bool {
        matches!(self.function.get(py), Some(Some(_)))
    }
}

/// The C function of a method that the class of `object` has, if it takes no arguments.
fn c_function(object: &Bound<'_, PyAny>, name: &Bound<'_, PyString>) -> Option<ffi::PyCFunction> {
    // From the class, since an object may have something else by that name.
    let method = object.get_type().getattr(name).ok()?.call_method1("__get__", (object,)).ok()?;
    let method = method.cast_into_exact::<PyCFunction>().ok()?;
    // SAFETY: it is a built-in function, by its exact type.
    let (receiver, flags, function) = unsafe {
        let method = method.as_ptr();
        (
            ffi::PyCFunction_GetSelf(method),
            ffi::PyCFunction_GetFlags(method),
            ffi::PyCFunction_GetFunction(method),
        )
    };
    // Bound to `object`, it is told of such objects, and not of some module.
    function.filter(|_| receiver == object.as_ptr() && flags == ffi::METH_NOARGS)
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

/// Where the content of a contiguous array lies, and how many bytes it is. Runs no foreign code: neither numpy's C
/// function nor what it makes brings the collector about.
///
/// # Errors
/// What numpy raises.
pub(crate) fn place_of_array(array: &Bound<'_, PyAny>) -> PyResult<Option<(usize, u64)>> {
    let shown = array.getattr(intern!(array.py(), "__array_struct__"))?.cast_into::<PyCapsule>()?;
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

/// One copy: from an object's memory to an offset of the batch's place.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Copy {
    pub(crate) from: usize,
    pub(crate) to: u64,
    pub(crate) len: u64,
    /// Whether the bytes stay where they are while their object is held, whatever other threads do.
    pub(crate) keeps: bool,
}

/// Where a batch is written.
pub(crate) enum Target<'a, 'p> {
    Slot(&'a Commit<'p>),
    Own(&'a Segment),
}

impl Target<'_, '_> {
    fn pointer(&self, offset: u64, len: u64) -> PyResult<NonNull<u8>> {
        match self {
            Self::Slot(commit) => commit.pointer(offset, len),
            Self::Own(segment) => segment.pointer(offset, len),
        }
        .map_err(exception)
    }

    /// Copies all `pieces` of objects in `held`, and `meta` to its offset. No foreign code has run since the pieces'
    /// addresses were taken.
    ///
    /// # Errors
    /// `RuntimeError` when a range does not lie in the place.
    pub(crate) fn write(
        &self,
        py: Python<'_>,
        pieces: &[Copy],
        held: &[Py<PyAny>],
        meta_at: u64,
        meta: &[u8],
    ) -> PyResult<()> {
        // The pieces point into these objects: whoever calls this still has them.
        let _ = held;
        let mut large = Vec::new();
        for piece in pieces {
            let to = self.pointer(piece.to, piece.len)?.as_ptr();
            if piece.keeps && piece.len >= DETACH as u64 {
                large.push((piece.from, to as usize, piece.len as usize));
                continue;
            }
            // SAFETY: `from` has `len` bytes, by the description of an object that `held` keeps, and the interpreter
            // was not let go since; `to` was checked to lie in memory that this worker alone writes, and which no
            // source overlaps: it is behind all that objects have of the slot.
            unsafe { copy_nonoverlapping(piece.from as *const u8, to, piece.len as usize) };
        }
        let to = self.pointer(meta_at, meta.len() as u64)?;
        // SAFETY: as above; `meta` is private memory.
        unsafe { copy_nonoverlapping(meta.as_ptr(), to.as_ptr(), meta.len()) };
        if !large.is_empty() {
            // Last, and all at once: other threads may do anything meanwhile, and nothing is looked at after.
            without_interpreter(py, || {
                for (from, to, len) in large {
                    // SAFETY: as above. What keeps the bytes, a storage or `bytes`, is held beside the pieces.
                    unsafe { copy_nonoverlapping(from as *const u8, to as *mut u8, len) };
                }
            });
        }
        Ok(())
    }
}

/// Contiguous tensors or arrays of one type and shape, to become the rows of a tensor.
pub(crate) struct Rows<'a, 'py> {
    form: Option<RowForm>,
    /// INVARIANT: where the bytes of each begin. `_items` or `_buffers` keep them.
    addresses: Vec<usize>,
    _items: &'a [Bound<'py, PyAny>],
    _buffers: Vec<PyUntypedBuffer>,
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

    /// `None` unless all of `items` are plain tensors whose values are their bytes, and there are any.
    ///
    /// # Errors
    /// What torch raises.
    pub(crate) fn of_tensors(torch: &Torch, items: &'a [Bound<'py, PyAny>]) -> PyResult<Option<Self>> {
        let Some(api) = torch.exchange else { return Ok(None) };
        let mut rows = Self::new(items);
        let mut dims = Vec::new();
        for tensor in items {
            dims.clear();
            let is_plain = tensor.get_type().is(&torch.tensor) && !torch.is_more(tensor)?;
            let Some(found) = is_plain.then(|| describe(torch, api, tensor, &mut dims)).flatten() else {
                return Ok(None);
            };
            let (shape, strides) = dims.split_at(found.ndim);
            if !is_contiguous(shape, strides)
                // torch warns when it makes one of these.
                || found.dtype == Dtype::C32
                || !rows.push(found.address, found.dtype, shape.iter().copied())
                || torch.is_lazy(tensor, found.dtype)?
            {
                return Ok(None);
            }
        }
        Ok(Some(rows))
    }

    /// `None` unless all of `items` are plain arrays that torch takes without a warning, and there are any.
    pub(crate) fn of_arrays(torch: &Torch, items: &'a [Bound<'py, PyAny>]) -> Option<Self> {
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
                    !has_strides_of_torch(array, dtype)
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

    /// Whether a contiguous one is like those before it.
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
        // Without memory behind its elements it is a tensor of some other kind.
        is_like && address != 0
    }

    /// What they become: its type, shape and bytes.
    pub(crate) fn stacked(&self) -> Option<(Dtype, Vec<i64>, u64)> {
        let form = self.form.as_ref()?;
        let shape = std::iter::once(self.addresses.len() as i64).chain(form.shape.iter().copied()).collect();
        Some((form.dtype, shape, form.len.checked_mul(self.addresses.len())? as u64))
    }

    /// Copies all of them into `chunk`, one behind the other.
    ///
    /// # Errors
    /// `RuntimeError` unless it has just so many bytes.
    pub(crate) fn copy_to(&self, py: Python<'_>, chunk: &Chunk) -> PyResult<()> {
        let (Some(form), Some((.., len))) = (&self.form, self.stacked()) else { return Ok(()) };
        if len != chunk.len {
            return Err(PyRuntimeError::new_err(format!("{} bytes for {len}", chunk.len)));
        }
        let (addresses, each, to) = (&self.addresses, form.len, chunk.address);
        let copy = || {
            let places = (to..).step_by(each);
            // SAFETY: each address has `each` bytes, and the chunk has room for all; nobody else has its bytes.
            // Nothing is assumed of alignment. No foreign code has run since the addresses were taken. Without the
            // interpreter, other threads must leave the samples' memory where it is, as while torch stacks them.
            unsafe {
                match each {
                    4 => addresses.iter().zip(places).for_each(|(&from, to)| {
                        (to as *mut u32).write_unaligned((from as *const u32).read_unaligned());
                    }),
                    8 => addresses.iter().zip(places).for_each(|(&from, to)| {
                        (to as *mut u64).write_unaligned((from as *const u64).read_unaligned());
                    }),
                    _ => addresses.iter().zip(places).for_each(|(&from, to)| {
                        copy_nonoverlapping(from as *const u8, to as *mut u8, each);
                    }),
                }
            }
        };
        if chunk.len < DETACH as u64 {
            copy()
        } else {
            without_interpreter(py, copy)
        }
        Ok(())
    }
}

/// Of a contiguous tensor; `None` where that is no number.
fn byte_len(shape: impl Iterator<Item = i64>, dtype: Dtype) -> Option<usize> {
    let sizes = shape.map(|size| usize::try_from(size).ok());
    sizes.chain([Some(dtype.itemsize())]).try_fold(1usize, |len, size| len.checked_mul(size?))
}

/// The element type of an array's buffer, by the letters of Python's `struct`: of this machine's byte order,
/// and where torch takes it too, which refuses C's `unsigned long long`.
fn dtype_of_format(format: &[u8], itemsize: usize) -> Option<Dtype> {
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

/// Whether torch takes the strides of an array. Its buffer has others, made up where a dimension is of size 1.
///
/// MIRRORS torch/csrc/utils/tensor_numpy.cpp::tensor_from_numpy
fn has_strides_of_torch(array: &Bound<'_, PyAny>, dtype: Dtype) -> bool {
    let strides = array.getattr(intern!(array.py(), "strides")).and_then(|strides| strides.extract());
    strides.is_ok_and(|strides: Vec<isize>| {
        strides.iter().all(|&stride| stride >= 0 && (stride as usize).is_multiple_of(dtype.itemsize()))
    })
}

/// MIRRORS torch c10/core/Contiguity.h: the stride of a dimension of size 1 says nothing.
fn is_contiguous(shape: &[i64], strides: &[i64]) -> bool {
    let mut expected = 1;
    shape.iter().zip(strides).rev().all(|(&size, &stride)| {
        let fits = size == 1 || stride == expected;
        expected *= size;
        fits
    })
}

/// Writes a chunk's bytes.
///
/// # Errors
/// `RuntimeError` unless it has just so many.
pub(crate) fn fill(chunk: &Chunk, bytes: &[u8]) -> PyResult<()> {
    if bytes.len() as u64 != chunk.len {
        return Err(PyRuntimeError::new_err(format!("{} bytes for {}", chunk.len, bytes.len())));
    }
    // SAFETY: the chunk has so many bytes, which nobody else has; `bytes` is private memory.
    unsafe { copy_nonoverlapping(bytes.as_ptr(), chunk.address as *mut u8, bytes.len()) };
    Ok(())
}

/// The int64 elements of a tensor, as a sampler's indices.
#[derive(Debug)]
pub(crate) struct TensorIndices {
    address: usize,
    len: usize,
    /// Keeps the memory, which nobody writes: torch drew it for this and gave it to nobody else.
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
        // nobody writes.
        unsafe { std::slice::from_raw_parts(self.address as *const i64, self.len) }
    }
}
