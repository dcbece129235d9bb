//! The way of a batch's tensors to a device, as a Python class: small ones together, large ones by themselves.
//!
//! Consecutive batches with the same table share one plan.

use std::cell::RefCell;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use ringloader_core::batch::Dtype;
use ringloader_core::sync::{Arc, Lock};
use ringloader_core::transport::received::Received;

use super::template::{Template, TemplateCache};
use crate::torch::names::Torch;
use crate::torch::source::pinned_copy;
use crate::torch::tensor::TensorForm;

/// Tensors up to this size go to a device with others, in one copy.
const PACKED: u64 = 64 << 10;

/// The most bytes of a block that is copied to a device. While the device takes a block apart, its bytes are there
/// twice.
const LARGEST_BLOCK: u64 = 1 << 20;

/// The alignment of tensors in a block: four words, which a device's thread reads at once.
const BLOCK_ALIGNMENT: u64 = 32;

/// Says how the tensors of a batch travel to a device. Consecutive batches with the same table share one object. Each
/// tensor's bytes lie in one piece.
#[pyclass(frozen, module = "ringloader._native")]
pub(crate) struct Layout {
    template: Arc<Template>,
    /// By tensor, in the template's order.
    routes: Vec<Route>,
    /// Bytes of each block of packed tensors, in the order of the staging memory.
    blocks: Vec<u64>,
}

/// The way of a tensor to the device.
enum Route {
    /// In a block with others.
    Packed(Packed),
    /// By itself.
    Alone(Shape),
}

/// A tensor in a block. Without bytes, it is in none.
struct Packed {
    block: usize,
    /// In bytes.
    offset: u64,
    /// In bytes.
    len: u64,
    shape: Shape,
}

/// A tensor's description without its bytes; strides in elements.
struct Shape {
    dtype: Dtype,
    shape: Vec<i64>,
    strides: Vec<i64>,
}

impl Shape {
    fn of(form: &TensorForm<'_>) -> Self {
        let (shape, strides) = form.shape_and_strides();
        Self { dtype: form.dtype(), shape, strides }
    }
}

impl Layout {
    /// `None` if there are gaps in a tensor.
    fn of(template: &Arc<Template>) -> Option<Self> {
        let mut blocks = vec![0];
        let mut routes = Vec::new();
        for form in template.forms() {
            let len = form.dense_len()?;
            let shape = Shape::of(form);
            if len > PACKED {
                routes.push(Route::Alone(shape));
                continue;
            }
            let mut block = blocks.len() - 1;
            if blocks[block] + len > LARGEST_BLOCK {
                blocks.push(0);
                block += 1;
            }
            let offset = blocks[block];
            blocks[block] = (offset + len).next_multiple_of(BLOCK_ALIGNMENT);
            routes.push(Route::Packed(Packed { block, offset, len, shape }));
        }
        blocks.retain(|&len| len > 0);
        Some(Self { template: template.clone(), routes, blocks })
    }

    /// Copies the packed tensors to a new pinned tensor of bytes, one block after the other; `None` if there are none.
    ///
    /// # Errors
    /// The error that torch raises; `RuntimeError` when the bytes are not all there.
    pub(crate) fn stage<'py>(
        &self,
        py: Python<'py>,
        delivery: &Received,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let starts: Vec<u64> =
            self.blocks.iter().scan(0, |next, len| Some(std::mem::replace(next, *next + len))).collect();
        let mut parts = Vec::with_capacity(self.routes.len());
        for (form, route) in self.template.forms().into_iter().zip(&self.routes) {
            if let Route::Packed(Packed { block, offset, .. }) = route
                && let Some(span) = form.dense_bytes(delivery)?
            {
                parts.push((span, starts[*block] + offset));
            }
        }
        let len: u64 = self.blocks.iter().sum();
        if len == 0 {
            return Ok(None);
        }
        pinned_copy(py, Dtype::U8, vec![len as i64], vec![1], &parts).map(Some)
    }

    /// Returns the other tensors: over the bytes of the batch, or copies in pinned memory.
    ///
    /// # Errors
    /// The error that torch raises; `RuntimeError` when the bytes are not all there.
    pub(crate) fn stage_large<'py>(
        &self,
        py: Python<'py>,
        delivery: &Received,
        pinned: bool,
    ) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let alone = |(form, route)| match route {
            &Route::Packed(_) => None,
            Route::Alone(shape) => Some((form, shape)),
        };
        let pairs = self.template.forms().into_iter().zip(&self.routes).filter_map(alone);
        let one = |(form, shape): (&TensorForm<'_>, &Shape)| match form.dense_bytes(delivery)? {
            Some(span) if pinned => {
                pinned_copy(py, shape.dtype, shape.shape.clone(), shape.strides.clone(), &[(span, 0)])
            }
            _ => form.tensor(py, delivery, None),
        };
        pairs.map(one).collect()
    }
}

