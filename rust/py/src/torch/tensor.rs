//! Tensors over memory, made by the DLPack structures.
//!
//! INVARIANT D1: what a tensor made here points to is kept by its [`Keeper`](super::source::Keeper), or lies in the
//! same allocation as its header, and is dropped by the deleter alone, once. A header that several share memory with is
//! kept by its own keeper.
//! INVARIANT D2: the deleter runs on any thread, with or without the interpreter, with an exception pending, at exit
//! and in forked children: it calls no Python and does not panic. It takes no lock but that of what is kept for
//! children, where this process has forked since: for a moment, and never in a child. Where torch moves a storage while
//! views of it may live, [`Kept`](super::header::Kept) has what the deleter would drop.
//! INVARIANT D3: shape, strides and length given to torch were checked against the memory's length:
//! they are those of a [`Leaf`], which only a parsed table has, one-dimensional, or checked here.

use std::borrow::Cow;
use std::cell::RefCell;
use std::ptr::NonNull;

use pyo3::exceptions::PyRuntimeError;
use pyo3::ffi;
use pyo3::prelude::*;
use ringloader_core::batch::wire::check_tensor;
use ringloader_core::batch::{Dtype, Leaf, LeafKind};
use ringloader_core::transport::port::Chunk;
use ringloader_core::transport::received::Received;

use super::abi::{ExchangeApi, Legacy, Versioned};
use super::header::drop_or_defer;
use super::header::{Dim, Header, build, drop_header};
use super::memory::Copies;
use super::names::Torch;
use super::source::{Bytes, Source, Span};
use crate::strings;

/// A tensor of a batch, but for the batch.
///
/// INVARIANT: it is a leaf of a parsed table, so shape and strides fit into `nbytes`.
pub(crate) struct TensorForm<'a> {
    dtype: Dtype,
    /// The shape, then the strides.
    dims: Cow<'a, [Dim]>,
    offset: u64,
    nbytes: u64,
}

impl<'a> TensorForm<'a> {
    /// `None` for a leaf that is no tensor.
    pub(crate) fn of(leaf: &Leaf<'a>) -> Option<Self> {
        let LeafKind::Tensor(dtype) = leaf.kind() else { return None };
        let record = leaf.storage_record();
        let offset = record.offset + leaf.byte_offset();
        let dims = Cow::Borrowed(leaf.all_dims().as_bytes());
        Some(Self { dtype, dims, offset, nbytes: record.nbytes - leaf.byte_offset() })
    }

    /// For batches whose tables are the same.
    pub(crate) fn into_owned(self) -> TensorForm<'static> {
        TensorForm { dims: Cow::Owned(self.dims.into_owned()), ..self }
    }

    /// Bytes of memory that such a tensor has.
    pub(crate) fn nbytes(&self) -> u64 {
        self.nbytes
    }

    pub(crate) fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Returns the shape and the strides, in elements.
    pub(crate) fn shape_and_strides(&self) -> (Vec<i64>, Vec<i64>) {
        let mut dims: Vec<i64> = self.dims.iter().map(|dim| i64::from_le_bytes(*dim)).collect();
        let strides = dims.split_off(dims.len() / 2);
        (dims, strides)
    }

    /// The bytes that its elements take, if they lie in one piece without gaps, each once, in any order of dimensions.
    pub(crate) fn dense_len(&self) -> Option<u64> {
        let (shape, strides) = self.shape_and_strides();
        let mut order: Vec<usize> = (0..shape.len()).filter(|&dim| shape[dim] != 1).collect();
        order.sort_by_key(|&dim| strides[dim]);
        let mut len = 1;
        for dim in order {
            if strides[dim] != len {
                return None;
            }
            len *= shape[dim];
        }
        Some(len as u64 * self.dtype.itemsize() as u64)
    }

    /// The bytes of its elements, if they lie in one piece.
    pub(crate) fn dense_bytes<'d>(&self, delivery: &'d Received) -> PyResult<Option<Span<'d>>> {
        self.dense_len().map(|len| Span::new(delivery, self.offset, len)).transpose()
    }

    /// Such a tensor over the bytes of a batch or sample, or over a copy of them.
    ///
    /// # Errors
    /// `RuntimeError` when they do not lie there; what torch raises.
    pub(crate) fn tensor<'py, 'b>(
        &self,
        py: Python<'py>,
        bytes: impl Into<Bytes<'b>>,
        copies: Option<&RefCell<Copies>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let source = Span::new(bytes, self.offset, self.nbytes)?.source(copies);
        make_tensor(py, source, self.dtype, &self.dims)
    }
}

/// All bytes of a span as a flat uint8 tensor, over them or over a copy.
///
/// # Errors
/// The error that torch raises.
pub(crate) fn flat<'py>(
    py: Python<'py>,
    span: &Span<'_>,
    copies: Option<&RefCell<Copies>>,
) -> PyResult<Bound<'py, PyAny>> {
    make_tensor(py, span.source(copies), Dtype::U8, &flat_dims(span.len))
}

/// A contiguous tensor over all bytes of a chunk of the slot that is being filled.
///
/// # Errors
/// `RuntimeError` when it does not fit into them; what torch raises.
pub(crate) fn tensor_over_chunk<'py>(
    py: Python<'py>,
    chunk: Chunk,
    dtype: Dtype,
    shape: &[i64],
) -> PyResult<Bound<'py, PyAny>> {
    let dims = contiguous_dims(dtype, shape, chunk.len())?;
    make_tensor(py, Source::of_chunk(chunk), dtype, &dims)
}

