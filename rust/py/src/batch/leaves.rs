//! The leaves of a batch: tensors, arrays, storages and long `bytes`, and where their bytes are.
//!
//! INVARIANT: no address outlives a moment in which foreign code may run: what pickling calls, finalisers and signal
//! handlers, other threads once the interpreter is let go. Walking over plain tensors and exact containers runs none,
//! and its addresses hold. Whatever else is done after the first address was taken sets [`Drafts::disturbed`], and
//! then [`Drafts::look`] looks at every leaf again before a byte is copied. Free-threaded, other threads always run, and
//! what is copied is held ([`Groups::hold`](super::groups::Groups::hold)).
//!
//! A batch has what its leaves have once nothing of it is pickled any more. Nothing holds an array's memory: its bytes
//! are copied without releasing the interpreter lock. Where there is none, other threads must not resize the array
//! (`refcheck=False`) meanwhile, as numpy asks for each use of an array by several threads.

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use ringloader_core::batch::wire::MAX_NDIM;
use ringloader_core::batch::{ArrayFlags, Dtype};
use ringloader_core::number::u32_from;

use crate::identity::ByIdentity;
use crate::strings;
use crate::torch::elements::describe;
use crate::torch::elements::memory_of_array;
use crate::torch::names::Torch;

/// The description of a leaf without the address of its bytes.
pub(crate) enum LeafKind {
    Tensor { dtype: Dtype, dims: Dims },
    Array { flags: ArrayFlags, itemsize: u64, tag: Vec<u8>, shape: Vec<i64> },
    Storage,
    Bytes,
}

impl LeafKind {
    /// Returns true if the leaf shares memory with the other leaves that overlap it, as torch keeps it for tensors.
    pub(crate) fn aliases(&self) -> bool {
        matches!(self, Self::Tensor { .. } | Self::Storage)
    }
}

/// The range of a tensor's shape and strides in [`Drafts`]: first the shape, then the strides.
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
    /// The owner of the memory: an index into the objects that are held.
    held: u32,
}

const NONE: u32 = u32::MAX;

/// The leaves of one batch.
#[derive(Default)]
pub(crate) struct Drafts {
    pub(crate) leaves: Vec<LeafDraft>,
    /// INVARIANT: everything whose memory `leaves` names, and whose identity `known` does.
    pub(crate) held: Vec<Py<PyAny>>,
    dims: Vec<i64>,
    /// True if foreign code may have run since an address was taken.
    pub(super) disturbed: bool,
    /// True if the leaves are to come back as they are. As a part of a batch, an array comes back as torch's pickle has
    /// it.
    pub(super) exact: bool,
    /// Numbers of leaves by their objects: for the pickler only.
    pub(super) known: ByIdentity<u32>,
}

impl Drafts {
    /// Leaves that come back as they are, if `exact`.
    pub(super) fn new(exact: bool) -> Self {
        Self { exact, ..Self::default() }
    }

    pub(crate) fn shape(&self, dims: Dims) -> &[i64] {
        &self.dims[dims.first..dims.first + dims.ndim]
    }

    /// In elements.
    pub(crate) fn strides(&self, dims: Dims) -> &[i64] {
        &self.dims[dims.first + dims.ndim..dims.first + 2 * dims.ndim]
    }

    /// Notes that foreign code may have run.
    pub(crate) fn disturb(&mut self) {
        self.disturbed |= !self.leaves.is_empty();
    }

    /// Returns the number of torch's storage that a tensor or storage lies in. The storage is held, so that no other
    /// gets its number.
    pub(crate) fn storage(&mut self, py: Python<'_>, leaf: u32) -> PyResult<Option<usize>> {
        let storage = self.hold_storage(Torch::get(py)?, py, leaf)?;
        storage.as_ref().map(Torch::number_of).transpose()
    }

