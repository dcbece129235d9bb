//! A Python batch to leaves and a skeleton.
//!
//! Exact dicts, lists, tuples, named tuples, numbers, strings, bytes and `None` become tokens; plain
//! tensors and arrays become leaves. Where anything else comes up, the whole batch is pickled
//! instead, still with tensors, arrays and storages as leaves: one pickle keeps "the same object
//! twice" over the whole batch, as torch's does.

use std::sync::{Mutex, PoisonError};

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple};
use ringloader_core::batch::wire::MAX_NDIM;
use ringloader_core::batch::{ArrayFlags, Dtype, MetaWriter};

use super::grouping::Groups;
use super::identity::ByIdentity;
use super::objects::describe;
use super::torch::Torch;

/// Trees that are deeper are pickled, which has a limit and an error of its own.
const DEEPEST: u32 = 100;
/// The longest table whose memory is kept for the next batch.
const KEPT: usize = 256 << 10;
/// Longer `bytes` are leaves, shorter ones lie in the skeleton.
const INLINE_BYTES: usize = 4096;

/// What a leaf is, but for the place of its bytes.
pub(crate) enum LeafKind {
    Tensor { dtype: Dtype, dims: Dims },
    Array { flags: ArrayFlags, itemsize: u64, tag: Vec<u8>, shape: Vec<i64> },
    Storage,
    Bytes,
}

impl LeafKind {
    /// Whether it shares memory with the other leaves that overlap it, as torch keeps it for tensors.
    pub(crate) fn aliases(&self) -> bool {
        matches!(self, Self::Tensor { .. } | Self::Storage)
    }
}

/// Where in [`Drafts`] a tensor's shape lies, with its strides behind it.
#[derive(Clone, Copy)]
pub(crate) struct Dims {
    first: usize,
    ndim: usize,
}

/// A leaf and where its bytes are now.
pub(crate) struct LeafDraft {
    pub(crate) address: usize,
    pub(crate) len: u64,
    pub(crate) alignment: usize,
    pub(crate) kind: LeafKind,
    /// Its object's place among those that are held.
    held: usize,
}

/// The leaves of one batch.
#[derive(Default)]
pub(crate) struct Drafts {
    pub(crate) leaves: Vec<LeafDraft>,
    /// INVARIANT: everything whose memory `leaves` names, and whose identity `known` does.
    pub(crate) held: Vec<Py<PyAny>>,
    dims: Vec<i64>,
    /// For the pickler only.
    known: ByIdentity<u32>,
}

impl Drafts {
    pub(crate) fn shape(&self, dims: Dims) -> &[i64] {
        &self.dims[dims.first..dims.first + dims.ndim]
    }

    /// In elements.
    pub(crate) fn strides(&self, dims: Dims) -> &[i64] {
        &self.dims[dims.first + dims.ndim..dims.first + 2 * dims.ndim]
    }

    /// Which of torch's storages a tensor or storage lies in.
    pub(crate) fn storage(&self, py: Python<'_>, leaf: u32) -> PyResult<usize> {
        let leaf = &self.leaves[leaf as usize];
        let object = self.held[leaf.held].bind(py);
        let storage = match leaf.kind {
            LeafKind::Tensor { .. } => &object.call_method0(intern!(py, "untyped_storage"))?,
            _ => object,
        };
        storage.getattr(intern!(py, "_cdata"))?.extract()
    }

    /// Lets go of everything and keeps the memory.
    fn clear(&mut self) {
        self.leaves.clear();
        self.held.clear();
        self.dims.clear();
        self.known.clear();
    }

    /// The leaf for an object that has one; `None` for any other.
    fn add(&mut self, torch: &Torch, object: &Bound<'_, PyAny>) -> PyResult<Option<u32>> {
        let kind = object.get_type();
        let draft = if kind.is(&torch.tensor) {
            self.tensor(torch, object)?
        } else if kind.is(&torch.ndarray) {
            self.array(torch, object)?
        } else if kind.is(&torch.untyped_storage) {
            storage(object)?
        } else {
            return Ok(None);
        };
        Ok(draft.map(|draft| self.push(object, draft)))
    }

    fn push(&mut self, object: &Bound<'_, PyAny>, draft: LeafDraft) -> u32 {
        let number = self.leaves.len() as u32;
        self.leaves.push(LeafDraft { held: self.held.len(), ..draft });
        self.held.push(object.clone().unbind());
        number
    }

