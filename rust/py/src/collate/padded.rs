//! Samples of several sizes, written into one tensor, with a value in the rest.
//!
//! INVARIANT P1: a [`Padded`] has `count` rows of `row_len` bytes, one after the other, which nothing else reads or
//! writes. A sample is written to a row only if none of its sizes is greater than the row's.

use std::ptr::{copy_nonoverlapping, write_bytes};

use pyo3::prelude::*;
use pyo3::types::{PyBool, PyFloat};
use ringloader_core::batch::Dtype;

use super::batch_memory::BatchMemory;
use super::ragged::{Kind, Numbers, Ragged, Sample};
use crate::gil::{run_copy, runs_others};
use crate::torch::names::Torch;

/// The bytes of one element, of which an element type has the first few.
pub(super) type Pattern = [u8; 16];

/// The conversion of elements of one type to another, value for value.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Cast {
    /// The elements have the other type already.
    None,
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
}

impl Cast {
    /// `None` for what torch must do. The others are to int64, which holds each value.
    pub(super) fn new(from: Dtype, to: Dtype) -> Option<Self> {
        match (from, to) {
            _ if from == to => Some(Self::None),
            (Dtype::U8, Dtype::I64) => Some(Self::U8),
            (Dtype::I8, Dtype::I64) => Some(Self::I8),
            (Dtype::U16, Dtype::I64) => Some(Self::U16),
            (Dtype::I16, Dtype::I64) => Some(Self::I16),
            (Dtype::U32, Dtype::I64) => Some(Self::U32),
            (Dtype::I32, Dtype::I64) => Some(Self::I32),
            _ => None,
        }
    }

    /// Returns the bytes of an element before the conversion.
    fn itemsize(self, after: usize) -> usize {
        match self {
            Self::None => after,
            Self::U8 | Self::I8 => 1,
            Self::U16 | Self::I16 => 2,
            Self::U32 | Self::I32 => 4,
        }
    }

    /// Writes `count` elements that lie in a row.
    ///
    /// # Safety
    /// The elements are at `from`, room for them is at `to`.
    unsafe fn copy(self, from: usize, to: usize, count: usize, itemsize: usize) {
        // SAFETY: the caller's.
        unsafe {
            match self {
                Self::None => copy_nonoverlapping(from as *const u8, to as *mut u8, count * itemsize),
                Self::U8 => widen::<u8>(from, to, count),
                Self::I8 => widen::<i8>(from, to, count),
                Self::U16 => widen::<u16>(from, to, count),
                Self::I16 => widen::<i16>(from, to, count),
                Self::U32 => widen::<u32>(from, to, count),
                Self::I32 => widen::<i32>(from, to, count),
            }
        }
    }
}

/// # Safety
/// `count` elements are at `from`, room for as many int64 is at `to`.
unsafe fn widen<T: Copy + Into<i64>>(from: usize, to: usize, count: usize) {
    let (from, to) = (from as *const T, to as *mut i64);
    for at in 0..count {
        // SAFETY: the caller's. Nothing is assumed of alignment.
        unsafe { to.add(at).write_unaligned(from.add(at).read_unaligned().into()) };
    }
}

/// The memory into which samples are written, one row after the other.
pub(super) struct Padded<'a> {
    address: usize,
    count: usize,
    row_len: usize,
    dtype: Dtype,
    /// The size of each sample, padded.
    size: &'a [usize],
    /// The number of elements below one step of each dimension.
    below: Vec<usize>,
    value: Pattern,
}

impl<'a> Padded<'a> {
    /// `None` unless the memory is what `count` samples of `size` take.
    pub(super) fn new(
        memory: &BatchMemory<'_>,
        count: usize,
        dtype: Dtype,
        size: &'a [usize],
        value: Pattern,
    ) -> Option<Self> {
        let mut row_len = dtype.itemsize();
        let mut below = vec![1; size.len()];
        for dim in (0..size.len()).rev() {
            below[dim] = row_len / dtype.itemsize();
            row_len = row_len.checked_mul(size[dim])?;
        }
        let fits = row_len.checked_mul(count)? as u64 == memory.nbytes();
        fits.then(|| Self { address: memory.address(), count, row_len, dtype, size, below, value })
    }

