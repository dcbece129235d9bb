//! torch's `collate`, as a Python class: native for samples of common types, written straight into the slot.

use std::cell::Cell;

use pyo3::PyTypeCheck;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple, PyType};
use ringloader_core::batch::Dtype;

use super::batch_memory::{Allocator, BatchMemory};
use super::fallback::{Part, Unchanged};
use super::rows::{Destination, Rows, fill};
use super::{DEEPEST, exact_items, is_number, is_text};
use crate::gil::in_thread;
use crate::objects::entries_of;
use crate::strings;
use crate::torch::elements::describe_plain;
use crate::torch::names::Torch;
use crate::transport::port::Port;

/// Stands in for `collate` in a worker, which `default_collate` calls, and which calls itself for what is in
/// containers.
///
/// MIRRORS `torch/utils/data/_utils/collate.py::collate`.
#[pyclass(frozen, module = "ringloader._native")]
pub(crate) struct Collate {
    /// The port of a worker process. None in a thread and in the main process, whose batches lie in memory of torch's
    /// own.
    port: Option<Py<Port>>,
    /// False in the main process, where torch's function does not choose the memory of a stack.
    is_worker: bool,
    function: Py<PyAny>,
    unchanged: Unchanged,
    /// Classes in the map that are not torch's own. torch compares a sample with them if the map lacks its exact type.
    others: Vec<Py<PyAny>>,
}

#[pymethods]
impl Collate {
    #[new]
    #[pyo3(signature = (port, function, parts, modes, fn_map, others=Vec::new(), is_worker=true))]
    fn new(
        port: Option<Py<Port>>,
        function: Py<PyAny>,
        parts: Vec<Part>,
        modes: Vec<Py<PyAny>>,
        fn_map: &Bound<'_, PyDict>,
        others: Vec<Py<PyAny>>,
        is_worker: bool,
    ) -> PyResult<Self> {
        Ok(Self { port, is_worker, function, unchanged: Unchanged::new(parts, modes, fn_map)?, others })
    }

    #[pyo3(signature = (batch, *, collate_fn_map=None))]
    fn __call__<'py>(
        &self,
        batch: &Bound<'py, PyAny>,
        collate_fn_map: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = batch.py();
        if collate_fn_map.is_some_and(|map| map.is(&self.unchanged.fn_map))
            && self.unchanged.is_whole(py)?
            && let Some(made) = self.native(batch)?
        {
            return Ok(made);
        }
        self.torchs(batch, collate_fn_map)
    }

    /// Without a port: the batch that `default_collate` makes; None where it must be asked.
    fn collated<'py>(&self, batch: &Bound<'py, PyAny>) -> Collated<'py> {
        let py = batch.py();
        in_thread(py, || if self.unchanged.is_whole(py)? { self.native(batch) } else { Ok(None) })
    }
}

impl Collate {
    /// Returns true if `default_collate` does what torch has made it do.
    ///
    /// # Errors
    /// The error that asking raises.
    pub(crate) fn is_unchanged(&self, py: Python<'_>) -> PyResult<bool> {
        self.unchanged.is_whole(py)
    }

    /// Returns true if torch uses an entry for the sample that is not torch's own.
    pub(super) fn is_others(&self, torch: &Torch, sample: &Bound<'_, PyAny>) -> PyResult<bool> {
        if is_found_by_type(torch, sample) {
            return Ok(false);
        }
        for class in &self.others {
            if sample.is_instance(class.bind(sample.py()))? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// `None` for what torch must collate.
    fn native<'py>(&self, batch: &Bound<'py, PyAny>) -> Collated<'py> {
        let py = batch.py();
        let Some(samples) = exact_items(batch) else { return Ok(None) };
        let form = if batch.is_exact_instance_of::<PyList>() { Container::List } else { Container::Tuple };
        let torch = Torch::get(py)?;
        match samples.first() {
            Some(first) if is_text(first) => return Ok(Some(batch.clone())),
            Some(first) if is_common(torch, first, 0) => {}
            _ => return Ok(None),
        }
        let work =
            Work { torch, port: self.port.as_ref().map(Py::get), collate: self, is_final: false.into() };
        match work.column(&samples, form) {
            // Torch's function raises it again, from where it does.
            Err(error) if error.is_instance_of::<PyException>(py) && !work.is_final.get() => Ok(None),
            made => made,
        }
    }

    fn torchs<'py>(
        &self,
        batch: &Bound<'py, PyAny>,
        fn_map: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let options = PyDict::new(batch.py());
        options.set_item(strings::collate_fn_map(batch.py()), fn_map)?;
        self.function.bind(batch.py()).call((batch,), Some(&options))
    }
}

