//! Samples as rows of a batch that all workers make: which samples `default_collate` stacks, where their rows go, and the
//! batch or the samples over them.
//!
//! All samples of such a batch have one form, with the same names in the same order: a worker sees some of them only.
//! A batch with other samples is left to `collate_fn`, which makes it or raises.

use pyo3::buffer::PyUntypedBuffer;
use pyo3::exceptions::PyException;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList, PyString, PyTuple};
use ringloader_core::batch::Dtype;
use ringloader_core::batch::rows::{Column, ColumnKind, DEEPEST, SampleForm};
use ringloader_core::joint::Part;
use ringloader_core::transport::joint::Rows as JointRows;

use super::default_collate::{Collate, dtype_of_scalars, push_number, push_scalar};
use super::rows::{Destination, Rows, dtype_of_format, fill, has_strides_of_torch};
use crate::batch::rows::batch;
use crate::gil::exception;
use crate::objects::{entries_of, items_of};
use crate::torch::elements::{Described, describe_plain};
use crate::torch::names::Torch;
use crate::torch::source::Bytes;
use crate::transport::claimed::Claimed;
use crate::transport::joint_port::JointPort;

/// Makes batches of a worker's samples and its siblings', as rows that `collate` would make.
#[pyclass(frozen, module = "ringloader._native")]
pub(crate) struct SampleRows {
    collate: Py<Collate>,
}

#[pymethods]
impl SampleRows {
    #[new]
    fn new(collate: Py<Collate>) -> Self {
        Self { collate }
    }

    /// Writes the samples of a run to their rows of the batch. False: this makes no rows of them, or not those of the
    /// batch, or the claim is another process's.
    ///
    /// # Errors
    /// `RuntimeError` if a tensor is larger than its storage; `MemoryError`; what torch raises.
    fn write_rows(&self, port: &JointPort, claimed: &Claimed, samples: &Bound<'_, PyAny>) -> PyResult<bool> {
        let py = samples.py();
        port.note_made(claimed);
        let (tasks, claimed) = (port.tasks(), &claimed.core);
        let run = claimed.samples();
        let Ok(samples) = samples.cast_exact::<PyList>() else { return Ok(false) };
        let samples: Vec<_> = items_of(samples).collect();
        if !port.has_claims()
            || samples.is_empty()
            || samples.len() as u64 != run.end - run.start
            || !self.collate.get().is_unchanged(py)?
        {
            return Ok(false);
        }
        let Some(form) = form_of(self.collate.get(), &samples[0])? else { return Ok(false) };
        let places = tasks.columns_of(claimed, &form, port.probe()).map_err(exception)?;
        let Some(places) = places else { return Ok(false) };
        let own = |place| Destination::in_window(tasks, claimed, place, run.clone());
        let columns = places.into_iter().map(own).collect::<PyResult<Vec<_>>>()?;
        write(Torch::get(py)?, &form, &samples, &mut columns.into_iter())
    }

    /// The batch, if the samples of all its runs lie in rows; `own` are those of the run that was claimed. Else None.
    ///
    /// # Errors
    /// As `write_rows`.
    fn over_rows<'py>(
        &self,
        py: Python<'py>,
        port: &JointPort,
        claimed: &Claimed,
        own: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let (tasks, core) = (port.tasks(), &claimed.core);
        for run in 0..core.plan.runs() {
            let is_there = match (tasks.claims().of(core).part(run), own) {
                (Some(Part::Rows), _) => true,
                (None, Some(own)) if core.claim.run == Some(run) => self.write_rows(port, claimed, own)?,
                _ => false,
            };
            if !is_there {
                return Ok(None);
            }
        }
        if !self.collate.get().is_unchanged(py)? {
            return Ok(None);
        }
        let Some(rows) = tasks.rows(core).map_err(exception)? else { return Ok(None) };
        let JointRows { form, mut columns, end } = rows;
        columns.iter_mut().for_each(|place| place.offset += tasks.window_of(core));
        let made = batch(py, &form, &columns, core.plan.samples, Bytes::Window(tasks.bytes()))?;
        port.note_read(claimed);
        port.note_collated(claimed, end);
        Ok(Some(made))
    }
}

