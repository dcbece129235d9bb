//! Samples of one number of dimensions, each of a size of its own, where they lie.

use pyo3::buffer::PyUntypedBuffer;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyFloat, PyInt, PyList, PyTuple};
use ringloader_core::batch::Dtype;

use super::rows::{are_their_bytes, dtype_of_format};
use crate::torch::elements::describe_plain;
use crate::torch::names::Torch;

/// Samples of which each is in memory as a tensor is: tensors or arrays of one type.
pub(super) struct Ragged {
    pub(super) dtype: Dtype,
    shapes: Shapes,
    /// In bytes, of all dimensions of one sample after the other.
    strides: Vec<isize>,
    /// INVARIANT: the address of each sample's first element, if it has any. The caller's samples, or `_buffers`, keep
    /// the memory. A caller must not resize a storage to less than its tensors need, as with torch's own functions,
    /// such as `stack` and `copy_`.
    addresses: Vec<usize>,
    _buffers: Vec<PyUntypedBuffer>,
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
    /// `None` unless all of `items` are plain tensors, or plain arrays, of one type and number of dimensions.
    ///
    /// # Errors
    /// The error that torch raises.
    pub(super) fn of(torch: &Torch, items: &[Bound<'_, PyAny>]) -> PyResult<Option<Self>> {
        match items.first() {
            Some(first) if first.get_type().is(&torch.tensor) => Self::of_tensors(torch, items),
            Some(first) if torch.is_array(first) => Ok(Self::of_arrays(torch, items)),
            _ => Ok(None),
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
            let ragged = found.get_or_insert_with(|| Self::new(described.dtype, described.ndim, items.len()));
            if described.dtype != ragged.dtype
                || !ragged.push(
                    described.address,
                    shape.iter().map(|&size| size as usize),
                    // The stride of a dimension of size 1 may be any number.
                    strides.iter().map(|&stride| (stride as isize).wrapping_mul(itemsize)),
                )
            {
                return Ok(None);
            }
        }
        Ok(found)
    }

    fn of_arrays(torch: &Torch, items: &[Bound<'_, PyAny>]) -> Option<Self> {
        let mut found: Option<Self> = None;
        for array in items {
            if !torch.is_array(array) {
                return None;
            }
            let buffer = PyUntypedBuffer::get(array).ok()?;
            let dtype = dtype_of_format(buffer.format().to_bytes(), buffer.item_size())?;
            let ragged = found.get_or_insert_with(|| Self::new(dtype, buffer.dimensions(), items.len()));
            if dtype != ragged.dtype
                || !ragged.push(
                    buffer.buf_ptr() as usize,
                    buffer.shape().iter().copied(),
                    buffer.strides().iter().copied(),
                )
            {
                return None;
            }
            ragged._buffers.push(buffer);
        }
        found
    }

    fn new(dtype: Dtype, ndim: usize, count: usize) -> Self {
        let sizes = Vec::with_capacity(ndim * count);
        let shapes = Shapes { ndim, count, sizes };
        let (strides, addresses) = (Vec::with_capacity(ndim * count), Vec::with_capacity(count));
        Self { dtype, shapes, strides, addresses, _buffers: Vec::new() }
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
    /// if a tensor has another one by now. Arrays have their buffers instead.
    ///
    /// # Errors
    /// `RuntimeError` if a storage is smaller than its tensor.
    pub(super) fn storages<'py>(
        &self,
        torch: &Torch,
        items: &[Bound<'py, PyAny>],
    ) -> PyResult<Option<Vec<Bound<'py, PyAny>>>> {
        let tensors = if self._buffers.is_empty() { items } else { &[] };
        let spans = self.samples().map(|sample| (sample.address, sample.span(self.dtype.itemsize())));
        torch.storages_of(tensors, spans)
    }

    /// The samples as they lie now, after code that was not ours; `None` if they have another type or shape.
    ///
    /// # Errors
    /// The error that torch raises.
    pub(super) fn again(&self, torch: &Torch, items: &[Bound<'_, PyAny>]) -> PyResult<Option<Self>> {
        Ok(Self::of(torch, items)?.filter(|now| now.dtype == self.dtype && now.shapes == self.shapes))
    }
}

/// Lists of Python's numbers, which are all of one kind.
pub(super) struct Numbers<'a, 'py> {
    pub(super) kind: Kind,
    shapes: Shapes,
    items: &'a [Bound<'py, PyAny>],
}

#[derive(Clone, Copy, PartialEq)]
pub(super) enum Kind {
    Int,
    Float,
    Bool,
}

impl Kind {
    fn of(number: &Bound<'_, PyAny>) -> Option<Self> {
        if number.is_exact_instance_of::<PyInt>() {
            Some(Self::Int)
        } else if number.is_exact_instance_of::<PyFloat>() {
            Some(Self::Float)
        } else {
            number.is_exact_instance_of::<PyBool>().then_some(Self::Bool)
        }
    }
}

impl<'a, 'py> Numbers<'a, 'py> {
    /// `None` unless all of `items` are lists or tuples, and the first number in them is a plain one.
    pub(super) fn of(items: &'a [Bound<'py, PyAny>]) -> Option<Self> {
        let mut shapes = Shapes { ndim: 1, count: items.len(), sizes: Vec::with_capacity(items.len()) };
        let mut kind = None;
        for item in items {
            let sequence = Sequence::of(item)?;
            shapes.sizes.push(sequence.len());
            if kind.is_none() && sequence.len() > 0 {
                kind = Some(Kind::of(&sequence.get(0)?)?);
            }
        }
        kind.map(|kind| Self { kind, shapes, items })
    }

    pub(super) fn shapes(&self) -> &Shapes {
        &self.shapes
    }

    /// The numbers of one sample; fewer than there were if one is of another kind, or the list has become shorter.
    pub(super) fn sample(&self, sample: usize) -> impl Iterator<Item = Bound<'py, PyAny>> {
        let (kind, len) = (self.kind, self.shapes.sizes[sample]);
        let sequence = Sequence::of(&self.items[sample]);
        (0..len).map_while(move |place| {
            sequence.as_ref()?.get(place).filter(|number| Kind::of(number) == Some(kind))
        })
    }
}

enum Sequence<'a, 'py> {
    List(&'a Bound<'py, PyList>),
    Tuple(&'a Bound<'py, PyTuple>),
}

impl<'a, 'py> Sequence<'a, 'py> {
    fn of(item: &'a Bound<'py, PyAny>) -> Option<Self> {
        let tuple = || item.cast_exact::<PyTuple>().ok().map(Self::Tuple);
        item.cast_exact::<PyList>().ok().map(Self::List).or_else(tuple)
    }

    fn len(&self) -> usize {
        match self {
            Self::List(list) => list.len(),
            Self::Tuple(tuple) => tuple.len(),
        }
    }

    fn get(&self, place: usize) -> Option<Bound<'py, PyAny>> {
        match self {
            Self::List(list) => list.get_item(place).ok(),
            Self::Tuple(tuple) => tuple.get_item(place).ok(),
        }
    }
}
