//! Finds an array's elements, by numpy's C structure.

use std::ffi::{c_char, c_int, c_void};

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyCapsule;

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