/// Returns the form of a sample; `None` of one whose batch is not made of rows.
///
/// # Errors
/// An error that is no `Exception`.
fn form_of(collate: &Collate, sample: &Bound<'_, PyAny>) -> PyResult<Option<SampleForm>> {
    let py = sample.py();
    match (Look { torch: Torch::get(py)?, collate }).form(sample, 0) {
        // torch raises it again.
        Err(error) if error.is_instance_of::<PyException>(py) => Ok(None),
        found => found,
    }
}

struct Look<'a> {
    torch: &'a Torch,
    collate: &'a Collate,
}

impl Look<'_> {
    fn form(&self, object: &Bound<'_, PyAny>, depth: u32) -> PyResult<Option<SampleForm>> {
        if depth == DEEPEST || self.collate.is_others(self.torch, object)? {
            return Ok(None);
        }
        let leaf = self.torch.column(object)?;
        if leaf.is_some() {
            return Ok(leaf.map(SampleForm::Column));
        }
        let forms = |items: &mut dyn Iterator<Item = Bound<'_, PyAny>>| {
            items.map(|item| self.form(&item, depth + 1)).collect::<PyResult<Option<Vec<_>>>>()
        };
        if let Ok(list) = object.cast_exact::<PyList>() {
            return Ok(forms(&mut items_of(list))?.map(SampleForm::List));
        }
        if let Ok(tuple) = object.cast_exact::<PyTuple>() {
            return Ok(forms(&mut tuple.iter())?.map(SampleForm::Tuple));
        }
        let Ok(dict) = object.cast_exact::<PyDict>() else { return Ok(None) };
        let mut items = Vec::with_capacity(dict.len());
        for (name, item) in entries_of(dict) {
            // Lone surrogates are no UTF-8.
            let Some(name) = name.cast_exact::<PyString>().ok().and_then(|name| name.to_str().ok()) else {
                return Ok(None);
            };
            let Some(form) = self.form(&item, depth + 1)? else { return Ok(None) };
            items.push((name.to_owned(), form));
        }
        Ok(Some(SampleForm::Dict(items)))
    }
}

impl Torch {
    /// The column of an object that is a leaf, and whose stack torch makes of its values alone.
    fn column(&self, object: &Bound<'_, PyAny>) -> PyResult<Option<Column>> {
        let kind = object.get_type();
        let found = if kind.is(&self.tensor) {
            self.column_of_tensor(object)?
        } else if kind.is(&self.ndarray) {
            column_of_array(object)
        } else {
            let of = |kind| move |dtype| Column { kind, dtype, shape: Vec::new() };
            let number = push_number(&mut Vec::new(), object)?.map(of(ColumnKind::Number));
            if number.is_some() {
                number
            } else {
                self.scalar(&mut Vec::new(), object)?.map(of(ColumnKind::Scalar))
            }
        };
        Ok(found.filter(|column| column.row_len().is_some_and(|len| len > 0)))
    }

    fn column_of_tensor(&self, tensor: &Bound<'_, PyAny>) -> PyResult<Option<Column>> {
        let mut shape = Vec::new();
        // A tensor whose elements have no memory is one of some other kind.
        let found = describe_plain(self, tensor, &mut shape)?.filter(|found| found.address != 0);
        let Some(Described { dtype, ndim, .. }) = found else { return Ok(None) };
        shape.truncate(ndim);
        Ok((!self.is_lazy(tensor, dtype)?).then_some(Column { kind: ColumnKind::Tensor, dtype, shape }))
    }

    /// Appends the bytes of one of numpy's scalars. Returns its element type; `None` of any other object.
    fn scalar(&self, bytes: &mut Vec<u8>, object: &Bound<'_, PyAny>) -> PyResult<Option<Dtype>> {
        // Asked of the class: an object's own `__class__` may be code.
        if !object.get_type().is_subclass(self.numpy_scalar.bind(object.py()))? {
            return Ok(None);
        }
        let Some(dtype) = dtype_of_scalars(&object.get_type())? else { return Ok(None) };
        push_scalar(bytes, dtype, object).map(|()| Some(dtype))
    }
}

fn column_of_array(array: &Bound<'_, PyAny>) -> Option<Column> {
    let buffer = PyUntypedBuffer::get(array).ok()?;
    let dtype = dtype_of_format(buffer.format().to_bytes(), buffer.item_size())?;
    // torch warns of the one, and refuses the other.
    let is_taken = !buffer.readonly() && has_strides_of_torch(array, dtype, 0);
    let shape = buffer.shape().iter().map(|&size| size as i64).collect();
    (is_taken && buffer.dimensions() > 0).then_some(Column { kind: ColumnKind::Array, dtype, shape })
}

