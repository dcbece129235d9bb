//! Samples of several sizes, written into one tensor, with a value in the rest.
//!
//! INVARIANT P1: a [`Padded`] has `count` rows of `row_len` bytes, one after the other, which nothing else reads or
//! writes. A sample is written to a row only if none of its sizes is greater than the row's.

use std::ptr::{copy_nonoverlapping, write_bytes};

use pyo3::prelude::*;
use ringloader_core::batch::Dtype;

use super::batch_memory::BatchMemory;
use super::ragged::{Ragged, Sample};
use crate::gil::{run_copy, runs_others};
use crate::torch::names::Torch;

/// The bytes of one element, of which an element type has the first few.
pub(super) type Pattern = [u8; 16];

/// The conversion of elements of one type to another, value for value.
#[derive(Clone, Copy)]
pub(super) struct Cast {
    from: Dtype,
    to: Dtype,
}

impl Cast {
    /// The conversion of samples to the type of a batch; `None` for what torch must do, and for numbers that are too
    /// large.
    pub(super) fn new(samples: &Ragged, to: Dtype) -> Option<Self> {
        use Dtype::{F32, F64, I8, I16, I32, I64, U8, U16, U32};
        let from = samples.dtype;
        let is_small = |word: &[u8; 8]| i32::try_from(i64::from_ne_bytes(*word)).is_ok();
        let is_exact = match (samples.numbers(), from, to) {
            _ if from == to => true,
            (None, U8 | I8 | U16 | I16 | U32 | I32, I64) | (Some(_), F64, F32) => true,
            (Some(bytes), I64, I32) => bytes.as_chunks().0.iter().all(is_small),
            _ => false,
        };
        is_exact.then_some(Self { from, to })
    }

    /// Writes `count` elements that lie in a row.
    ///
    /// # Safety
    /// The elements are at `from`, room for them is at `to`.
    #[expect(clippy::cast_possible_truncation, reason = "as torch's copy to a narrower type")]
    unsafe fn copy(self, from: usize, to: usize, count: usize) {
        // SAFETY: the caller's; each element has the size of its type.
        unsafe {
            match (self.from, self.to) {
                (Dtype::U8, Dtype::I64) => each(from, to, count, |value: u8| i64::from(value)),
                (Dtype::I8, Dtype::I64) => each(from, to, count, |value: i8| i64::from(value)),
                (Dtype::U16, Dtype::I64) => each(from, to, count, |value: u16| i64::from(value)),
                (Dtype::I16, Dtype::I64) => each(from, to, count, |value: i16| i64::from(value)),
                (Dtype::U32, Dtype::I64) => each(from, to, count, |value: u32| i64::from(value)),
                (Dtype::I32, Dtype::I64) => each(from, to, count, |value: i32| i64::from(value)),
                (Dtype::I64, Dtype::I32) => each(from, to, count, |value: i64| value as i32),
                (Dtype::F64, Dtype::F32) => each(from, to, count, |value: f64| value as f32),
                _ => copy_nonoverlapping(from as *const u8, to as *mut u8, count * self.to.itemsize()),
            }
        }
    }
}

/// # Safety
/// `count` elements are at `from`, room for as many is at `to`.
unsafe fn each<T: Copy, U>(from: usize, to: usize, count: usize, cast: impl Fn(T) -> U) {
    let (from, to) = (from as *const T, to as *mut U);
    for at in 0..count {
        // SAFETY: the caller's. Nothing is assumed of alignment.
        unsafe { to.add(at).write_unaligned(cast(from.add(at).read_unaligned())) };
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

    fn rows(&self) -> impl Iterator<Item = usize> {
        (self.address..).step_by(self.row_len).take(self.count)
    }

    /// # Safety
    /// The sample has its elements where it says. They fit into the row.
    unsafe fn write_sample(&self, sample: &Sample<'_>, row: usize, cast: Cast) {
        // From this dimension on, the sample's elements are in a row in memory, as in the batch before the padding.
        let mut run = self.size.len();
        let mut step = cast.from.itemsize();
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
                return cast.copy(from, to, 1);
            }
            let below = self.below[dim];
            let (len, room) = (sample.shape[dim], self.size[dim]);
            if dim == run {
                cast.copy(from, to, len * below);
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
