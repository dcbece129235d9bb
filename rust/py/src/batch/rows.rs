//! Rows of a batch that all workers make, back to objects: the batch over them, or the samples that they were.

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString, PyTuple};
use ringloader_core::batch::rows::{Column, ColumnKind, Place, SampleForm};
use ringloader_core::number::usize_from;
use ringloader_core::sync::Arc;

use crate::gil::{corrupt, no_memory_for};
use crate::strings;
use crate::torch::memory::Memory;
use crate::torch::source::Bytes;
use crate::torch::tensor::contiguous_tensor;

/// Makes an object of a form, whose columns `leaf` makes.
fn made<'py>(
    py: Python<'py>,
    form: &SampleForm,
    is_batch: bool,
    leaf: &mut impl FnMut(&Column) -> PyResult<Bound<'py, PyAny>>,
) -> PyResult<Bound<'py, PyAny>> {
    match form {
        SampleForm::Column(column) => leaf(column),
        SampleForm::List(items) | SampleForm::Tuple(items) => {
            let mut values = Vec::with_capacity(items.len());
            for item in items {
                values.push(made(py, item, is_batch, leaf)?);
            }
            // torch makes lists of tuples.
            if is_batch || matches!(form, SampleForm::List(_)) {
                PyList::new(py, values).map(Bound::into_any)
            } else {
                PyTuple::new(py, values).map(Bound::into_any)
            }
        }
        SampleForm::Dict(items) => {
            let dict = PyDict::new(py);
            for (name, item) in items {
                dict.set_item(PyString::new(py, name), made(py, item, is_batch, leaf)?)?;
            }
            Ok(dict.into_any())
        }
    }
}

/// The batch over the rows of all `samples` samples, which lie in `bytes`.
///
/// # Errors
/// `RuntimeError` when they do not; what torch raises.
pub(crate) fn batch<'py>(
    py: Python<'py>,
    form: &SampleForm,
    places: &[Place],
    samples: u64,
    bytes: Bytes<'_>,
) -> PyResult<Bound<'py, PyAny>> {
    let mut places = places.iter();
    made(py, form, true, &mut |column| {
        let place = places.next().ok_or_else(|| corrupt("the rows of a batch"))?;
        let shape: Vec<i64> = [samples as i64].iter().chain(&column.shape).copied().collect();
        contiguous_tensor(py, bytes, place.offset, column.dtype, &shape)
    })
}

/// Samples, of which `memory` has the rows, and nothing else has: column by column, as `places` say.
///
/// # Errors
/// `RuntimeError` when they do not lie there; what torch and numpy raise.
pub(crate) fn samples<'py>(
    py: Python<'py>,
    form: &SampleForm,
    places: &[Place],
    count: u64,
    memory: &Arc<Memory>,
) -> PyResult<Bound<'py, PyAny>> {
    let mut samples = Vec::new();
    for sample in 0..count {
        let mut places = places.iter();
        samples.push(made(py, form, false, &mut |column| {
            let Place { offset, row_len } = *places.next().ok_or_else(|| corrupt("the rows of a batch"))?;
            let tensor = |shape: &[i64]| {
                let at = offset + sample * row_len;
                contiguous_tensor(py, Bytes::Sample(memory), at, column.dtype, shape)
            };
            match column.kind {
                ColumnKind::Tensor => tensor(&column.shape),
                ColumnKind::Array => tensor(&column.shape)?.call_method0(strings::numpy(py)),
                ColumnKind::Number => tensor(&[])?.call_method0(strings::item(py)),
                ColumnKind::Scalar => {
                    let array = tensor(&[])?.call_method0(strings::numpy(py))?;
                    array.get_item(PyTuple::empty(py))
                }
            }
        })?);
    }
    PyList::new(py, samples).map(Bound::into_any)
}

/// Private memory for the rows of `count` samples, and their places in it.
///
/// # Errors
/// `MemoryError`.
pub(crate) fn memory_for(form: &SampleForm, count: u64) -> PyResult<(Memory, Vec<Place>)> {
    let (places, len) = form.places(0, count).ok_or_else(|| corrupt("the rows of a batch"))?;
    let memory = Memory::new(usize_from(len));
    let memory = memory.ok_or_else(|| no_memory_for(len))?;
    Ok((memory, places))
}
