//! Samples of one number of dimensions, each of a size of its own, where they lie.

use pyo3::buffer::PyUntypedBuffer;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyTuple};
use ringloader_core::batch::Dtype;
use ringloader_core::number::usize_from;

use super::default_collate::push_number;
use super::rows::{are_their_bytes, dtype_of_format};
use crate::torch::elements::describe_plain;
use crate::torch::names::Torch;

/// Samples of one type: tensors, arrays, or lists of Python's numbers, which were copied.
pub(super) struct Ragged {
    pub(super) dtype: Dtype,
    shapes: Shapes,
    /// In bytes, of all dimensions of one sample after the other.
    strides: Vec<isize>,
    /// INVARIANT: the address of each sample's first element, if it has any. `owner` keeps the memory. A caller must
    /// not resize a storage to less than its tensors need, as with torch's own functions, such as `stack` and `copy_`.
    addresses: Vec<usize>,
    owner: Owner,
}

/// The owner of the samples' elements.
enum Owner {
    /// The caller, who has tensors.
    Caller,
    Buffers(#[expect(dead_code, reason = "they are kept, not read")] Vec<PyUntypedBuffer>),
    /// Numbers, one list after the other.
    Numbers(Vec<u8>),
}

/// The shapes of samples.
#[derive(PartialEq)]
pub(super) struct Shapes {
    pub(super) ndim: usize,
    pub(super) count: usize,
    sizes: Vec<usize>,
}

impl Shapes {
    pub(super) fn get(&self, sample: usize) -> &[usize] {
        &self.sizes[sample * self.ndim..][..self.ndim]
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &[usize]> {
        (0..self.count).map(|sample| self.get(sample))
    }
}

/// One of them.
pub(super) struct Sample<'a> {
    pub(super) shape: &'a [usize],
    pub(super) strides: &'a [isize],
    pub(super) address: usize,
}

impl Sample<'_> {
    /// Returns the number of bytes from the first element to the end of the last. No stride is negative.
    fn span(&self, itemsize: usize) -> u64 {
        if self.shape.contains(&0) {
            return 0;
        }
        let steps = self.shape.iter().zip(self.strides);
        let last: usize = steps.map(|(size, stride)| (size - 1) * stride.unsigned_abs()).sum();
        (last + itemsize) as u64
    }
}

