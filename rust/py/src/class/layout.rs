//! The layout that batches with the same table share, as a Python class.

use std::cell::RefCell;
use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use ringloader_core::sync::Arc;
use ringloader_core::transport::delivery::Delivery;

use crate::batch::layout::{Layout as Plan, Packed, Place, Shape};
use crate::batch::template::{Template, TemplateCache};
use crate::objects;
use crate::torch::names::Torch;
use crate::torch::tensor::Form;

/// Says how the tensors of a batch travel to a device. Consecutive batches with the same table share one object.
#[pyclass(frozen, module = "ringloader._native")]
pub(crate) struct Layout {
    plan: Plan,
}

/// Shape, strides and element type, as torch's functions take them.
type New<'py> = (Bound<'py, PyTuple>, Bound<'py, PyTuple>, Bound<'py, PyAny>);
/// Bytes of a block; number, offset and bytes of each tensor in it.
type Block = (u64, Vec<(usize, u64, u64)>);

/// The layout of an engine's last batch.
#[derive(Default)]
pub(crate) struct LayoutCache(Mutex<Option<Known>>);

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
        delivery: &Delivery,
    ) -> PyResult<Option<Py<Layout>>> {
        let Some(template) = templates.with(py, delivery, |template| Ok(template.clone()))? else {
            return Ok(None);
        };
        let copy = |layout: &Option<Py<Layout>>| layout.as_ref().map(|layout| layout.clone_ref(py));
        if let Some(known) = &*self.lock()
            && Arc::ptr_eq(&known.template, &template)
        {
            return Ok(copy(&known.layout));
        }
        let plan = if template.is_moved_by_leaves { Plan::of(&template) } else { None };
        let layout = plan.map(|plan| Py::new(py, Layout { plan })).transpose()?;
        let before = self.lock().replace(Known { template, layout: copy(&layout) });
        // After the lock is released: `before` may hold objects whose end runs any code.
        drop(before);
        Ok(layout)
    }

    fn lock(&self) -> MutexGuard<'_, Option<Known>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Layout {
    pub(crate) fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The arguments for new tensors on the device: the packed ones, or the others.
    fn new_ones<'py>(&self, py: Python<'py>, packed: bool) -> PyResult<Vec<New<'py>>> {
        let torch = Torch::get(py)?;
        let each = |Shape { dtype, shape, strides }: &Shape| {
            let ints = |values: &[i64]| objects::ints(py, values.iter().copied());
            Ok((ints(shape)?, ints(strides)?, torch.torch_dtype(py, *dtype)?))
        };
        let shapes = self.plan.places.iter().filter_map(|place| match place {
            Place::Packed(Packed { shape, .. }) => packed.then_some(shape),
            Place::Alone(shape) => (!packed).then_some(shape),
        });
        shapes.map(each).collect()
    }
}

fn others() -> PyErr {
    PyValueError::new_err("these are not the tensors of this layout")
}

#[pymethods]
impl Layout {
    /// Bytes of each block of packed tensors; number, offset and bytes of each tensor in it. A tensor without bytes is
    /// in no block.
    #[getter]
    fn blocks(&self) -> Vec<Block> {
        let mut blocks: Vec<Block> = self.plan.blocks.iter().map(|&len| (len, Vec::new())).collect();
        let packed = self.plan.places.iter().filter_map(|place| match place {
            Place::Packed(packed) => Some(packed),
            Place::Alone(_) => None,
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
    fn packed<'py>(&self, py: Python<'py>) -> PyResult<Vec<New<'py>>> {
        self.new_ones(py, true)
    }

    /// Shape, strides and element type of each of the other tensors.
    #[getter]
    fn large<'py>(&self, py: Python<'py>) -> PyResult<Vec<New<'py>>> {
        self.new_ones(py, false)
    }

    /// The batch with its tensors on a device: the packed ones, and the others.
    fn make<'py>(
        &self,
        py: Python<'py>,
        packed: Vec<Bound<'py, PyAny>>,
        large: Vec<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        if packed.len() + large.len() != self.plan.places.len() {
            return Err(others());
        }
        let (mut packed, mut large) = (packed.into_iter(), large.into_iter());
        let of = |place: &Place| match place {
            Place::Packed(_) => packed.next(),
            Place::Alone(_) => large.next(),
        };
        let tensors: Option<Vec<_>> = self.plan.places.iter().map(of).collect();
        let tensors = RefCell::new(tensors.ok_or_else(others)?.into_iter());
        let tensor = |_: &Form<'_>| tensors.borrow_mut().next().ok_or_else(others);
        self.plan.template.make_of(py, &tensor)
    }
}