/// Returns true if a sample has only types that are known here. Other types may run the user's code, which must run
/// only once.
fn is_common(torch: &Torch, sample: &Bound<'_, PyAny>, depth: u32) -> bool {
    let kind = sample.get_type();
    if kind.is(&torch.tensor) || kind.is(&torch.ndarray) || is_number(sample) || is_text(sample) {
        return true;
    }
    if depth == DEEPEST {
        return false;
    }
    let is_common = |item: Bound<'_, PyAny>| is_common(torch, &item, depth + 1);
    if let Ok(dict) = sample.cast_exact::<PyDict>() {
        return entries_of(dict)
            .all(|(name, item)| name.is_exact_instance_of::<PyString>() && is_common(item));
    }
    if let Ok(list) = sample.cast_exact::<PyList>() {
        return list.iter().all(is_common);
    }
    sample.cast_exact::<PyTuple>().is_ok_and(|tuple| tuple.iter().all(is_common))
        // Asked of the class: an object's own `__class__` may be code.
        || kind.is_subclass(torch.numpy_scalar.bind(sample.py())).unwrap_or(false)
}

/// Returns true if torch's own entries name this very type: then the others are not asked.
fn is_found_by_type(torch: &Torch, sample: &Bound<'_, PyAny>) -> bool {
    let kind = sample.get_type();
    let is_bool = sample.is_exact_instance_of::<PyBool>();
    kind.is(&torch.tensor) || kind.is(&torch.ndarray) || is_text(sample) || (is_number(sample) && !is_bool)
}

/// The container in which torch collects the values in one place of all samples: it shows where they come out as they
/// are.
#[derive(Clone, Copy)]
enum Container {
    List,
    Tuple,
}

type Collated<'py> = PyResult<Option<Bound<'py, PyAny>>>;

struct Work<'a> {
    torch: &'a Torch,
    port: Option<&'a Port>,
    collate: &'a Collate,
    /// True if the caller gets an error of ours, and torch's function is not called: it would read beyond a storage
    /// where ours raises.
    is_final: Cell<bool>,
}

