#![forbid(unsafe_code)]
//! Computes the part of a storage that a leaf covers. The writer of a leaf and its reader use the same rules.

use super::MAX_NDIM;
use crate::batch::Dtype;

/// Number of elements. Zeros do not hide an overflow of the other dimensions: torch and numpy refuse such shapes.
fn numel(shape: impl Iterator<Item = i64>) -> Result<u64, &'static str> {
    let mut product: i64 = 1;
    let mut empty = false;
    for size in shape {
        match size {
            ..0 => return Err("a negative size"),
            0 => empty = true,
            1 => {}
            _ => product = product.checked_mul(size).ok_or("more elements than 63 bits count")?,
        }
    }
    Ok(if empty { 0 } else { product.unsigned_abs() })
}

/// The end of `length` bytes from `start`, if the storage has them.
fn fit(start: u64, length: u64, storage_nbytes: u64) -> Result<(), &'static str> {
    match start.checked_add(length) {
        Some(end) if end <= storage_nbytes => Ok(()),
        _ => Err("elements beyond the end of its storage"),
    }
}

/// Checks that a tensor can be a leaf, as [`Meta::parse`](super::Meta::parse) requires.
///
/// The byte offset must be a multiple of the itemsize, also for complex types, whose C++ counterparts in torch are
/// aligned to the pair. A tensor without elements may have any strides that are not negative.
///
/// # Errors
/// Returns what is wrong, as the end of the sentence "the tensor has ...".
pub fn check_tensor(
    dtype: Dtype,
    shape: &[i64],
    strides: &[i64],
    byte_offset: u64,
    storage_nbytes: u64,
) -> Result<(), &'static str> {
    if shape.len() > MAX_NDIM {
        return Err("more than 64 dimensions");
    }
    if shape.len() != strides.len() {
        return Err("not one stride for each dimension");
    }
    let (shape, strides) = (shape.iter().copied(), strides.iter().copied());
    tensor_extent(dtype, shape, strides, byte_offset, storage_nbytes)
}

/// Checks a tensor of a legal number of dimensions.
pub(super) fn tensor_extent(
    dtype: Dtype,
    shape: impl Iterator<Item = i64> + Clone,
    strides: impl Iterator<Item = i64>,
    byte_offset: u64,
    storage_nbytes: u64,
) -> Result<(), &'static str> {
    let itemsize = dtype.itemsize() as u64;
    if byte_offset & (itemsize - 1) != 0 {
        return Err("a byte offset that is no multiple of its itemsize");
    }
    let numel = numel(shape.clone())?;
    // Zero whenever the tensor is empty: an overflow there is no address.
    let mut last: u64 = 0;
    for (size, stride) in shape.zip(strides) {
        if stride < 0 {
            return Err("a negative stride");
        }
        if numel > 0 {
            let step = (size.unsigned_abs() - 1).checked_mul(stride.unsigned_abs());
            last = step.and_then(|step| last.checked_add(step)).ok_or("a span above 64 bits")?;
        }
    }
    let span = if numel == 0 { Some(0) } else { last.checked_add(1).and_then(|s| s.checked_mul(itemsize)) };
    fit(byte_offset, span.ok_or("a span above 64 bits")?, storage_nbytes)
}

/// Checks a contiguous array of a legal number of dimensions. It may be misaligned, as numpy allows.
pub(super) fn array_extent(
    itemsize: u64,
    shape: impl Iterator<Item = i64>,
    byte_offset: u64,
    storage_nbytes: u64,
) -> Result<(), &'static str> {
    let span = numel(shape)?.checked_mul(itemsize).ok_or("a span above 64 bits")?;
    fit(byte_offset, span, storage_nbytes)
}