    fn tensor(&mut self, torch: &Torch, tensor: &Bound<'_, PyAny>) -> PyResult<Option<LeafDraft>> {
        let py = tensor.py();
        if torch.is_more(tensor)? {
            return Ok(None);
        }
        let draft = match torch.exchange {
            Some(api) => describe(torch, api, tensor, &mut self.dims)
                .map(|found| self.draft(found.address, found.dtype, found.ndim)),
            None => self.by_attributes(torch, tensor)?,
        };
        let Some(draft) = draft else { return Ok(None) };
        if let LeafKind::Tensor { dtype, dims } = draft.kind
            && (dtype.is_complex() || !self.has_neighbours(dims))
            && torch.is_lazy(tensor, dtype)?
        {
            // The values of such a view are not the bytes it lies over.
            let resolved = tensor.call_method0(intern!(py, "resolve_conj"))?;
            let resolved = resolved.call_method0(intern!(py, "resolve_neg"))?;
            // A mode of torch's has the last word on what a method returns: nothing plain, or the same again.
            if !resolved.get_type().is(&torch.tensor) || torch.is_lazy(&resolved, dtype)? {
                return Ok(None);
            }
            self.held.push(resolved.clone().unbind());
            return self.tensor(torch, &resolved);
        }
        // Without memory behind its elements it is a tensor of some other kind: fake, or under a transform.
        // A misaligned one, over somebody's buffer, travels as its storage.
        let is_plain = draft.address != 0 && draft.address.is_multiple_of(draft.alignment);
        Ok((draft.len == 0 || is_plain).then_some(draft))
    }

    /// Whether any elements lie side by side. Those of the imaginary part of a conjugate view do not, which among
    /// real tensors are the only ones to be lazy; if `as_strided` made them, they arrive as with torch, which does
    /// not look at all.
    fn has_neighbours(&self, dims: Dims) -> bool {
        let mut each = self.shape(dims).iter().zip(self.strides(dims));
        each.any(|(&size, &stride)| stride == 1 && size > 1)
    }

    /// A tensor whose shape and strides are the last of `dims`.
    fn draft(&self, address: usize, dtype: Dtype, ndim: usize) -> LeafDraft {
        let dims = Dims { first: self.dims.len() - 2 * ndim, ndim };
        let itemsize = dtype.itemsize();
        LeafDraft {
            address,
            len: span(self.shape(dims), self.strides(dims), itemsize),
            alignment: itemsize,
            kind: LeafKind::Tensor { dtype, dims },
            held: 0,
        }
    }

    fn by_attributes(&mut self, torch: &Torch, tensor: &Bound<'_, PyAny>) -> PyResult<Option<LeafDraft>> {
        let py = tensor.py();
        let Some(dtype) = torch.dtype_of(tensor)? else { return Ok(None) };
        let is = |name| tensor.getattr(name)?.is_truthy();
        let strided = tensor.getattr(intern!(py, "layout"))?.is(&torch.strided);
        if !strided || !is(intern!(py, "is_cpu"))? || is(intern!(py, "is_nested"))? {
            return Ok(None);
        }
        let address = tensor.call_method0(intern!(py, "data_ptr"))?.extract()?;
        let shape: Vec<i64> = tensor.getattr(intern!(py, "shape"))?.extract()?;
        if shape.len() > MAX_NDIM {
            return Ok(None);
        }
        let strides: Vec<i64> = tensor.call_method0(intern!(py, "stride"))?.extract()?;
        self.dims.extend(shape.iter().chain(&strides));
        Ok(Some(self.draft(address, dtype, shape.len())))
    }