/// A contiguous tensor over the bytes that begin at `offset`.
///
/// # Errors
/// `RuntimeError` when they do not lie there; what torch raises.
pub(crate) fn contiguous_tensor<'py>(
    py: Python<'py>,
    bytes: Bytes<'_>,
    offset: u64,
    dtype: Dtype,
    shape: &[i64],
) -> PyResult<Bound<'py, PyAny>> {
    let len = shape.iter().try_fold(dtype.itemsize() as u64, |len, &size| len.checked_mul(size as u64));
    let len = len.ok_or_else(|| PyRuntimeError::new_err("a tensor with more bytes than there can be"))?;
    let dims = contiguous_dims(dtype, shape, len)?;
    make_tensor(py, Span::new(bytes, offset, len)?.source(None), dtype, &dims)
}

/// The shape of a contiguous tensor in `len` bytes, and its strides in elements, as torch counts them: a dimension without
/// elements counts as one of one.
fn contiguous_dims(dtype: Dtype, shape: &[i64], len: u64) -> PyResult<Vec<Dim>> {
    let mut strides = vec![1; shape.len()];
    for dim in (1..shape.len()).rev() {
        strides[dim - 1] = strides[dim] * shape[dim].max(1);
    }
    check_tensor(dtype, shape, &strides, 0, len)
        .map_err(|what| PyRuntimeError::new_err(format!("{len} bytes for a tensor with {what}")))?;
    Ok(shape.iter().chain(&strides).map(|dim| dim.to_le_bytes()).collect())
}

/// Shape and stride of `len` bytes in a row.
fn flat_dims(len: u64) -> [Dim; 2] {
    [len.to_le_bytes(), 1u64.to_le_bytes()]
}

/// Makes a tensor of a source. `dims` is the shape, then the strides.
fn make_tensor<'py>(
    py: Python<'py>,
    source: Source<'_>,
    dtype: Dtype,
    dims: &[Dim],
) -> PyResult<Bound<'py, PyAny>> {
    let torch = Torch::get(py)?;
    // A torch without the C functions may not know the newer element types either.
    let by_view = torch.exchange.is_none() && dtype.torch_name().starts_with("float8");
    let header = build(py, source, if by_view { Dtype::U8 } else { dtype }, dims)?;
    let tensor = match torch.exchange {
        Some(api) => import_versioned(py, api, header),
        None => import_capsule(py, torch, header),
    }?;
    if by_view {
        return tensor.call_method1(strings::view(py), (torch.torch_dtype(py, dtype)?,));
    }
    Ok(tensor)
}

unsafe extern "C" fn delete_legacy(tensor: *mut Legacy) {
    // SAFETY: torch calls the deleter of a tensor it was given once (D1); `manager` is its header.
    unsafe { drop_or_defer((*tensor).manager.cast()) };
}

unsafe extern "C" fn delete_versioned(tensor: *mut Versioned) {
    // SAFETY: as in `delete_legacy`.
    unsafe { drop_or_defer((*tensor).manager.cast()) };
}

/// The deleter while torch is taking a tensor over. When it fails, it may have called the deleter or not.
unsafe extern "C" fn delete_later(_tensor: *mut Versioned) {}

fn import_versioned(py: Python<'_>, api: ExchangeApi, header: NonNull<Header>) -> PyResult<Bound<'_, PyAny>> {
    let mut object = std::ptr::null_mut();
    // SAFETY: `to_object` is torch's, the interpreter is attached, the managed tensor is whole, and its deleter
    // does nothing yet. On success torch owns it and gives us a new reference, and the tensor has no other reference:
    // torch looks up the deleter when the storage dies, so from here on it is the one that drops the header. On
    // failure an error is set and nothing of torch's is left that knows of the header.
    unsafe {
        let managed = &raw mut (*header.as_ptr()).versioned;
        (*managed).deleter = Some(delete_later);
        if (api.to_object)(managed, &raw mut object) != 0 || object.is_null() {
            drop_header(header.as_ptr());
            return Err(PyErr::take(py).unwrap_or_else(|| PyRuntimeError::new_err("torch took no tensor")));
        }
        (*managed).deleter = Some(delete_versioned);
        Ok(Bound::from_owned_ptr(py, object.cast()))
    }
}

fn import_capsule<'py>(
    py: Python<'py>,
    torch: &Torch,
    header: NonNull<Header>,
) -> PyResult<Bound<'py, PyAny>> {
    const NAME: &std::ffi::CStr = c"dltensor";
    // SAFETY: a capsule without destructor over the managed tensor. torch renames the capsule when it
    // takes the tensor over; as long as it has the old name, the tensor is ours.
    unsafe {
        let managed = &raw mut (*header.as_ptr()).legacy;
        (*managed).deleter = Some(delete_legacy);
        let capsule = ffi::PyCapsule_New(managed.cast(), NAME.as_ptr(), None);
        let Some(capsule) = Bound::from_owned_ptr_or_opt(py, capsule) else {
            drop_header(header.as_ptr());
            return Err(PyErr::fetch(py));
        };
        let tensor = torch.from_capsule.bind(py).call1((&capsule,));
        if ffi::PyCapsule_IsValid(capsule.as_ptr(), NAME.as_ptr()) == 1 {
            drop_header(header.as_ptr());
        }
        tensor
    }
}