impl Work<'_> {
    /// Collates the values in one place of all samples. `None` where torch must do the whole batch.
    fn column<'py>(&self, items: &[Bound<'py, PyAny>], form: Container) -> Collated<'py> {
        let first = &items[0];
        if self.collate.is_others(self.torch, first)? {
            return Ok(None);
        }
        let made = if self.port.is_none() && first.get_type().is(&self.torch.tensor) {
            self.stacked_by_torch(items)?
        } else if let Some(rows) = Rows::of(self.torch, items)? {
            self.stacked(&rows, items)?
        } else if is_number(first) {
            self.numbers(items)?
        } else if first.get_type().is_subclass(self.torch.numpy_scalar.bind(first.py()))? {
            self.numpy_scalars(items)?
        } else if is_text(first) {
            return collected(items, form).map(Some);
        } else if let Ok(dict) = first.cast_exact::<PyDict>() {
            return self.dicts(dict, items);
        } else if let Ok(list) = first.cast_exact::<PyList>() {
            return self.sequences::<PyList>(items, list.len(), PyListMethods::get_item);
        } else if let Ok(tuple) = first.cast_exact::<PyTuple>() {
            return self.sequences::<PyTuple>(items, tuple.len(), PyTupleMethods::get_item);
        } else {
            None
        };
        let made = match made {
            None if first.get_type().is(&self.torch.tensor) => self.stacked_views(items)?,
            made => made,
        };
        match made {
            Some(made) => Ok(Some(made)),
            // A later part of the batch may still be refused, and then torch begins again.
            None if !items.iter().all(|item| is_common(self.torch, item, 0)) => Ok(None),
            None => {
                let fn_map = self.collate.unchanged.fn_map.bind(first.py());
                self.collate.torchs(&collected(items, form)?, Some(fn_map)).map(Some)
            }
        }
    }

    fn dicts<'py>(&self, first: &Bound<'py, PyDict>, items: &[Bound<'py, PyAny>]) -> Collated<'py> {
        let made = PyDict::new(first.py());
        let mut values = Vec::with_capacity(items.len());
        for name in first.keys() {
            for item in items {
                let Ok(dict) = item.cast_exact::<PyDict>() else { return Ok(None) };
                let Some(value) = dict.get_item(&name)? else { return Ok(None) };
                values.push(value);
            }
            let Some(column) = self.column(&values, Container::List)? else { return Ok(None) };
            made.set_item(name, column)?;
            values.clear();
        }
        Ok(Some(made.into_any()))
    }

    /// Lists, and tuples, which become lists.
    fn sequences<'py, T: PyTypeCheck>(
        &self,
        items: &[Bound<'py, PyAny>],
        len: usize,
        get: impl Fn(&Bound<'py, T>, usize) -> PyResult<Bound<'py, PyAny>>,
    ) -> Collated<'py> {
        let kind = items[0].get_type();
        for item in items {
            if !item.get_type().is(&kind) || item.len()? != len {
                return Ok(None);
            }
        }
        let made = PyList::empty(items[0].py());
        let mut values = Vec::with_capacity(items.len());
        for place in 0..len {
            for item in items {
                values.push(get(item.cast()?, place)?);
            }
            let Some(column) = self.column(&values, Container::Tuple)? else { return Ok(None) };
            made.append(column)?;
            values.clear();
        }
        Ok(Some(made.into_any()))
    }

    fn copied<'py>(
        &self,
        py: Python<'py>,
        rows: &Rows<'_, 'py>,
        memory: &BatchMemory<'py>,
    ) -> PyResult<bool> {
        rows.copy_to(py, &Destination::of(memory)).inspect_err(|_| self.is_final.set(true))
    }

    /// `None` where torch must make this column.
    fn stacked<'py>(&self, rows: &Rows<'_, 'py>, items: &[Bound<'py, PyAny>]) -> Collated<'py> {
        let py = items[0].py();
        let Some((dtype, shape, len)) = rows.stacked() else { return Ok(None) };
        let Some(memory) = self.memory(py, dtype, shape, len)? else { return Ok(None) };
        let is_copied = if memory.is_torchs() {
            // To make it may have run finalisers and other threads, which may have done anything to a sample.
            match Rows::of(self.torch, items)? {
                Some(now) if now.stacked() == rows.stacked() => self.copied(py, &now, &memory)?,
                _ => false,
            }
        } else {
            self.copied(py, rows, &memory)?
        };
        if is_copied { memory.into_tensor(py).map(Some) } else { Ok(None) }
    }

    /// torch's own stack of tensors: in private memory nothing is as fast. In a worker it is contiguous, and of the
    /// first one's type. `None` where torch must make this column.
    fn stacked_by_torch<'py>(&self, items: &[Bound<'py, PyAny>]) -> Collated<'py> {
        let (py, first) = (items[0].py(), &items[0]);
        if !items.iter().all(|item| item.get_type().is(&self.torch.tensor)) {
            return Ok(None);
        }
        let mut shape = vec![items.len() as i64];
        let Some(found) = describe_plain(self.torch, first, &mut shape)? else { return Ok(None) };
        if self.torch.is_lazy(first, found.dtype)? {
            return Ok(None);
        }
        if !self.collate.is_worker {
            return self.torch.stack(items).map(Some);
        }
        shape.truncate(1 + found.ndim);
        let allocator = Allocator { py, port: None, new_shared: None };
        let Some(memory) = BatchMemory::new(allocator, found.dtype, shape)? else { return Ok(None) };
        self.torch.stack_into(items, &memory.into_tensor(py)?).map(Some)
    }

    /// torch's own stack of tensors, the first of which is a conjugate or negative view: in a worker torch's function
    /// asks such a view for shared memory, and raises. `None` for others.
    fn stacked_views<'py>(&self, items: &[Bound<'py, PyAny>]) -> Collated<'py> {
        if self.torch.is_more(&items[0])? || !self.torch.is_view_of_other_values(&items[0])? {
            return Ok(None);
        }
        self.torch.stack(items).map(Some).inspect_err(|_| self.is_final.set(true))
    }

    /// Allocates memory for a column. `None` where torch must allocate it.
    fn memory<'py>(
        &self,
        py: Python<'py>,
        dtype: Dtype,
        shape: Vec<i64>,
        nbytes: u64,
    ) -> PyResult<Option<BatchMemory<'py>>> {
        match self.port {
            Some(port) => BatchMemory::in_slot(port, dtype, shape, nbytes),
            None => BatchMemory::new(Allocator { py, port: None, new_shared: None }, dtype, shape),
        }
    }

    /// Numbers of one of Python's types. `None` where torch must make this column: of several types, or one too large.
    fn numbers<'py>(&self, items: &[Bound<'py, PyAny>]) -> Collated<'py> {
        self.scalars(items, push_number)
    }

    /// Integers or floats of one of numpy's types. `None` for types that torch's versions take in different ways.
    fn numpy_scalars<'py>(&self, items: &[Bound<'py, PyAny>]) -> Collated<'py> {
        let Some(dtype) = dtype_of_scalars(&items[0].get_type())? else { return Ok(None) };
        self.scalars(items, |bytes, item| push_scalar(bytes, dtype, item).map(|()| Some(dtype)))
    }

    fn scalars<'py>(
        &self,
        items: &[Bound<'py, PyAny>],
        push: impl Fn(&mut Vec<u8>, &Bound<'py, PyAny>) -> PyResult<Option<Dtype>>,
    ) -> Collated<'py> {
        let kind = items[0].get_type();
        let (mut bytes, mut dtype) = (Vec::with_capacity(8 * items.len()), Dtype::I64);
        for item in items {
            let pushed = if item.get_type().is(&kind) { push(&mut bytes, item)? } else { None };
            let Some(found) = pushed else { return Ok(None) };
            dtype = found;
        }
        self.vector(items[0].py(), dtype, &bytes)
    }

    /// A tensor of one dimension. `None` where torch must make this column.
    fn vector<'py>(&self, py: Python<'py>, dtype: Dtype, bytes: &[u8]) -> Collated<'py> {
        let shape = vec![(bytes.len() / dtype.itemsize()) as i64];
        let Some(memory) = self.memory(py, dtype, shape, bytes.len() as u64)? else { return Ok(None) };
        fill(&Destination::of(&memory), bytes)?;
        memory.into_tensor(py).map(Some)
    }
}

