//! torch's `default_collate` and `default_convert`, and `ringloader.batchify.Pad`, native for common types.
//!
//! | file | about |
//! |---|---|
//! | `default_collate.rs`, `default_convert.rs` | torch's functions |
//! | `fallback.rs` | calls torch's own functions where ours have no answer |
//! | `rows.rs` | tensors or arrays of one shape, to stack them |
//! | `sample_rows.rs` | samples of a batch that all workers make, as its rows |
//! | `pad.rs` | padding; `ragged.rs` reads the samples, `padded.rs` writes the batch |
//! | `gather.rs` | rows of arrays and tensors |
//! | `batch_memory.rs` | memory for a tensor of a batch |

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
pub(crate) mod sample_rows;

use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyFloat, PyInt, PyList, PyString, PyTuple};

/// Trees that are deeper are torch's matter, which has a limit and an error of its own.
const DEEPEST: u32 = 100;

fn is_number(object: &Bound<'_, PyAny>) -> bool {
    object.is_exact_instance_of::<PyInt>()
        || object.is_exact_instance_of::<PyFloat>()
        || object.is_exact_instance_of::<PyBool>()
}

fn is_text(object: &Bound<'_, PyAny>) -> bool {
    object.is_exact_instance_of::<PyString>() || object.is_exact_instance_of::<PyBytes>()
}

/// The items of an exact list or tuple.
fn exact_items<'py>(object: &Bound<'py, PyAny>) -> Option<Vec<Bound<'py, PyAny>>> {
    if let Ok(list) = object.cast_exact::<PyList>() {
        return Some(list.iter().collect());
    }
    object.cast_exact::<PyTuple>().ok().map(|tuple| tuple.iter().collect())
}