    /// Writes all samples `items`, of whose type `cast` is. False if they are not as many, one is too large, or one has
    /// other memory by now.
    ///
    /// # Errors
    /// `RuntimeError` if a storage is smaller than its tensor.
    pub(super) fn write(&self, items: &[Bound<'_, PyAny>], ragged: &Ragged, cast: Cast) -> PyResult<bool> {
        let fits = |shape: &[usize]| {
            shape.len() == self.size.len() && shape.iter().zip(self.size).all(|(len, room)| len <= room)
        };
        let [first, ..] = items else { return Ok(false) };
        if ragged.shapes().count != self.count || !ragged.shapes().iter().all(fits) {
            return Ok(false);
        }
        let copy = || {
            for (row, sample) in self.rows().zip(ragged.samples()) {
                // SAFETY: the sample has its elements where it says, by the invariant of `Ragged`: no foreign code has
                // run since it was looked at. They fit into the row (P1), by the check. Where other threads may run,
                // buffers and storages are held; those threads must not resize these storages, as while torch copies
                // the samples.
                unsafe { self.write_sample(&sample, row, cast) };
            }
        };
        let (py, len) = (first.py(), self.count * self.row_len);
        if !runs_others(len) {
            copy();
            return Ok(true);
        }
        let Some(_held) = ragged.storages(Torch::get(py)?, items)? else { return Ok(false) };
        run_copy(py, len, copy);
        Ok(true)
    }

    /// Returns true if [`write_numbers`](Self::write_numbers) makes such elements of such numbers.
    pub(super) fn takes(kind: Kind, dtype: Dtype) -> bool {
        match kind {
            Kind::Int => matches!(dtype, Dtype::I64 | Dtype::I32),
            Kind::Float => matches!(dtype, Dtype::F64 | Dtype::F32),
            Kind::Bool => dtype == Dtype::Bool,
        }
    }

    /// Writes the numbers of all lists. False, with the memory undefined, where one is not of the kind of the first,
    /// or none of the target's element type.
    ///
    /// # Errors
    /// `OverflowError` for an integer that is too large.
    pub(super) fn write_numbers(&self, numbers: &Numbers<'_, '_>) -> PyResult<bool> {
        let [len] = *self.size else { return Ok(false) };
        let itemsize = self.dtype.itemsize();
        for (sample, row) in self.rows().enumerate() {
            let mut written = 0;
            for number in numbers.sample(sample).take(len) {
                let to = row + written * itemsize;
                // SAFETY: `written < len`, so it lies within the row (P1).
                unsafe {
                    match (numbers.kind, self.dtype) {
                        (Kind::Int, Dtype::I64) => (to as *mut i64).write_unaligned(number.extract()?),
                        (Kind::Int, Dtype::I32) => (to as *mut i32).write_unaligned(number.extract()?),
                        (Kind::Float, Dtype::F64) => {
                            (to as *mut f64).write_unaligned(number.cast_exact::<PyFloat>()?.value());
                        }
                        (Kind::Float, Dtype::F32) => {
                            (to as *mut f32).write_unaligned(number.cast_exact::<PyFloat>()?.value() as f32);
                        }
                        (Kind::Bool, Dtype::Bool) => {
                            (to as *mut u8).write_unaligned(number.cast_exact::<PyBool>()?.is_true().into());
                        }
                        _ => return Ok(false),
                    }
                }
                written += 1;
            }
            if written != numbers.shapes().get(sample)[0] {
                return Ok(false);
            }
            // SAFETY: it ends where the row ends (P1).
            unsafe { self.fill(row + written * itemsize, len - written) };
        }
        Ok(true)
    }

    fn rows(&self) -> impl Iterator<Item = usize> {
        (self.address..).step_by(self.row_len).take(self.count)
    }

    /// # Safety
    /// The sample has its elements where it says. They fit into the row.
    unsafe fn write_sample(&self, sample: &Sample<'_>, row: usize, cast: Cast) {
        // From this dimension on, the sample's elements are in a row in memory, as in the batch before the padding.
        let mut run = self.size.len();
        let mut step = cast.itemsize(self.dtype.itemsize());
        for dim in (0..self.size.len()).rev() {
            if sample.shape[dim] != 1 && sample.strides[dim] != step as isize {
                break;
            }
            run = dim;
            if sample.shape[dim] != self.size[dim] {
                break;
            }
            step *= sample.shape[dim];
        }
        // SAFETY: the caller's.
        unsafe { self.write_dims(sample, 0, run, cast, sample.address, row) };
    }

    /// Writes the part of a sample at `from` that has the dimensions from `dim` on, and fills what it leaves.
    ///
    /// # Safety
    /// The conditions of `write_sample`, for that part.
    unsafe fn write_dims(
        &self,
        sample: &Sample<'_>,
        dim: usize,
        run: usize,
        cast: Cast,
        from: usize,
        to: usize,
    ) {
        let itemsize = self.dtype.itemsize();
        // SAFETY: `to` has room for `size[dim]` parts of `below[dim]` elements; the first `shape[dim]` parts are the
        // sample's. In the run, elements and room are in a row.
        unsafe {
            if dim == self.size.len() {
                return cast.copy(from, to, 1, itemsize);
            }
            let below = self.below[dim];
            let (len, room) = (sample.shape[dim], self.size[dim]);
            if dim == run {
                cast.copy(from, to, len * below, itemsize);
            } else {
                for at in 0..len {
                    let from = from.wrapping_add_signed((at as isize).wrapping_mul(sample.strides[dim]));
                    self.write_dims(sample, dim + 1, run, cast, from, to + at * below * itemsize);
                }
            }
            self.fill(to + len * below * itemsize, (room - len) * below);
        }
    }

    /// Writes the value `count` times.
    ///
    /// # Safety
    /// Room for `count` elements is at `to`.
    unsafe fn fill(&self, to: usize, count: usize) {
        let itemsize = self.dtype.itemsize();
        let value = &self.value[..itemsize];
        // SAFETY: the caller's. An element has as many bytes as the integer that stands for it.
        unsafe {
            match itemsize {
                _ if value.iter().all(|byte| *byte == value[0]) => {
                    write_bytes(to as *mut u8, value[0], count * itemsize);
                }
                2 => repeat::<u16>(value, to, count),
                4 => repeat::<u32>(value, to, count),
                8 => repeat::<u64>(value, to, count),
                _ => {
                    for at in 0..count {
                        copy_nonoverlapping(value.as_ptr(), (to + at * itemsize) as *mut u8, itemsize);
                    }
                }
            }
        }
    }
}

/// # Safety
/// `value` has the bytes of a `T`, room for `count` of them is at `to`.
unsafe fn repeat<T: Copy>(value: &[u8], to: usize, count: usize) {
    // SAFETY: the caller's. Nothing is assumed of alignment.
    unsafe {
        let value = value.as_ptr().cast::<T>().read_unaligned();
        for at in 0..count {
            (to as *mut T).add(at).write_unaligned(value);
        }
    }
}