/// Writes the rows of samples, column by column to the next of `columns`. `false` if a sample is of another form than
/// `form`: some rows may be written then.
///
/// # Errors
/// `RuntimeError` if a tensor is larger than its storage; what torch raises.
fn write<'a>(
    torch: &Torch,
    form: &SampleForm,
    samples: &[Bound<'_, PyAny>],
    columns: &mut impl Iterator<Item = Destination<'a>>,
) -> PyResult<bool> {
    let mut values = Vec::with_capacity(samples.len());
    match form {
        SampleForm::Column(column) => {
            let Some(to) = columns.next() else { return Ok(false) };
            write_column(torch, column, samples, &to)
        }
        SampleForm::List(items) | SampleForm::Tuple(items) => {
            let is_list = matches!(form, SampleForm::List(_));
            let is_it = |sample: &Bound<'_, PyAny>| {
                let is_kind = if is_list {
                    sample.is_exact_instance_of::<PyList>()
                } else {
                    sample.is_exact_instance_of::<PyTuple>()
                };
                is_kind && sample.len().is_ok_and(|len| len == items.len())
            };
            if !samples.iter().all(is_it) {
                return Ok(false);
            }
            for (place, item) in items.iter().enumerate() {
                values.clear();
                for sample in samples {
                    values.push(sample.get_item(place)?);
                }
                if !write(torch, item, &values, columns)? {
                    return Ok(false);
                }
            }
            Ok(true)
        }
        SampleForm::Dict(items) => {
            // torch takes names, and their order, from the batch's first sample, which may be another worker's.
            if !samples.iter().all(|sample| has_names(sample, items)) {
                return Ok(false);
            }
            for (name, item) in items {
                values.clear();
                for sample in samples {
                    let found =
                        sample.cast_exact::<PyDict>().ok().map(|dict| dict.get_item(name)).transpose()?;
                    let Some(value) = found.flatten() else { return Ok(false) };
                    values.push(value);
                }
                if !write(torch, item, &values, columns)? {
                    return Ok(false);
                }
            }
            Ok(true)
        }
    }
}

fn has_names(sample: &Bound<'_, PyAny>, items: &[(String, SampleForm)]) -> bool {
    let Ok(dict) = sample.cast_exact::<PyDict>() else { return false };
    let is_it = |(name, _): (Bound<'_, PyAny>, _), expected: &str| {
        name.cast_exact::<PyString>().is_ok_and(|name| name.to_str().is_ok_and(|name| name == expected))
    };
    dict.len() == items.len()
        && entries_of(dict).zip(items).all(|(entry, (expected, _))| is_it(entry, expected))
}

fn write_column(
    torch: &Torch,
    column: &Column,
    samples: &[Bound<'_, PyAny>],
    to: &Destination<'_>,
) -> PyResult<bool> {
    if let ColumnKind::Number | ColumnKind::Scalar = column.kind {
        let mut bytes = Vec::with_capacity(8 * samples.len());
        for sample in samples {
            let pushed = match column.kind {
                ColumnKind::Number => push_number(&mut bytes, sample)?,
                _ => torch.scalar(&mut bytes, sample)?,
            };
            if pushed != Some(column.dtype) {
                return Ok(false);
            }
        }
        return fill(to, &bytes).map(|()| true);
    }
    let py = samples[0].py();
    let is_tensor = samples[0].get_type().is(&torch.tensor);
    if is_tensor == (column.kind == ColumnKind::Tensor)
        && let Some(rows) = Rows::of(torch, samples)?
        && let Some((dtype, shape, _)) = rows.stacked()
    {
        let is_it = dtype == column.dtype && shape[1..] == column.shape;
        return if is_it { rows.copy_to(py, to) } else { Ok(false) };
    }
    // Some are not contiguous.
    let mut tensors = Vec::with_capacity(samples.len());
    for sample in samples {
        if torch.column(sample)?.as_ref() != Some(column) {
            return Ok(false);
        }
        let is_array = column.kind == ColumnKind::Array;
        tensors.push(if is_array { torch.tensor_of_array(sample)? } else { sample.clone() });
    }
    let shape: Vec<i64> = [samples.len() as i64].iter().chain(&column.shape).copied().collect();
    let Some(out) = to.tensor(py, column.dtype, &shape)? else { return Ok(false) };
    torch.stack_into(&tensors, &out).map(|_| true)
}
