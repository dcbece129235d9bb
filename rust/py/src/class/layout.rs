//! The layout that batches with the same table share, as a Python class.

use std::cell::RefCell;
use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::exceptions::PyValueError;
use pyo3::intern;
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
    /// The arguments for the packed tensors, in their order.
    packed: Vec<PackedArguments>,
}

/// A packed tensor, as `set_` takes it.
struct PackedArguments {
    block: usize,
    first: u64,
    shape: Py<PyTuple>,
    strides: Py<PyTuple>,
}

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
        let layout = if template.is_moved_by_leaves { Layout::of(py, &template)? } else { None };
        let layout = layout.map(|layout| Py::new(py, layout)).transpose()?;
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
    fn of(py: Python<'_>, template: &Arc<Template>) -> PyResult<Option<Self>> {
        let Some(plan) = Plan::of(template) else { return Ok(None) };
        let mut packed = Vec::new();
        for place in &plan.places {
            if let Place::Packed(Packed { block, offset, shape: Shape { dtype, shape, strides } }) = place {
                packed.push(PackedArguments {
                    block: *block,
                    first: offset / dtype.itemsize() as u64,
                    shape: objects::ints(py, shape.iter().copied())?.unbind(),
                    strides: objects::ints(py, strides.iter().copied())?.unbind(),
                });
            }
        }
        Ok(Some(Self { plan, packed }))
    }

    pub(crate) fn plan(&self) -> &Plan {
        &self.plan
    }

    fn shapes<'a>(&'a self, packed: bool) -> impl Iterator<Item = &'a Shape> + 'a {
        self.plan.places.iter().filter_map(move |place| match place {
            Place::Packed(Packed { shape, .. }) => packed.then_some(shape),
            Place::Alone(shape) => (!packed).then_some(shape),
        })
    }
}

fn others() -> PyErr {
    PyValueError::new_err("these are not the tensors of this layout")
}

#[pymethods]
impl Layout {
    /// Bytes of each block for packed tensors.
    #[getter]
    fn blocks(&self) -> Vec<u64> {
        self.plan.blocks.clone()
    }

    /// The element types of the packed tensors.
    #[getter]
    fn packed<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let torch = Torch::get(py)?;
        self.shapes(true).map(|shape| torch.torch_dtype(py, shape.dtype)).collect()
    }

    /// Shape, strides and element type of each of the other tensors.
    #[getter]
    #[expect(clippy::type_complexity, reason = "the arguments of a function of torch's")]
    fn large<'py>(&self, py: Python<'py>) -> PyResult<Vec<(Vec<i64>, Vec<i64>, Bound<'py, PyAny>)>> {
        let torch = Torch::get(py)?;
        let each = |shape: &Shape| {
            Ok((shape.shape.clone(), shape.strides.clone(), torch.torch_dtype(py, shape.dtype)?))
        };
        self.shapes(false).map(each).collect()
    }

    /// The batch with its tensors on a device.
    ///
    /// `empty` has an empty tensor of each packed one's type there, `blocks` the memory of the packed ones, and `large`
    /// the others.
    fn make<'py>(
        &self,
        py: Python<'py>,
        empty: Vec<Bound<'py, PyAny>>,
        blocks: Vec<Bound<'py, PyAny>>,
        large: Vec<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        if (empty.len(), blocks.len()) != (self.packed.len(), self.plan.blocks.len())
            || large.len() != self.plan.places.len() - self.packed.len()
        {
            return Err(others());
        }
        let storage = |block: &Bound<'py, PyAny>| block.call_method0(intern!(py, "untyped_storage"));
        let storages = blocks.iter().map(storage).collect::<PyResult<Vec<_>>>()?;
        let (mut packed, mut large) = (empty.iter().zip(&self.packed), large.into_iter());
        let mut tensors = Vec::with_capacity(self.plan.places.len());
        for place in &self.plan.places {
            let (empty, arguments) = match place {
                Place::Packed(_) => packed.next().ok_or_else(others)?,
                Place::Alone(_) => {
                    tensors.push(large.next().ok_or_else(others)?);
                    continue;
                }
            };
            let PackedArguments { block, first, shape, strides } = arguments;
            // The new tensor has a version counter of its own. A view of the block would share one with all others.
            let new = empty.getattr(intern!(py, "data"))?;
            let first = objects::unsigned(py, *first)?.into_any();
            let (shape, strides) = (shape.bind(py).clone().into_any(), strides.bind(py).clone().into_any());
            let arguments = objects::arguments(py, [storages[*block].clone(), first, shape, strides])?;
            tensors.push(new.call_method1(intern!(py, "set_"), arguments)?);
        }
        let tensors = RefCell::new(tensors.into_iter());
        let tensor = |_: &Form<'_>| tensors.borrow_mut().next().ok_or_else(others);
        self.plan.template.make_of(py, &tensor)
    }
}
