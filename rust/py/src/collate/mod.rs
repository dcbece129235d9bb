//! torch's `default_collate` and `default_convert`, and `ringloader.batchify.Pad`, native for common types.

mod batch_memory;
pub(crate) mod default_collate;
pub(crate) mod default_convert;
pub(crate) mod fallback;
#[allow(unsafe_code, reason = "copies from an array's memory by its address")]
pub(crate) mod gather;
pub(crate) mod pad;
#[allow(unsafe_code, reason = "copies from samples' memory by its address, and writes a batch's")]
mod padded;
mod ragged;
#[allow(unsafe_code, reason = "copies from samples' memory by its address")]
mod rows;

use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyFloat, PyInt, PyString};

/// Trees that are deeper are torch's matter, which has a limit and an error of its own.
pub(super) const DEEPEST: u32 = 100;

pub(super) fn is_number(object: &Bound<'_, PyAny>) -> bool {
    object.is_exact_instance_of::<PyInt>()
        || object.is_exact_instance_of::<PyFloat>()
        || object.is_exact_instance_of::<PyBool>()
}

pub(super) fn is_text(object: &Bound<'_, PyAny>) -> bool {
    object.is_exact_instance_of::<PyString>() || object.is_exact_instance_of::<PyBytes>()
}