    fn array(&mut self, torch: &Torch, array: &Bound<'_, PyAny>) -> PyResult<Option<LeafDraft>> {
        let py = array.py();
        // None for what numpy itself must pickle: objects, and strings of variable length.
        let described = torch.array_tag.bind(py).call1((array,))?;
        if described.is_none() {
            return Ok(None);
        }
        type Parts<'py> = (Bound<'py, PyAny>, usize, u64, u64, (bool, bool), Vec<u8>, Vec<i64>);
        let (keep, address, len, itemsize, (fortran, read_only), tag, shape): Parts<'_> =
            described.extract()?;
        self.held.push(keep.unbind());
        Ok(Some(LeafDraft {
            address,
            len,
            alignment: 1,
            kind: LeafKind::Array { flags: ArrayFlags { fortran, read_only }, itemsize, tag, shape },
            held: 0,
        }))
    }

    fn bytes(&mut self, object: &Bound<'_, PyAny>, bytes: &[u8]) -> u32 {
        let (address, len) = (bytes.as_ptr() as usize, bytes.len() as u64);
        self.push(object, LeafDraft { address, len, alignment: 1, kind: LeafKind::Bytes, held: 0 })
    }
}

fn storage(object: &Bound<'_, PyAny>) -> PyResult<Option<LeafDraft>> {
    let py = object.py();
    if object.getattr(intern!(py, "device"))?.getattr(intern!(py, "type"))?.ne("cpu")? {
        return Ok(None);
    }
    let len: u64 = object.call_method0(intern!(py, "nbytes"))?.extract()?;
    let address: usize = object.call_method0(intern!(py, "data_ptr"))?.extract()?;
    Ok(Some(LeafDraft { address, len, alignment: 1, kind: LeafKind::Storage, held: 0 }))
}

/// Bytes from the first to behind the last element.
fn span(shape: &[i64], strides: &[i64], itemsize: usize) -> u64 {
    if shape.contains(&0) {
        return 0;
    }
    let last: i64 = shape.iter().zip(strides).map(|(size, stride)| (size - 1) * stride).sum();
    (last as u64 + 1) * itemsize as u64
}

/// What the pickler asks for each object: is it a leaf?
#[pyclass(frozen, module = "ringloader._native")]
#[derive(Default)]
pub(crate) struct Leaves {
    drafts: Mutex<Drafts>,
}

#[pymethods]
impl Leaves {
    /// The number of the leaf that stands for `object`; `None` if it must be pickled.
    fn __call__(&self, object: &Bound<'_, PyAny>) -> PyResult<Option<u32>> {
        let torch = Torch::get(object.py())?;
        // Taken out and put back: what is asked of torch meanwhile may run any code.
        let mut drafts = self.take();
        let number = match drafts.known.get(&(object.as_ptr() as usize)) {
            Some(&number) => Ok(Some(number)),
            None => drafts.add(torch, object).inspect(|&number| {
                if let Some(number) = number {
                    drafts.known.insert(object.as_ptr() as usize, number);
                }
            }),
        };
        *self.drafts.lock().unwrap_or_else(PoisonError::into_inner) = drafts;
        number
    }
}