/// Shape, strides and element type, as torch's functions take them.
type NewTensor<'py> = (Bound<'py, PyTuple>, Bound<'py, PyTuple>, Bound<'py, PyAny>);
/// Bytes of a block; number, offset and bytes of each tensor in it.
type Block = (u64, Vec<(usize, u64, u64)>);

/// The layout of an engine's last batch.
#[derive(Default)]
pub(crate) struct LayoutCache(Lock<Option<Known>>);

struct Known {
    template: Arc<Template>,
    /// `None` where there are gaps in a tensor.
    layout: Option<Py<Layout>>,
}

impl LayoutCache {
    /// The layout of a delivery; `None` for a batch that is more than dense tensors, each with memory of its own, in
    /// lists, tuples and dicts.
    ///
    /// # Errors
    /// The error that torch raises; `RuntimeError` for a table that no worker writes.
    pub(crate) fn of(
        &self,
        py: Python<'_>,
        templates: &TemplateCache,
        delivery: &Received,
    ) -> PyResult<Option<Py<Layout>>> {
        let Some(template) = templates.with(py, delivery, |template| Ok(template.clone()))? else {
            return Ok(None);
        };
        let copy = |layout: &Option<Py<Layout>>| layout.as_ref().map(|layout| layout.clone_ref(py));
        if let Some(known) = &*self.0.lock()
            && Arc::ptr_eq(&known.template, &template)
        {
            return Ok(copy(&known.layout));
        }
        let layout = if template.is_moved_by_leaves { Layout::of(&template) } else { None };
        let layout = layout.map(|layout| Py::new(py, layout)).transpose()?;
        let before = self.0.lock().replace(Known { template, layout: copy(&layout) });
        // After the lock is released: `before` may hold objects whose end runs any code.
        drop(before);
        Ok(layout)
    }
}

impl Layout {
    /// The arguments for new tensors on the device: the packed ones, or the others.
    fn new_tensors<'py>(&self, py: Python<'py>, packed: bool) -> PyResult<Vec<NewTensor<'py>>> {
        let torch = Torch::get(py)?;
        let each = |Shape { dtype, shape, strides }: &Shape| {
            let ints = |values: &[i64]| PyTuple::new(py, values);
            Ok((ints(shape)?, ints(strides)?, torch.torch_dtype(py, *dtype)?))
        };
        let shapes = self.routes.iter().filter_map(|route| match route {
            Route::Packed(Packed { shape, .. }) => packed.then_some(shape),
            Route::Alone(shape) => (!packed).then_some(shape),
        });
        shapes.map(each).collect()
    }
}

fn other_tensors() -> PyErr {
    PyValueError::new_err("these are not the tensors of this layout")
}

#[pymethods]
impl Layout {
    /// Bytes of each block of packed tensors; number, offset and bytes of each tensor in it. A tensor without bytes is
    /// in no block.
    #[getter]
    fn blocks(&self) -> Vec<Block> {
        let mut blocks: Vec<Block> = self.blocks.iter().map(|&len| (len, Vec::new())).collect();
        let packed = self.routes.iter().filter_map(|route| match route {
            Route::Packed(packed) => Some(packed),
            Route::Alone(_) => None,
        });
        for (number, Packed { block, offset, len, .. }) in packed.enumerate() {
            if *len > 0 {
                blocks[*block].1.push((number, *offset, *len));
            }
        }
        blocks
    }

    /// Shape, strides and element type of each packed tensor.
    #[getter]
    fn packed<'py>(&self, py: Python<'py>) -> PyResult<Vec<NewTensor<'py>>> {
        self.new_tensors(py, true)
    }

    /// Shape, strides and element type of each of the other tensors.
    #[getter]
    fn large<'py>(&self, py: Python<'py>) -> PyResult<Vec<NewTensor<'py>>> {
        self.new_tensors(py, false)
    }

    /// The batch with its tensors on a device: the packed ones, and the others.
    fn make<'py>(
        &self,
        py: Python<'py>,
        packed: Vec<Bound<'py, PyAny>>,
        large: Vec<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        if packed.len() + large.len() != self.routes.len() {
            return Err(other_tensors());
        }
        let (mut packed, mut large) = (packed.into_iter(), large.into_iter());
        let of = |route: &Route| match route {
            Route::Packed(_) => packed.next(),
            Route::Alone(_) => large.next(),
        };
        let tensors: Option<Vec<_>> = self.routes.iter().map(of).collect();
        let tensors = RefCell::new(tensors.ok_or_else(other_tensors)?.into_iter());
        let tensor = |_: &TensorForm<'_>| tensors.borrow_mut().next().ok_or_else(other_tensors);
        self.template.make_of(py, &tensor)
    }
}
