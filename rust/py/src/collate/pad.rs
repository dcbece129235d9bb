//! `ringloader.batchify.Pad`, native for plain samples and written straight into the slot.

use std::sync::OnceLock;

use pyo3::exceptions::{PyException, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use ringloader_core::batch::Dtype;

use super::batch_memory::{Allocator, BatchMemory};
use super::exact_items;
use super::padded::{Cast, Padded, Pattern};
use super::ragged::{Ragged, Shapes};
use super::rows::{Destination, fill};
use crate::gil::in_thread;
use crate::torch::names::Torch;
use crate::transport::port::Port;

/// Pads samples to one size. What it is not certain of, it leaves to Python.
#[pyclass(frozen, module = "ringloader._native")]
pub(crate) struct Pad {
    /// The type of the batch; `None` for that of the samples.
    dtype: Option<Py<PyAny>>,
    /// Dimensions that are padded, counted from the end if negative; `None` for all.
    axes: Option<Vec<isize>>,
    round_to: usize,
    lengths: bool,
    /// Python's function that gives the bytes of the value, as an element of some type.
    value: Py<PyAny>,
    /// The bytes that it has given, by the types' codes.
    values: [OnceLock<Pattern>; Dtype::ALL.len()],
}

#[pymethods]
impl Pad {
    #[new]
    fn new(
        dtype: Option<Py<PyAny>>,
        axes: Option<Vec<isize>>,
        round_to: usize,
        lengths: bool,
        value: Py<PyAny>,
    ) -> PyResult<Self> {
        if round_to == 0 {
            return Err(PyValueError::new_err("'round_to' must be positive, not 0"));
        }
        Ok(Self {
            dtype,
            axes,
            round_to,
            lengths,
            value,
            values: [const { OnceLock::new() }; Dtype::ALL.len()],
        })
    }

    /// The batch, with the lengths if they are asked for; None for what Python must pad. `port` and `new_shared` are
    /// where this process has memory for it.
    fn __call__<'py>(
        &self,
        samples: &Bound<'py, PyAny>,
        port: Option<&Bound<'py, Port>>,
        new_shared: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let py = samples.py();
        let Some(items) = exact_items(samples) else { return Ok(None) };
        let allocator = Allocator { py, port: port.map(Bound::get), new_shared };
        let pad = || self.padded(&items, allocator);
        // Without a port this may be a worker's thread.
        match if port.is_some() { pad() } else { in_thread(py, pad) } {
            // Python's own padding raises it again, or a better one.
            Err(error) if error.is_instance_of::<PyException>(py) => Ok(None),
            made => made,
        }
    }
}

impl Pad {
    fn padded<'py>(
        &self,
        items: &[Bound<'py, PyAny>],
        allocator: Allocator<'_, 'py>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let py = allocator.py;
        let torch = Torch::get(py)?;
        let wanted = match &self.dtype {
            None => None,
            Some(dtype) => {
                let Some(dtype) = torch.dtype_meant(dtype.bind(py)) else { return Ok(None) };
                Some(dtype)
            }
        };
        let Some(ragged) = Ragged::of(torch, items)? else { return Ok(None) };
        let dtype = if wanted.is_some() { wanted } else { ragged.batch_dtype(torch, py)? };
        let Some(dtype) = dtype else { return Ok(None) };
        let Some(cast) = Cast::new(&ragged, dtype) else { return Ok(None) };
        if self.known_value(dtype).is_none() {
            self.ask_value(torch, py, dtype)?;
            // That was Python's code.
            return self.padded(items, allocator);
        }
        let shapes = ragged.shapes();
        let (Some(axes), Some(value)) = (self.axes_of(shapes.ndim), self.known_value(dtype)) else {
            return Ok(None);
        };
        let Some(size) = self.size(shapes, &axes) else { return Ok(None) };
        let shape = [shapes.count].iter().chain(&size).map(|&size| size as i64).collect();
        let Some(memory) = BatchMemory::new(allocator, dtype, shape)? else { return Ok(None) };
        let Some(padded) = Padded::new(&memory, items.len(), dtype, &size, value) else { return Ok(None) };
        // Making torch's memory may bring finalisers about.
        let ragged = if memory.is_torchs() { ragged.again(torch, items)? } else { Some(ragged) };
        let Some(ragged) = ragged else { return Ok(None) };
        if !padded.write(items, &ragged, cast)? {
            return Ok(None);
        }
        let batch = memory.into_tensor(py)?;
        if !self.lengths {
            return Ok(Some(batch));
        }
        let Some(lengths) = lengths(allocator, ragged.shapes(), &axes)? else { return Ok(None) };
        Ok(Some(PyTuple::new(py, [batch, lengths])?.into_any()))
    }

    /// The dimensions that are padded; `None` where the samples do not have one of them, or one is named twice.
    fn axes_of(&self, ndim: usize) -> Option<Vec<usize>> {
        let Some(axes) = &self.axes else { return Some((0..ndim).collect()) };
        let from_front =
            |&axis: &isize| if axis < 0 { ndim.checked_add_signed(axis) } else { Some(axis as usize) };
        let axes: Vec<usize> = axes.iter().map(from_front).collect::<Option<_>>()?;
        let is_once = |(at, axis): (usize, &usize)| *axis < ndim && !axes[..at].contains(axis);
        axes.iter().enumerate().all(is_once).then_some(axes)
    }

    /// Returns the size of a padded sample; `None` where sizes differ that are not padded.
    fn size(&self, shapes: &Shapes, axes: &[usize]) -> Option<Vec<usize>> {
        let mut size = shapes.get(0).to_vec();
        for shape in shapes.iter() {
            for (dim, &len) in shape.iter().enumerate() {
                if len != size[dim] {
                    if !axes.contains(&dim) {
                        return None;
                    }
                    size[dim] = size[dim].max(len);
                }
            }
        }
        for &axis in axes {
            size[axis] = size[axis].checked_next_multiple_of(self.round_to)?;
        }
        Some(size)
    }

    fn known_value(&self, dtype: Dtype) -> Option<Pattern> {
        self.values[usize::from(dtype.code())].get().copied()
    }

    /// Asks Python for the bytes of the value.
    ///
    /// # Errors
    /// `ValueError` when the type does not have it.
    fn ask_value(&self, torch: &Torch, py: Python<'_>, dtype: Dtype) -> PyResult<()> {
        let bytes: Vec<u8> = self.value.bind(py).call1((torch.torch_dtype(py, dtype)?,))?.extract()?;
        if bytes.len() != dtype.itemsize() {
            return Err(PyValueError::new_err(format!("a value of {} bytes", bytes.len())));
        }
        let mut pattern = Pattern::default();
        pattern[..bytes.len()].copy_from_slice(&bytes);
        let _ = self.values[usize::from(dtype.code())].set(pattern);
        Ok(())
    }
}

/// The samples' sizes along the axes, as a tensor.
fn lengths<'py>(
    allocator: Allocator<'_, 'py>,
    shapes: &Shapes,
    axes: &[usize],
) -> PyResult<Option<Bound<'py, PyAny>>> {
    let mut shape = vec![shapes.count as i64];
    shape.extend((axes.len() != 1).then_some(axes.len() as i64));
    let Some(memory) = BatchMemory::new(allocator, Dtype::I64, shape)? else { return Ok(None) };
    let sizes = shapes.iter().flat_map(|shape| axes.iter().map(|&axis| shape[axis] as i64));
    let bytes: Vec<u8> = sizes.flat_map(i64::to_ne_bytes).collect();
    fill(&Destination::of(&memory), &bytes)?;
    memory.into_tensor(allocator.py).map(Some)
}