impl Leaves {
    fn take(&self) -> Drafts {
        std::mem::take(&mut self.drafts.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// A batch, as far as it is known before its place is.
#[derive(Default)]
pub(crate) struct Encoded {
    /// Its skeleton; storages and leaves are added once they have a place.
    pub(crate) meta: MetaWriter,
    pub(crate) drafts: Drafts,
    pub(crate) groups: Groups,
    pub(crate) pickled: bool,
    /// Objects met before, to their memo number; `None` for a tuple whose items are being walked.
    memo: ByIdentity<Option<u32>>,
}

impl Encoded {
    /// Encodes `batch` into an empty one.
    ///
    /// # Errors
    /// What pickling raises for what cannot be pickled.
    pub(crate) fn encode(&mut self, batch: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = batch.py();
        let torch = Torch::get(py)?;
        if (Walk { torch, to: self, depth: 0 }).value(batch)? {
            return Ok(());
        }
        self.clear();
        let leaves = Bound::new(py, Leaves::default())?;
        let pickled = torch.dumps.bind(py).call1((batch, &leaves))?;
        self.meta.skeleton().pickle(pickled.extract::<&[u8]>()?);
        self.drafts = leaves.get().take();
        self.pickled = true;
        Ok(())
    }

    /// Lets go of the batch and keeps the memory, so that a steady stream of similar ones allocates nothing.
    /// Whether it is worth keeping: that of one huge batch would be held for ever.
    pub(crate) fn clear(&mut self) -> bool {
        let bytes = self.meta.encoded_len();
        self.meta.clear();
        self.drafts.clear();
        self.groups.clear();
        self.memo.clear();
        self.pickled = false;
        bytes <= KEPT
    }
}

struct Walk<'a> {
    torch: &'a Torch,
    to: &'a mut Encoded,
    depth: u32,
}

impl Walk<'_> {
    /// Writes one value; `false` if the batch must be pickled.
    fn value(&mut self, object: &Bound<'_, PyAny>) -> PyResult<bool> {
        if object.is_none() {
            self.to.meta.skeleton().none();
        } else if let Ok(value) = object.cast_exact::<PyBool>() {
            self.to.meta.skeleton().bool(value.is_true());
        } else if object.is_exact_instance_of::<PyInt>() {
            let Ok(value) = object.extract() else { return Ok(false) };
            self.to.meta.skeleton().int(value);
        } else if let Ok(value) = object.cast_exact::<PyFloat>() {
            self.to.meta.skeleton().float(value.value());
        } else {
            return self.memoised(object);
        }
        Ok(true)
    }

    /// A value that may be met again as the same object.
    fn memoised(&mut self, object: &Bound<'_, PyAny>) -> PyResult<bool> {
        let key = object.as_ptr() as usize;
        match self.to.memo.get(&key) {
            Some(&Some(number)) => {
                self.to.meta.skeleton().memo(number);
                return Ok(true);
            }
            Some(None) => return Ok(false),
            None => {}
        }
        if let Ok(text) = object.cast_exact::<PyString>() {
            // Lone surrogates are no UTF-8; pickle knows how to write them.
            let Ok(text) = text.to_str() else { return Ok(false) };
            let number = self.to.meta.skeleton().str(text);
            self.to.memo.insert(key, Some(number));
            return Ok(true);
        }
        if let Ok(bytes) = object.cast_exact::<PyBytes>() {
            let bytes = bytes.as_bytes();
            if bytes.len() <= INLINE_BYTES {
                self.to.meta.skeleton().bytes(bytes);
                return Ok(true);
            }
            let leaf = self.to.drafts.bytes(object, bytes);
            self.leaf(key, leaf);
            return Ok(true);
        }
        if let Some(leaf) = self.to.drafts.add(self.torch, object)? {
            self.leaf(key, leaf);
            return Ok(true);
        }
        if self.depth == DEEPEST {
            return Ok(false);
        }
        self.depth += 1;
        let whole = self.container(key, object);
        self.depth -= 1;
        whole
    }

    fn leaf(&mut self, key: usize, leaf: u32) {
        let number = self.to.meta.skeleton().leaf(leaf);
        self.to.memo.insert(key, Some(number));
    }

    fn container(&mut self, key: usize, object: &Bound<'_, PyAny>) -> PyResult<bool> {
        if let Ok(list) = object.cast_exact::<PyList>() {
            let len = list.len();
            let number = self.to.meta.skeleton().list(len as u32);
            self.to.memo.insert(key, Some(number));
            for item in list.iter() {
                if !self.value(&item)? {
                    return Ok(false);
                }
            }
            // Code of the user's that ran meanwhile may have changed it: pickle has its own way with that.
            return Ok(list.len() == len);
        }
        if let Ok(dict) = object.cast_exact::<PyDict>() {
            let len = dict.len();
            let number = self.to.meta.skeleton().dict(len as u32);
            self.to.memo.insert(key, Some(number));
            for (name, item) in dict.iter() {
                // As with a list, but at once: the iterator panics when the number has changed.
                if !self.value(&name)? || !self.value(&item)? || dict.len() != len {
                    return Ok(false);
                }
            }
            return Ok(true);
        }
        let Ok(tuple) = object.cast::<PyTuple>() else { return Ok(false) };
        let number = if tuple.is_exact_instance_of::<PyTuple>() {
            self.to.meta.skeleton().tuple(tuple.len() as u32)
        } else {
            let py = object.py();
            let name = self.torch.named_tuple_name.bind(py).call1((object.get_type(),))?;
            if name.is_none() {
                return Ok(false);
            }
            let (module, qualname): (String, String) = name.extract()?;
            self.to.meta.skeleton().named_tuple(&module, &qualname, tuple.len() as u32)
        };
        // A tuple that contains itself, by way of a list, cannot be made before its items are.
        self.to.memo.insert(key, None);
        for item in tuple.iter() {
            if !self.value(&item)? {
                return Ok(false);
            }
        }
        self.to.memo.insert(key, Some(number));
        Ok(true)
    }
}