impl Ragged {
    /// `None` unless all of `items` are plain tensors, or plain arrays, of one type and number of dimensions; or lists
    /// of numbers that are all of one kind.
    ///
    /// # Errors
    /// The error that torch raises.
    pub(super) fn of(torch: &Torch, items: &[Bound<'_, PyAny>]) -> PyResult<Option<Self>> {
        match items.first() {
            Some(first) if first.get_type().is(&torch.tensor) => Self::of_tensors(torch, items),
            Some(first) if torch.is_array(first) => Ok(Self::of_arrays(torch, items)),
            _ => Self::of_numbers(items),
        }
    }

    fn of_tensors(torch: &Torch, items: &[Bound<'_, PyAny>]) -> PyResult<Option<Self>> {
        let Some(api) = torch.exchange else { return Ok(None) };
        let mut dims = Vec::new();
        if !are_their_bytes(torch, api, items, &mut dims)? {
            return Ok(None);
        }
        let mut found: Option<Self> = None;
        for tensor in items {
            dims.clear();
            let Some(described) = describe_plain(torch, tensor, &mut dims)? else { return Ok(None) };
            let (shape, strides) = dims.split_at(described.ndim);
            let itemsize = described.dtype.itemsize() as isize;
            let made = || Self::new(described.dtype, described.ndim, items.len(), Owner::Caller);
            let ragged = found.get_or_insert_with(made);
            if described.dtype != ragged.dtype
                || !ragged.push(
                    described.address,
                    shape.iter().map(|&size| usize_from(size.cast_unsigned())),
                    // The stride of a dimension of size 1 may be any number.
                    strides.iter().map(|&stride| {
                        usize_from(stride.cast_unsigned()).cast_signed().wrapping_mul(itemsize)
                    }),
                )
            {
                return Ok(None);
            }
        }
        Ok(found)
    }

    fn of_arrays(torch: &Torch, items: &[Bound<'_, PyAny>]) -> Option<Self> {
        let mut found: Option<Self> = None;
        let mut buffers = Vec::new();
        for array in items {
            if !torch.is_array(array) {
                return None;
            }
            let buffer = PyUntypedBuffer::get(array).ok()?;
            let dtype = dtype_of_format(buffer.format().to_bytes(), buffer.item_size())?;
            let made = || Self::new(dtype, buffer.dimensions(), items.len(), Owner::Caller);
            let ragged = found.get_or_insert_with(made);
            if dtype != ragged.dtype
                || !ragged.push(
                    buffer.buf_ptr() as usize,
                    buffer.shape().iter().copied(),
                    buffer.strides().iter().copied(),
                )
            {
                return None;
            }
            buffers.push(buffer);
        }
        found.map(|ragged| Self { owner: Owner::Buffers(buffers), ..ragged })
    }

    fn of_numbers(items: &[Bound<'_, PyAny>]) -> PyResult<Option<Self>> {
        let (mut bytes, mut ends, mut dtype) = (Vec::new(), Vec::with_capacity(items.len()), None);
        for item in items {
            let are_alike = if let Ok(list) = item.cast_exact::<PyList>() {
                push_all(&mut bytes, &mut dtype, list.iter())?
            } else if let Ok(tuple) = item.cast_exact::<PyTuple>() {
                push_all(&mut bytes, &mut dtype, tuple.iter())?
            } else {
                false
            };
            if !are_alike {
                return Ok(None);
            }
            ends.push(bytes.len());
        }
        let Some(dtype) = dtype else { return Ok(None) };
        let mut ragged = Self::new(dtype, 1, items.len(), Owner::Caller);
        let (base, mut start) = (bytes.as_ptr() as usize, 0);
        for end in ends {
            let len = (end - start) / dtype.itemsize();
            ragged.push(base + start, [len].into_iter(), [dtype.itemsize() as isize].into_iter());
            start = end;
        }
        Ok(Some(Self { owner: Owner::Numbers(bytes), ..ragged }))
    }

    fn new(dtype: Dtype, ndim: usize, count: usize, owner: Owner) -> Self {
        let sizes = Vec::with_capacity(ndim * count);
        let shapes = Shapes { ndim, count, sizes };
        let (strides, addresses) = (Vec::with_capacity(ndim * count), Vec::with_capacity(count));
        Self { dtype, shapes, strides, addresses, owner }
    }

    /// Adds a sample. Returns true if it has as many dimensions as those before it, and memory.
    fn push(
        &mut self,
        address: usize,
        shape: impl ExactSizeIterator<Item = usize> + Clone,
        strides: impl ExactSizeIterator<Item = isize>,
    ) -> bool {
        let fits = shape.len() == self.shapes.ndim && strides.len() == self.shapes.ndim;
        let has_memory = address != 0 || shape.clone().any(|size| size == 0);
        self.shapes.sizes.extend(shape);
        self.strides.extend(strides);
        self.addresses.push(address);
        fits && has_memory
    }

    pub(super) fn shapes(&self) -> &Shapes {
        &self.shapes
    }

    pub(super) fn samples(&self) -> impl Iterator<Item = Sample<'_>> {
        self.addresses.iter().enumerate().map(|(sample, &address)| Sample {
            shape: self.shapes.get(sample),
            strides: &self.strides[sample * self.shapes.ndim..][..self.shapes.ndim],
            address,
        })
    }

    /// The storages of tensors, which keep the bytes where they are, whatever other threads do to the tensors. `None`
    /// if a tensor has another one by now. Others need none.
    ///
    /// # Errors
    /// `RuntimeError` if a storage is smaller than its tensor.
    pub(super) fn storages<'py>(
        &self,
        torch: &Torch,
        items: &[Bound<'py, PyAny>],
    ) -> PyResult<Option<Vec<Bound<'py, PyAny>>>> {
        let tensors = if matches!(self.owner, Owner::Caller) { items } else { &[] };
        let spans = self.samples().map(|sample| (sample.address, sample.span(self.dtype.itemsize())));
        torch.storages_of(tensors, spans)
    }

    /// The samples as they lie now, after code that was not ours; `None` if they have another type or shape. Numbers
    /// stay what they were.
    ///
    /// # Errors
    /// The error that torch raises.
    pub(super) fn again(self, torch: &Torch, items: &[Bound<'_, PyAny>]) -> PyResult<Option<Self>> {
        if self.numbers().is_some() {
            return Ok(Some(self));
        }
        Ok(Self::of(torch, items)?.filter(|now| now.dtype == self.dtype && now.shapes == self.shapes))
    }

    /// The bytes of Python's numbers; `None` of other samples.
    pub(super) fn numbers(&self) -> Option<&[u8]> {
        if let Owner::Numbers(bytes) = &self.owner { Some(bytes) } else { None }
    }

    /// Returns the type of a batch for which none was asked: torch's own for Python's floats.
    ///
    /// # Errors
    /// The error that torch raises.
    pub(super) fn batch_dtype(&self, torch: &Torch, py: Python<'_>) -> PyResult<Option<Dtype>> {
        let are_floats = self.dtype == Dtype::F64 && self.numbers().is_some();
        if are_floats { torch.default_dtype(py) } else { Ok(Some(self.dtype)) }
    }
}

/// Appends the bytes of numbers. Returns false if one has another element type than `dtype`, that of those before.
fn push_all<'py>(
    bytes: &mut Vec<u8>,
    dtype: &mut Option<Dtype>,
    numbers: impl ExactSizeIterator<Item = Bound<'py, PyAny>>,
) -> PyResult<bool> {
    bytes.reserve(8 * numbers.len());
    for number in numbers {
        match push_number(bytes, &number)? {
            Some(found) if *dtype.get_or_insert(found) == found => {}
            _ => return Ok(false),
        }
    }
    Ok(true)
}
