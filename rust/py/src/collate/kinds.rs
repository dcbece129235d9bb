//! Kinds of samples that collation and conversion know without torch.

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
