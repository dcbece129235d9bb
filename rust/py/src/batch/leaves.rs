//! The leaves of a batch: tensors, arrays, storages and long `bytes`, and where their bytes are.
//!
//! INVARIANT: no address outlives a moment in which foreign code may run: what pickling calls, finalisers and signal
//! handlers, other threads once the interpreter is let go. Walking over plain tensors and exact containers runs none,
//! and its addresses hold. Whatever else is done after the first address was taken sets [`Drafts::disturbed`], and
//! then [`Drafts::look`] looks at every leaf again before a byte is copied. Free-threaded, other threads always run, and
//! what is copied is held ([`Groups::hold`](super::groups::Groups::hold)).
//!
//! Before the pickler calls any code, the encoder holds the storages that it has met so far. So a batch has what torch
//! would have sent, which moves storages to shared memory at that moment. Nothing holds an array's memory: its bytes
//! are copied without releasing the interpreter lock. Where there is none, other threads must not resize the array
//! (`refcheck=False`) meanwhile, as numpy asks for each use of an array by several threads.

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use ringloader_core::batch::wire::MAX_NDIM;
use ringloader_core::batch::{ArrayFlags, Dtype};

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
    /// The index of the leaf's anchor; [`NONE`] without one.
    anchor: u32,
}

const NONE: u32 = u32::MAX;

/// One of torch's storages, held, and where a leaf begins in it. The leaf's bytes are found by it even if its tensor
/// has another storage since, or the storage has moved to shared memory.
struct Anchor {
    storage: Py<PyAny>,
    offset: u64,
}

/// The leaves of one batch.
#[derive(Default)]
pub(crate) struct Drafts {
    pub(crate) leaves: Vec<LeafDraft>,
    /// INVARIANT: everything whose memory `leaves` names, and whose identity `known` does.
    pub(crate) held: Vec<Py<PyAny>>,
    dims: Vec<i64>,
    anchors: Vec<Anchor>,
    /// The number of leaves that were [secured](Self::secure).
    secured: usize,
    /// True if foreign code may have run since an address was taken.
    pub(super) disturbed: bool,
    /// True if addresses were found to have changed since [`forget_moves`](Self::forget_moves).
    moved: bool,
    /// A leaf that was found to be no plain one any more.
    lost: Option<u32>,
    /// True if the leaves are to come back as they are. As a part of a batch, an array comes back as torch's pickle has
    /// it.
    pub(super) exact: bool,
    /// Numbers of leaves by their objects: for the pickler only.
    pub(super) known: ByIdentity<u32>,
}

/// The change that a second look at all leaves has found.
pub(super) enum Change {
    /// All is where it was.
    None,
    /// All leaves are the same, but some lie elsewhere: the addresses are those of now.
    Moved,
    /// This leaf is not what it was.
    Lost(u32),
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

    /// Forgets moves that were found. Called before the addresses are used: [`look`](Self::look) reports an address
    /// that changes after that.
    pub(crate) fn forget_moves(&mut self) {
        self.moved = false;
    }

    /// Returns the number of torch's storage that a tensor or storage lies in. The storage is held, so that no other
    /// gets its number.
    pub(crate) fn storage(&mut self, py: Python<'_>, leaf: u32) -> PyResult<Option<usize>> {
        self.anchor(Torch::get(py)?, py, leaf)?;
        let anchor = self.anchors.get(self.leaves[leaf as usize].anchor as usize);
        anchor.map(|anchor| Torch::number_of(anchor.storage.bind(py))).transpose()
    }

    /// Holds the storage that a tensor lies in at this moment.
    ///
    /// # Errors
    /// The error that torch raises when it is asked for a storage.
    pub(crate) fn anchor(&mut self, torch: &Torch, py: Python<'_>, leaf: u32) -> PyResult<()> {
        let LeafDraft { anchor, held, len, ref kind, .. } = self.leaves[leaf as usize];
        if anchor != NONE || !kind.aliases() || len == 0 {
            return Ok(());
        }
        self.disturbed = true;
        let object = self.held[held as usize].clone_ref(py).into_bound(py);
        let storage = match kind {
            LeafKind::Tensor { .. } => object.call_method0(strings::untyped_storage(py))?,
            _ => object,
        };
        if !storage.get_type().is(&torch.untyped_storage) {
            return Ok(());
        }
        // Asking for the storage may have run any code, so the storage is that of the tensor as it is now.
        if !self.look_again(torch, py, leaf)? {
            return Ok(());
        }
        let (start, len) = torch.memory_of(&storage)?;
        let draft = &mut self.leaves[leaf as usize];
        if let Some(offset) = draft.address.checked_sub(start)
            && draft.len <= len
            && offset as u64 <= len - draft.len
        {
            draft.anchor = self.anchors.len() as u32;
            self.anchors.push(Anchor { storage: storage.unbind(), offset: offset as u64 });
        }
        Ok(())
    }