    /// Holds the storage that a leaf lies in at this moment, and returns it; `None` for a leaf without one.
    ///
    /// # Errors
    /// The error that torch raises when it is asked for a storage.
    pub(crate) fn hold_storage<'py>(
        &mut self,
        torch: &Torch,
        py: Python<'py>,
        leaf: u32,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let LeafDraft { held, len, ref kind, .. } = self.leaves[leaf as usize];
        if !kind.aliases() || len == 0 {
            return Ok(None);
        }
        self.disturbed = true;
        let object = self.held[held as usize].clone_ref(py).into_bound(py);
        let storage = match kind {
            LeafKind::Tensor { .. } => object.call_method0(strings::untyped_storage(py))?,
            _ => object,
        };
        if !storage.get_type().is(&torch.untyped_storage) {
            return Ok(None);
        }
        self.held.push(storage.clone().unbind());
        Ok(Some(storage))
    }

    /// Checks that a tensor which is copied out of its storage lies within it. To make the storage's object may run the
    /// collector.
    ///
    /// # Errors
    /// `RuntimeError` if it does not: the storage was resized.
    pub(super) fn check_bounds(&self, torch: &Torch, py: Python<'_>, leaf: u32) -> PyResult<()> {
        let LeafDraft { address, len, held, ref kind, .. } = self.leaves[leaf as usize];
        if len == 0 || !matches!(kind, LeafKind::Tensor { .. }) {
            return Ok(());
        }
        let Some(storage) = torch.storage_of(self.held[held as usize].bind(py)) else { return Ok(()) };
        torch.offset_in(&storage, address, len).map(drop)
    }

    /// Looks at every leaf again, without foreign code from the first to the return. Returns true if all are where they
    /// were. Else the addresses are those of now.
    ///
    /// # Errors
    /// `RuntimeError` for a leaf that is not what it was.
    pub(super) fn look(&mut self, torch: &Torch, py: Python<'_>) -> PyResult<bool> {
        self.disturbed = false;
        let mut is_same = true;
        for number in 0..self.leaves.len() {
            let LeafDraft { address, len, held, ref kind, .. } = self.leaves[number];
            if len == 0 || matches!(kind, LeafKind::Bytes) {
                // The leaf was without bytes when the batch was read, and stays so.
                continue;
            }
            let object = self.held[held as usize].clone_ref(py).into_bound(py);
            let now = match kind {
                LeafKind::Array { .. } => memory_of_array(&object)?,
                &LeafKind::Tensor { dtype, dims } => self.look_again(torch, &object, dtype, dims)?,
                _ => Some(torch.memory_of(&object)?),
            };
            let Some((now, _)) = now.filter(|now| now.1 == len) else {
                return Err(changed(&self.leaves[number]));
            };
            self.leaves[number].address = now;
            is_same &= now == address;
        }
        Ok(is_same)
    }

    /// Returns address and bytes of a tensor that is a leaf; `None` if it is no plain one any more, or of another form.
    fn look_again(
        &mut self,
        torch: &Torch,
        tensor: &Bound<'_, PyAny>,
        dtype: Dtype,
        dims: Dims,
    ) -> PyResult<Option<(usize, u64)>> {
        let before = self.dims.len();
        let found = self.described(torch, tensor)?.filter(LeafDraft::is_plain);
        let found = found.filter(|found| match found.kind {
            LeafKind::Tensor { dtype: now, dims: there } => {
                let is_like =
                    (self.shape(there), self.strides(there)) == (self.shape(dims), self.strides(dims));
                is_like && now == dtype
            }
            _ => false,
        });
        self.dims.truncate(before);
        Ok(found.map(|found| (found.address, found.len)))
    }

    /// Lets go of everything and keeps the memory.
    pub(super) fn clear(&mut self) {
        self.leaves.clear();
        self.held.clear();
        self.dims.clear();
        self.disturbed = false;
        self.known.clear();
    }

    /// The leaf for an object that has one; `None` for any other.
    pub(super) fn add(&mut self, torch: &Torch, object: &Bound<'_, PyAny>) -> PyResult<Option<u32>> {
        let kind = object.get_type();
        let draft = if kind.is(&torch.tensor) {
            self.tensor(torch, object)?
        } else if kind.is(&torch.ndarray) {
            self.array(torch, object)?
        } else if kind.is(&torch.untyped_storage) {
            self.disturbed = true;
            storage(torch, object)?
        } else {
            return Ok(None);
        };
        Ok(draft.map(|draft| self.push(object, draft)))
    }

    #[inline(always)]
    fn push(&mut self, object: &Bound<'_, PyAny>, draft: LeafDraft) -> u32 {
        let number = u32_from(self.leaves.len() as u64);
        let held = if draft.held == NONE { u32_from(self.held.len() as u64) } else { draft.held };
        self.leaves.push(LeafDraft { held, ..draft });
        self.held.push(object.clone().unbind());
        number
    }

    #[inline]
    fn tensor(&mut self, torch: &Torch, tensor: &Bound<'_, PyAny>) -> PyResult<Option<LeafDraft>> {
        let py = tensor.py();
        if torch.is_more(tensor)? {
            return Ok(None);
        }
        let Some(draft) = self.described(torch, tensor)? else { return Ok(None) };
        if let LeafKind::Tensor { dtype, dims } = draft.kind
            && (dtype.is_complex() || !self.has_neighbours(dims))
            && self.is_lazy(torch, tensor, dtype)?
        {
            // The values of such a view are not the bytes it lies over.
            self.disturbed = true;
            let resolved = tensor.call_method0(strings::resolve_conj(py))?;
            let resolved = resolved.call_method0(strings::resolve_neg(py))?;
            // A mode of torch's may change what a method returns: to no plain tensor, or to the same one.
            if !resolved.get_type().is(&torch.tensor) || torch.is_lazy(&resolved, dtype)? {
                return Ok(None);
            }
            let held = u32_from(self.held.len() as u64);
            self.held.push(resolved.clone().unbind());
            return Ok(self.tensor(torch, &resolved)?.map(|draft| LeafDraft { held, ..draft }));
        }
        if draft.is_plain() { Ok(Some(draft)) } else { Ok(None) }
    }

    fn is_lazy(&mut self, torch: &Torch, tensor: &Bound<'_, PyAny>, dtype: Dtype) -> PyResult<bool> {
        self.disturbed |= Torch::may_be_lazy(dtype);
        torch.is_lazy(tensor, dtype)
    }

    #[inline(always)]
    fn described(&mut self, torch: &Torch, tensor: &Bound<'_, PyAny>) -> PyResult<Option<LeafDraft>> {
        let Some(api) = torch.exchange else { return self.by_attributes(torch, tensor) };
        let found = describe(torch, api, tensor, &mut self.dims);
        Ok(found.map(|found| self.draft(found.address, found.dtype, found.ndim)))
    }

    /// Returns true if any elements lie side by side. In the imaginary part of a conjugate view they do not, and among
    /// real tensors only such views are lazy. If `as_strided` made a tensor with such strides, it arrives as with
    /// torch, which does not look at all.
    fn has_neighbours(&self, dims: Dims) -> bool {
        let mut each = self.shape(dims).iter().zip(self.strides(dims));
        each.any(|(&size, &stride)| stride == 1 && size > 1)
    }

    /// A tensor whose shape and strides are the last of `dims`.
    fn draft(&self, address: usize, dtype: Dtype, ndim: usize) -> LeafDraft {
        let dims = Dims { first: self.dims.len() - 2 * ndim, ndim };
        let alignment = dtype.itemsize();
        let len = span(self.shape(dims), self.strides(dims), alignment);
        LeafDraft { alignment, ..LeafDraft::new(address, len, LeafKind::Tensor { dtype, dims }) }
    }

    fn by_attributes(&mut self, torch: &Torch, tensor: &Bound<'_, PyAny>) -> PyResult<Option<LeafDraft>> {
        let py = tensor.py();
        let Some(dtype) = torch.dtype_of(tensor)? else { return Ok(None) };
        let is = |name| tensor.getattr(name)?.is_truthy();
        let strided = tensor.getattr(strings::layout(py))?.is(&torch.strided);
        if !strided || !is(strings::is_cpu(py))? || is(strings::is_nested(py))? {
            return Ok(None);
        }
        let shape: Vec<i64> = tensor.getattr(strings::shape(py))?.extract()?;
        if shape.len() > MAX_NDIM {
            return Ok(None);
        }
        let strides: Vec<i64> = tensor.call_method0(strings::stride(py))?.extract()?;
        // Last: what goes before makes objects, which may bring finalisers about.
        let address = tensor.call_method0(strings::data_ptr(py))?.extract()?;
        self.disturbed |= torch.collects_anywhere;
        self.dims.extend(shape.iter().chain(&strides));
        Ok(Some(self.draft(address, dtype, shape.len())))
    }

    fn array(&mut self, torch: &Torch, array: &Bound<'_, PyAny>) -> PyResult<Option<LeafDraft>> {
        let py = array.py();
        // None for what numpy itself must pickle: objects, and strings of variable length.
        self.disturbed = true;
        let tag = if self.exact { &torch.exact_array_tag } else { &torch.array_tag };
        let described = tag.bind(py).call1((array,))?;
        if described.is_none() {
            return Ok(None);
        }
        type Parts<'py> = (Bound<'py, PyAny>, usize, u64, u64, (bool, bool), Vec<u8>, Vec<i64>);
        let (keep, address, len, itemsize, (fortran, read_only), tag, shape): Parts<'_> =
            described.extract()?;
        let held = u32_from(self.held.len() as u64);
        self.held.push(keep.unbind());
        let kind = LeafKind::Array { flags: ArrayFlags { fortran, read_only }, itemsize, tag, shape };
        Ok(Some(LeafDraft { held, ..LeafDraft::new(address, len, kind) }))
    }

    pub(super) fn bytes(&mut self, object: &Bound<'_, PyAny>, bytes: &[u8]) -> u32 {
        self.push(object, LeafDraft::new(bytes.as_ptr() as usize, bytes.len() as u64, LeafKind::Bytes))
    }
}

