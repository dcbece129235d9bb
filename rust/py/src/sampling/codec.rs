//! Messages of torch's protocol and their indices, as a task's bytes and back.

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyInt, PyList, PyTuple};
use ringloader_core::number::usize_from;
use ringloader_core::transport::message::{Task, TaskKind};

use super::places;
use crate::torch::names::Torch;

/// The task for a message of torch's protocol.
///
/// # Errors
/// `TypeError` for what cannot be pickled.
pub(crate) fn encode_task(message: &Bound<'_, PyAny>) -> PyResult<Task> {
    if message.is_none() {
        return Ok(Task { seq: 0, kind: TaskKind::End, bytes: Vec::new() });
    }
    if let Some((seq, index)) = pair(message)? {
        let (kind, bytes) = encode_index_or_pickle(&index, false)?;
        return Ok(Task { seq: seq as u64, kind, bytes });
    }
    Ok(Task { seq: 0, kind: TaskKind::Object, bytes: pickle(message, false)? })
}

/// A message of the form `(index of the task, data)`, in either direction; `None` for any other.
pub(crate) fn pair<'py>(message: &Bound<'py, PyAny>) -> PyResult<Option<(i64, Bound<'py, PyAny>)>> {
    let Ok(tuple) = message.cast_exact::<PyTuple>() else { return Ok(None) };
    if tuple.len() != 2 {
        return Ok(None);
    }
    let Some(seq) = exact_int(&tuple.get_item(0)?) else { return Ok(None) };
    Ok(Some((seq, tuple.get_item(1)?)))
}

/// The bytes of a task for `index`, pickled if they must be. `again`: they may be unpickled more than once.
///
/// # Errors
/// `TypeError` for what cannot be pickled.
pub(crate) fn encode_index_or_pickle(index: &Bound<'_, PyAny>, again: bool) -> PyResult<(TaskKind, Vec<u8>)> {
    match encode_index(index)? {
        Some(plain) => Ok(plain),
        None => Ok((TaskKind::PickledIndex, pickle(index, again)?)),
    }
}

/// A task that is a call: the worker unpickles `callable` and calls it.
///
/// # Errors
/// `TypeError` for what cannot be pickled.
pub(crate) fn encode_call(callable: &Bound<'_, PyAny>) -> PyResult<Task> {
    Ok(Task { seq: 0, kind: TaskKind::Call, bytes: pickle(callable, false)? })
}

fn pickle(object: &Bound<'_, PyAny>, again: bool) -> PyResult<Vec<u8>> {
    let py = object.py();
    let bytes = Torch::get(py)?.dumps_index.bind(py).call1((object, again))?;
    Ok(bytes.cast::<PyBytes>()?.as_bytes().to_vec())
}

fn exact_int(object: &Bound<'_, PyAny>) -> Option<i64> {
    object.is_exact_instance_of::<PyInt>().then(|| object.extract().ok())?
}

/// The bytes of a task for an index that needs no pickle: an exact int, a list of them, a list of `None`.
///
/// # Errors
/// None that is known.
pub(crate) fn encode_index(index: &Bound<'_, PyAny>) -> PyResult<Option<(TaskKind, Vec<u8>)>> {
    if index.is_none() {
        return Ok(Some((TaskKind::None, Vec::new())));
    }
    if let Some(one) = exact_int(index) {
        return Ok(Some((TaskKind::Index, one.to_le_bytes().to_vec())));
    }
    let Ok(list) = index.cast_exact::<PyList>() else { return Ok(None) };
    if !list.is_empty() && list.iter().all(|item| item.is_none()) {
        return Ok(Some((TaskKind::Nones, (list.len() as i64).to_le_bytes().to_vec())));
    }
    let mut bytes = Vec::with_capacity(8 * list.len());
    for item in list.iter() {
        let Some(value) = exact_int(&item) else { return Ok(None) };
        bytes.extend_from_slice(&value.to_le_bytes());
    }
    Ok(Some((TaskKind::Indices, bytes)))
}

/// The ints of a task's bytes.
pub(crate) fn ints(bytes: &[u8]) -> impl ExactSizeIterator<Item = i64> + '_ {
    bytes.chunks_exact(8).map(|word| i64::from_le_bytes(word.try_into().expect("8 bytes")))
}

/// The message of torch's protocol that a task carries.
///
/// # Errors
/// The error that unpickling raises.
pub(crate) fn decode_task<'py>(py: Python<'py>, task: Task) -> PyResult<Bound<'py, PyAny>> {
    match task.kind {
        TaskKind::End => Ok(py.None().into_bound(py)),
        TaskKind::Object | TaskKind::Call => loads(py, &task.bytes),
        kind => {
            let index = match kind {
                TaskKind::Seeded => {
                    let (places, kind, bytes) = places::split(&task.bytes)?;
                    places::placed(decode_index(py, kind, bytes)?, &places)?
                }
                kind => decode_index(py, kind, &task.bytes)?,
            };
            Ok((task.seq, index).into_pyobject(py)?.into_any())
        }
    }
}

fn loads<'py>(py: Python<'py>, bytes: &[u8]) -> PyResult<Bound<'py, PyAny>> {
    Torch::get(py)?.loads_index.bind(py).call1((PyBytes::new(py, bytes),))
}

/// The index that a task's bytes stand for, without places: a fresh list of ints each time, as samplers yield.
pub(crate) fn decode_index<'py>(
    py: Python<'py>,
    kind: TaskKind,
    bytes: &[u8],
) -> PyResult<Bound<'py, PyAny>> {
    let one = || ints(bytes).next().ok_or_else(|| PyRuntimeError::new_err("a task without its index"));
    Ok(match kind {
        TaskKind::Indices => PyList::new(py, ints(bytes))?.into_any(),
        TaskKind::Index => PyInt::new(py, one()?).into_any(),
        TaskKind::Nones => {
            PyList::new(py, (0..usize_from(one()?.cast_unsigned())).map(|_| py.None()))?.into_any()
        }
        TaskKind::None | TaskKind::End => py.None().into_bound(py),
        TaskKind::PickledIndex | TaskKind::Object | TaskKind::Call => loads(py, bytes)?,
        TaskKind::Seeded => {
            let (_, kind, bytes) = places::split(bytes)?;
            return decode_index(py, kind, bytes);
        }
    })
}