    /// Checks that a tensor which is copied out of its storage lies within it. To make the storage's object may run the
    /// collector.
    ///
    /// # Errors
    /// `RuntimeError` if it does not: the storage was resized.
    pub(super) fn check_bounds(&self, torch: &Torch, py: Python<'_>, leaf: u32) -> PyResult<()> {
        let LeafDraft { address, len, held, anchor, ref kind, .. } = self.leaves[leaf as usize];
        if anchor != NONE || len == 0 || !matches!(kind, LeafKind::Tensor { .. }) {
            return Ok(());
        }
        let Some(storage) = torch.storage_of(self.held[held as usize].bind(py)) else { return Ok(()) };
        torch.offset_in(&storage, address, len).map(drop)
    }

    /// Holds the storages of all leaves so far, before the pickler calls anybody's code: as with torch, which moves a
    /// storage to shared memory when it comes to it, the batch has what was there before.
    pub(super) fn secure(&mut self, torch: &Torch, py: Python<'_>) -> PyResult<()> {
        while self.secured < self.leaves.len() {
            self.anchor(torch, py, self.secured as u32)?;
            self.secured += 1;
        }
        Ok(())
    }

    /// Describes a tensor without an anchor again: the leaf is what it is now. `false` if it is no plain one any more.
    fn look_again(&mut self, torch: &Torch, py: Python<'_>, leaf: u32) -> PyResult<bool> {
        let LeafDraft { address, len, held, ref kind, .. } = self.leaves[leaf as usize];
        let &LeafKind::Tensor { dtype, dims } = kind else { return Ok(true) };
        let object = self.held[held as usize].clone_ref(py).into_bound(py);
        let before = self.dims.len();
        let Some(found) = self.described(torch, &object)?.filter(LeafDraft::is_plain) else {
            self.lost = Some(leaf);
            return Ok(false);
        };
        let LeafKind::Tensor { dtype: now, dims: there } = found.kind else { return Ok(false) };
        let is_same = (found.address, found.len, now) == (address, len, dtype)
            && (self.shape(there), self.strides(there)) == (self.shape(dims), self.strides(dims));
        if is_same {
            self.dims.truncate(before);
        } else {
            self.leaves[leaf as usize] = LeafDraft { held, ..found };
            self.moved = true;
        }
        Ok(true)
    }

    /// Looks at every leaf again, without foreign code from the first to the return: but where this torch has no C
    /// functions, what makes the storages held runs before.
    ///
    /// # Errors
    /// The error that torch raises when it is asked for a storage.
    pub(super) fn look(&mut self, torch: &Torch, py: Python<'_>) -> PyResult<Change> {
        if torch.exchange.is_none() {
            self.secured = 0;
            self.secure(torch, py)?;
        }
        self.disturbed = false;
        for number in 0..self.leaves.len() as u32 {
            let LeafDraft { address, len, held, anchor, ref kind, .. } = self.leaves[number as usize];
            match kind {
                LeafKind::Bytes => {}
                // The leaf was without bytes when the batch was read, and stays so.
                _ if len == 0 => {}
                LeafKind::Array { .. } => {
                    if memory_of_array(self.held[held as usize].bind(py))? != Some((address, len)) {
                        self.lost = Some(number);
                    }
                }
                _ if anchor == NONE => {
                    self.look_again(torch, py, number)?;
                }
                _ => {
                    let Anchor { storage, offset } = &self.anchors[anchor as usize];
                    let (start, whole) = torch.memory_of(storage.bind(py))?;
                    if offset + len > whole {
                        self.lost = Some(number);
                        continue;
                    }
                    let now = start + *offset as usize;
                    self.leaves[number as usize].address = now;
                    self.moved |= now != address;
                }
            }
        }
        Ok(match self.lost {
            Some(leaf) => Change::Lost(leaf),
            None if self.moved => Change::Moved,
            None => Change::None,
        })
    }

    /// Lets go of everything and keeps the memory.
    pub(super) fn clear(&mut self) {
        self.leaves.clear();
        self.held.clear();
        self.dims.clear();
        self.anchors.clear();
        self.secured = 0;
        self.disturbed = false;
        self.moved = false;
        self.lost = None;
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
        let number = self.leaves.len() as u32;
        let held = if draft.held == NONE { self.held.len() as u32 } else { draft.held };
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
            let held = self.held.len() as u32;
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
        let held = self.held.len() as u32;
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
        Self { address, len, alignment: 1, kind, held: NONE, anchor: NONE }
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
pub(super) fn changed(leaf: &LeafDraft) -> PyErr {
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