impl LeafDraft {
    /// A leaf at any address, for which nothing is held yet.
    fn new(address: usize, len: u64, kind: LeafKind) -> Self {
        Self { address, len, alignment: 1, kind, held: NONE }
    }

    /// Returns false for a tensor whose elements have no memory, because it is fake or under a transform, and for a
    /// misaligned one over a buffer of another library, which travels as its storage.
    fn is_plain(&self) -> bool {
        self.len == 0 || (self.address != 0 && self.address.is_multiple_of(self.alignment))
    }
}

fn storage(torch: &Torch, object: &Bound<'_, PyAny>) -> PyResult<Option<LeafDraft>> {
    let py = object.py();
    if object.getattr(strings::device(py))?.getattr(strings::type_(py))?.ne("cpu")? {
        return Ok(None);
    }
    let (address, len) = torch.memory_of(object)?;
    Ok(Some(LeafDraft::new(address, len, LeafKind::Storage)))
}

/// Makes the error for a leaf whose bytes are gone.
fn changed(leaf: &LeafDraft) -> PyErr {
    let what = match leaf.kind {
        LeafKind::Tensor { .. } => "a tensor",
        LeafKind::Array { .. } => "an array",
        LeafKind::Storage => "a storage",
        LeafKind::Bytes => "bytes",
    };
    PyRuntimeError::new_err(format!(
        "{what} of {} bytes was resized, or got other memory, while the batch that it is in was pickled; let no \
         __reduce__, __getstate__ or thread do that, or put a copy into the batch",
        leaf.len
    ))
}

/// Returns the number of bytes from the start of the first element to the end of the last.
fn span(shape: &[i64], strides: &[i64], itemsize: usize) -> u64 {
    if shape.contains(&0) {
        return 0;
    }
    let last: i64 = shape.iter().zip(strides).map(|(size, stride)| (size - 1) * stride).sum();
    (last as u64 + 1) * itemsize as u64
}