/// Appends the bytes of one of Python's exact numbers. Returns its element type; `None` of any other object, and of an
/// integer that is too large.
///
/// # Errors
/// None: as [`push_scalar`].
#[inline]
pub(super) fn push_number(bytes: &mut Vec<u8>, object: &Bound<'_, PyAny>) -> PyResult<Option<Dtype>> {
    Ok(if object.is_exact_instance_of::<PyInt>() {
        let value = object.extract::<i64>().ok();
        value.map(|value| {
            bytes.extend_from_slice(&value.to_ne_bytes());
            Dtype::I64
        })
    } else if let Ok(value) = object.cast_exact::<PyFloat>() {
        bytes.extend_from_slice(&value.value().to_ne_bytes());
        Some(Dtype::F64)
    } else if let Ok(value) = object.cast_exact::<PyBool>() {
        bytes.push(value.is_true().into());
        Some(Dtype::Bool)
    } else {
        None
    })
}

/// Appends the bytes of a scalar of numpy's, whose type has this element type.
///
/// # Errors
/// The error that turning it into a number raises.
pub(super) fn push_scalar(bytes: &mut Vec<u8>, dtype: Dtype, scalar: &Bound<'_, PyAny>) -> PyResult<()> {
    match dtype {
        Dtype::F64 => bytes.extend(scalar.extract::<f64>()?.to_ne_bytes()),
        // Each is a `float32` before, so none is rounded.
        #[expect(clippy::cast_possible_truncation, reason = "none is rounded")]
        Dtype::F32 => bytes.extend((scalar.extract::<f64>()? as f32).to_ne_bytes()),
        Dtype::I32 => bytes.extend(scalar.extract::<i32>()?.to_ne_bytes()),
        Dtype::I16 => bytes.extend(scalar.extract::<i16>()?.to_ne_bytes()),
        Dtype::I8 => bytes.extend(scalar.extract::<i8>()?.to_ne_bytes()),
        Dtype::U8 => bytes.extend(scalar.extract::<u8>()?.to_ne_bytes()),
        _ => bytes.extend(scalar.extract::<i64>()?.to_ne_bytes()),
    }
    Ok(())
}

/// The element type of scalars of one of numpy's own types.
pub(super) fn dtype_of_scalars(kind: &Bound<'_, PyType>) -> PyResult<Option<Dtype>> {
    if kind.module()? != "numpy" {
        return Ok(None);
    }
    let name = kind.name()?;
    Ok(match name.to_str()? {
        "float64" => Some(Dtype::F64),
        "float32" => Some(Dtype::F32),
        "int64" | "longlong" => Some(Dtype::I64),
        "int32" => Some(Dtype::I32),
        "int16" => Some(Dtype::I16),
        "int8" => Some(Dtype::I8),
        "uint8" => Some(Dtype::U8),
        _ => None,
    })
}

fn collected<'py>(items: &[Bound<'py, PyAny>], form: Container) -> PyResult<Bound<'py, PyAny>> {
    let py = items[0].py();
    Ok(match form {
        Container::List => PyList::new(py, items)?.into_any(),
        Container::Tuple => PyTuple::new(py, items)?.into_any(),
    })
}
