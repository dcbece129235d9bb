//! Plans how the tensors of a batch travel to a device: small ones together, large ones by themselves.

use pyo3::prelude::*;
use ringloader_core::batch::Dtype;
use ringloader_core::sync::Arc;
use ringloader_core::transport::delivery::Delivery;

use super::limits::{BLOCK_ALIGNMENT, LARGEST_BLOCK, PACKED};
use super::template::Template;
use crate::torch::source::pinned_copy;
use crate::torch::tensor::Form;

/// The plan that batches with the same table share. Each tensor's bytes lie in one piece.
pub(crate) struct Layout {
    pub(crate) template: Arc<Template>,
    /// By tensor, in the template's order.
    pub(crate) places: Vec<Place>,
    /// Bytes of each block of packed tensors, in the order of the staging memory.
    pub(crate) blocks: Vec<u64>,
}

/// The way of a tensor to the device.
pub(crate) enum Place {
    /// In a block with others.
    Packed(Packed),
    /// By itself.
    Alone(Shape),
}

/// A tensor in a block. Without bytes, it is in none.
pub(crate) struct Packed {
    pub(crate) block: usize,
    /// In bytes.
    pub(crate) offset: u64,
    /// In bytes.
    pub(crate) len: u64,
    pub(crate) shape: Shape,
}

/// A tensor's description without its bytes; strides in elements.
pub(crate) struct Shape {
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<i64>,
    pub(crate) strides: Vec<i64>,
}

impl Shape {
    fn of(form: &Form<'_>) -> Self {
        let (shape, strides) = form.shape_and_strides();
        Self { dtype: form.dtype(), shape, strides }
    }
}

impl Layout {
    /// `None` if there are gaps in a tensor.
    pub(crate) fn of(template: &Arc<Template>) -> Option<Self> {
        let mut blocks = vec![0];
        let mut places = Vec::new();
        for form in template.forms() {
            let len = form.dense_len()?;
            let shape = Shape::of(form);
            if len > PACKED {
                places.push(Place::Alone(shape));
                continue;
            }
            let mut block = blocks.len() - 1;
            if blocks[block] + len > LARGEST_BLOCK {
                blocks.push(0);
                block += 1;
            }
            let offset = blocks[block];
            blocks[block] = (offset + len).next_multiple_of(BLOCK_ALIGNMENT);
            places.push(Place::Packed(Packed { block, offset, len, shape }));
        }
        blocks.retain(|&len| len > 0);
        Some(Self { template: template.clone(), places, blocks })
    }

    /// Copies the packed tensors to a new pinned tensor of bytes, one block behind the other; `None` if there are none.
    ///
    /// # Errors
    /// The error that torch raises; `RuntimeError` when the bytes are not all there.
    pub(crate) fn stage<'py>(
        &self,
        py: Python<'py>,
        delivery: &Delivery,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let starts: Vec<u64> =
            self.blocks.iter().scan(0, |next, len| Some(std::mem::replace(next, *next + len))).collect();
        let mut parts = Vec::with_capacity(self.places.len());
        for (form, place) in self.template.forms().into_iter().zip(&self.places) {
            if let Place::Packed(Packed { block, offset, .. }) = place
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
    pub(crate) fn large<'py>(
        &self,
        py: Python<'py>,
        delivery: &Delivery,
        pinned: bool,
    ) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let alone = |(form, place)| match place {
            &Place::Packed(_) => None,
            Place::Alone(shape) => Some((form, shape)),
        };
        let pairs = self.template.forms().into_iter().zip(&self.places).filter_map(alone);
        let one = |(form, shape): (&Form<'_>, &Shape)| match form.dense_bytes(delivery)? {
            Some(span) if pinned => {
                pinned_copy(py, shape.dtype, shape.shape.clone(), shape.strides.clone(), &[(span, 0)])
            }
            _ => form.tensor(py, delivery, None),
        };
        pairs.map(one).collect()
    }
}
