//! Tensors over memory and out of it, by the DLPack structures.
//!
//! INVARIANT D1: what a tensor made here points to is kept by its [`Keeper`], or lies in the same
//! allocation as its header, and is dropped by the deleter alone, once. A header that several share
//! memory with is kept by its own keeper.
//! INVARIANT D2: the deleter runs on any thread, with or without the interpreter, with an exception
//! pending, at exit and in forked children: it calls no Python and does not panic. It takes no lock but
//! that of what is kept for children, where this process has forked since: for a moment, and never in a child.
//! Where torch moves a storage while views of it may live, [`Kept`] has what the deleter would drop.
//! INVARIANT D3: shape, strides and length given to torch were checked against the memory's length:
//! they are those of a [`Leaf`], which only a parsed table has, one-dimensional, or checked here.

use std::alloc::{Layout, alloc, dealloc};
use std::borrow::Cow;
use std::cell::{Cell, RefCell};
use std::ffi::{c_int, c_void};
use std::mem::ManuallyDrop;
use std::os::fd::{BorrowedFd, OwnedFd, RawFd};
use std::ptr::{NonNull, copy_nonoverlapping};
use std::thread::{self, ThreadId};

use pyo3::exceptions::{PyMemoryError, PyRuntimeError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyCapsule, PyType};
use pyo3::{ffi, intern};
use ringloader_core::batch::wire::{MAX_NDIM, check_tensor};
use ringloader_core::batch::{Dtype, Leaf, LeafKind};
use ringloader_core::sync::{Arc, AtomicU32, Ordering};
use ringloader_core::transport::delivery::{Backing, Delivery};
use ringloader_core::transport::port::Chunk;

use super::enter::{exception, without_interpreter};
use super::torch::Torch;

/// Alignment of tensors' bytes: what torch's own allocator keeps.
const ALIGNMENT: usize = 64;
pub(super) const CPU: i32 = 1;

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct DlTensor {
    pub(super) data: *mut c_void,
    pub(super) device_type: i32,
    pub(super) device_id: i32,
    pub(super) ndim: i32,
    pub(super) code: u8,
    pub(super) bits: u8,
    pub(super) lanes: u16,
    pub(super) shape: *mut i64,
    pub(super) strides: *mut i64,
    pub(super) byte_offset: u64,
}

#[repr(C)]
struct Legacy {
    tensor: DlTensor,
    manager: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Legacy)>,
}

#[repr(C)]
struct Versioned {
    version: [u32; 2],
    manager: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Versioned)>,
    flags: u64,
    tensor: DlTensor,
}

/// torch's C functions for exchanging tensors without Python objects in between (recent versions).
#[repr(C)]
struct ExchangeTable {
    version: [u32; 2],
    previous: *const c_void,
    allocate: *const c_void,
    from_object: *const c_void,
    to_object: Option<ToObject>,
    describe: Option<Describe>,
    current_stream: *const c_void,
}

type ToObject = unsafe extern "C" fn(*mut Versioned, *mut *mut c_void) -> c_int;
type Describe = unsafe extern "C" fn(*mut c_void, *mut DlTensor) -> c_int;

/// The two functions of the table that are used.
#[derive(Clone, Copy)]
pub(crate) struct ExchangeApi {
    to_object: ToObject,
    pub(super) describe: Describe,
}

impl ExchangeApi {
    /// The functions of this torch, if it has them in a version known here.
    pub(crate) fn of(tensor: &Bound<'_, PyType>) -> Option<Self> {
        let capsule = tensor.getattr("__dlpack_c_exchange_api__").ok()?.cast_into::<PyCapsule>().ok()?;
        let table = capsule.pointer_checked(Some(c"dlpack_exchange_api")).ok()?.cast::<ExchangeTable>();
        // SAFETY: by the DLPack standard a capsule of this name points to such a table, which lives as
        // long as the process; the fields read here are there in every version with major number 1.
        let table = unsafe { table.as_ref() };
        if table.version[0] != 1 {
            return None;
        }
        Some(Self { to_object: table.to_object?, describe: table.describe? })
    }
}

/// What keeps the bytes of a tensor that does not own them.
enum Keeper {
    /// A batch's slot, or its own segment.
    Batch { _backing: Arc<Backing> },
    /// Bytes of the slot that this worker is filling.
    Chunk { _bytes: Chunk },
    /// Memory in which headers and bytes of several tensors lie, this one's too.
    Shared { _memory: Arc<Memory> },
}

/// The start of each tensor's memory: both forms of a managed tensor, of which one is used. Behind it
/// lie shape and strides, and behind them the bytes of a tensor that owns them.
#[repr(C)]
struct Header {
    legacy: Legacy,
    versioned: Versioned,
    /// `None` where the bytes lie in the header's own allocation.
    keeper: Option<Keeper>,
    /// `None` in shared memory.
    layout: Option<Layout>,
}

/// Where the bytes of a new tensor come from. `pointer` has `len` bytes.
struct Source<'a> {
    pointer: NonNull<u8>,
    len: usize,
    place: Place<'a>,
}

/// Where they stay.
enum Place<'a> {
    /// Where they are.
    There(Keeper),
    /// Copied, with the header.
    Copied,
    /// Copied, with others.
    CopiedTo(&'a RefCell<Copies>),
}

/// An allocation.
struct Memory {
    start: NonNull<u8>,
    layout: Layout,
}

// SAFETY: plain memory. Tensors in it own disjoint parts.
unsafe impl Send for Memory {}
// SAFETY: as above; the fields are only read.
unsafe impl Sync for Memory {}

impl Memory {
    fn new(len: usize) -> Option<Self> {
        let layout = Layout::from_size_align(len.max(1), ALIGNMENT).ok()?;
        // SAFETY: the size is not zero.
        NonNull::new(unsafe { alloc(layout) }).map(|start| Self { start, layout })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: it was allocated with this layout, and nobody has it any more (D1).
        unsafe { dealloc(self.start.as_ptr(), self.layout) };
    }
}

/// The largest memory that several small tensors share: as much as one that is kept can keep.
const SHARED: usize = 32 << 10;

/// Memory for the copied tensors of one batch, which share allocations.
pub(crate) struct Copies {
    memory: Option<Arc<Memory>>,
    used: usize,
    /// What is still expected to be asked for.
    expected: usize,
}

impl Copies {
    /// For about so many bytes in all, headers included.
    pub(crate) fn new(expected: usize) -> RefCell<Self> {
        RefCell::new(Self { memory: None, used: 0, expected })
    }

    /// What a tensor takes, about.
    pub(crate) fn cost(len: u64, ndim: usize) -> usize {
        (size_of::<Header>() + 16 * ndim).next_multiple_of(ALIGNMENT)
            + (len as usize).next_multiple_of(ALIGNMENT)
    }

    fn take(&mut self, len: usize) -> Option<(NonNull<u8>, Arc<Memory>)> {
        let len = len.next_multiple_of(ALIGNMENT);
        let fits = |memory: &&Arc<Memory>| memory.layout.size() - self.used >= len;
        let memory = match self.memory.as_ref().filter(fits) {
            Some(memory) => memory.clone(),
            None => {
                let made = Arc::new(Memory::new(len.max(self.expected.min(SHARED)))?);
                self.used = 0;
                self.memory.insert(made).clone()
            }
        };
        // SAFETY: `used + len` lies within the memory, by the check or by its making.
        let at = unsafe { memory.start.add(self.used) };
        self.used += len;
        self.expected = self.expected.saturating_sub(len);
        Some((at, memory))
    }
}

/// A size or a stride as it is in a batch's table: little endian.
type Dim = [u8; 8];

/// A tensor of a batch, but for the batch.
///
/// INVARIANT: it is a leaf of a parsed table, so shape and strides fit into `nbytes`.
pub(crate) struct Form<'a> {
    dtype: Dtype,
    /// The shape, with the strides behind it.
    dims: Cow<'a, [Dim]>,
    offset: u64,
    nbytes: u64,
}

impl<'a> Form<'a> {
    /// `None` for a leaf that is no tensor.
    pub(crate) fn of(leaf: &Leaf<'a>) -> Option<Self> {
        let LeafKind::Tensor(dtype) = leaf.kind() else { return None };
        let record = leaf.storage_record();
        let offset = record.offset + leaf.byte_offset();
        let dims = Cow::Borrowed(leaf.all_dims().as_bytes());
        Some(Self { dtype, dims, offset, nbytes: record.nbytes - leaf.byte_offset() })
    }

    /// For batches whose tables are the same.
    pub(crate) fn into_owned(self) -> Form<'static> {
        Form { dims: Cow::Owned(self.dims.into_owned()), ..self }
    }

    /// Bytes of memory that such a tensor has.
    pub(crate) fn nbytes(&self) -> u64 {
        self.nbytes
    }

    /// Such a tensor over the bytes of a batch, or over a copy of them.
    ///
    /// # Errors
    /// `RuntimeError` when they do not lie in the batch; what torch raises.
    pub(crate) fn tensor<'py>(
        &self,
        py: Python<'py>,
        delivery: &Delivery,
        copies: Option<&RefCell<Copies>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let source = Span::new(delivery, self.offset, self.nbytes)?.source(copies);
        make_tensor(py, source, self.dtype, &self.dims)
    }
}

/// Part of a delivered batch, checked to lie in it.
pub(crate) struct Span<'a> {
    delivery: &'a Delivery,
    pointer: NonNull<u8>,
    len: u64,
}

impl<'a> Span<'a> {
    /// `len` bytes at `offset`.
    ///
    /// # Errors
    /// `RuntimeError` when they do not lie in the batch.
    pub(crate) fn new(delivery: &'a Delivery, offset: u64, len: u64) -> PyResult<Self> {
        Ok(Self { delivery, pointer: delivery.pointer(offset, len).map_err(exception)?, len })
    }

    fn source<'c>(&self, copies: Option<&'c RefCell<Copies>>) -> Source<'c> {
        let place = match copies {
            None => Place::There(Keeper::Batch { _backing: self.delivery.backing().clone() }),
            Some(copies) if self.len as usize <= SHARED / 2 => Place::CopiedTo(copies),
            Some(_) => Place::Copied,
        };
        Source { pointer: self.pointer, len: self.len as usize, place }
    }

    /// All bytes of the span as a flat uint8 tensor, over them or over a copy.
    ///
    /// # Errors
    /// What torch raises.
    pub(crate) fn flat<'py>(
        &self,
        py: Python<'py>,
        copies: Option<&RefCell<Copies>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        make_tensor(py, self.source(copies), Dtype::U8, &flat_dims(self.len))
    }

    /// A copy of the span as `bytes`.
    ///
    /// # Errors
    /// `MemoryError`.
    pub(crate) fn bytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        PyBytes::new_with(py, self.len as usize, |into| {
            // SAFETY: `pointer` has `len` bytes while `delivery` lives; `into` is new memory of that length.
            unsafe { copy_nonoverlapping(self.pointer.as_ptr(), into.as_mut_ptr(), into.len()) };
            Ok(())
        })
    }
}

/// A contiguous tensor over all bytes of a chunk of the slot that is being filled.
///
/// # Errors
/// `RuntimeError` when it does not fit into them; what torch raises.
pub(crate) fn tensor_over_chunk<'py>(
    py: Python<'py>,
    chunk: Chunk,
    dtype: Dtype,
    shape: &[i64],
) -> PyResult<Bound<'py, PyAny>> {
    let strides = contiguous_strides(shape);
    check_tensor(dtype, shape, &strides, 0, chunk.len)
        .map_err(|what| PyRuntimeError::new_err(format!("{} bytes for a tensor with {what}", chunk.len)))?;
    let dims: Vec<Dim> = shape.iter().chain(&strides).map(|dim| dim.to_le_bytes()).collect();
    let pointer = NonNull::new(chunk.address as *mut u8).expect("an address inside a mapping");
    let len = chunk.len as usize;
    let place = Place::There(Keeper::Chunk { _bytes: chunk });
    make_tensor(py, Source { pointer, len, place }, dtype, &dims)
}

/// In elements, as torch counts them: a dimension without elements counts as one of one.
fn contiguous_strides(shape: &[i64]) -> Vec<i64> {
    let mut strides = vec![1; shape.len()];
    for dim in (1..shape.len()).rev() {
        strides[dim - 1] = strides[dim] * shape[dim].max(1);
    }
    strides
}

/// Shape and stride of so many bytes in a row.
fn flat_dims(len: u64) -> [Dim; 2] {
    [len.to_le_bytes(), 1u64.to_le_bytes()]
}

/// `dims` is the shape, with the strides behind it.
fn make_tensor<'py>(
    py: Python<'py>,
    source: Source<'_>,
    dtype: Dtype,
    dims: &[Dim],
) -> PyResult<Bound<'py, PyAny>> {
    let torch = Torch::get(py)?;
    // A torch without the C functions may not know the newer element types either.
    let by_view = torch.exchange.is_none() && dtype.torch_name().starts_with("float8");
    let header = build(py, source, if by_view { Dtype::U8 } else { dtype }, dims)?;
    let tensor = match torch.exchange {
        Some(api) => import_versioned(py, api, header),
        None => import_capsule(py, torch, header),
    }?;
    if by_view {
        return tensor.call_method1(intern!(py, "view"), (torch.torch_dtype(py, dtype)?,));
    }
    Ok(tensor)
}

/// Copies of at least so many bytes are made without the interpreter.
pub(super) const DETACH: usize = 1 << 20;

/// A new header with everything filled in. To be given to torch, or to [`drop_header`].
fn build(py: Python<'_>, source: Source<'_>, dtype: Dtype, dims: &[Dim]) -> PyResult<NonNull<Header>> {
    let ndim = dims.len() / 2;
    assert!(dims.len().is_multiple_of(2) && ndim <= MAX_NDIM, "D3");
    let dims_at = size_of::<Header>();
    let data_at = (dims_at + size_of_val(dims)).next_multiple_of(ALIGNMENT);
    let len = if matches!(source.place, Place::There(_)) { 0 } else { source.len };
    let no_memory = || PyMemoryError::new_err(format!("no memory for a tensor of {len} bytes"));
    let alone = || {
        let memory = ManuallyDrop::new(Memory::new(data_at + len).ok_or_else(no_memory)?);
        Ok::<_, PyErr>((memory.start, Some(memory.layout)))
    };
    let ((base, layout), keeper) = match source.place {
        Place::There(keeper) => (alone()?, Some(keeper)),
        Place::Copied => (alone()?, None),
        Place::CopiedTo(copies) => {
            let (base, memory) = copies.borrow_mut().take(data_at + len).ok_or_else(no_memory)?;
            ((base, None), Some(Keeper::Shared { _memory: memory }))
        }
    };
    let is_copy = matches!(keeper, None | Some(Keeper::Shared { .. }));
    let header = base.cast::<Header>();
    // SAFETY: header, dims and data lie one behind the other in new memory of ours alone, each aligned:
    // the header's size is a multiple of 8, and `data_at` one of 64. Source bytes lie elsewhere.
    unsafe {
        let shape = base.add(dims_at).cast::<i64>().as_ptr();
        for (at, dim) in dims.iter().enumerate() {
            shape.add(at).write(i64::from_le_bytes(*dim));
        }
        let data = if is_copy {
            let target = base.add(data_at);
            copy(py, source.pointer.as_ptr() as usize, target.as_ptr() as usize, source.len);
            target
        } else {
            source.pointer
        };
        let (code, bits, lanes) = dtype.dlpack();
        let tensor = DlTensor {
            data: data.as_ptr().cast(),
            device_type: CPU,
            device_id: 0,
            ndim: ndim as i32,
            code,
            bits,
            lanes,
            shape,
            strides: shape.add(ndim),
            byte_offset: 0,
        };
        let manager = base.as_ptr().cast();
        header.write(Header {
            legacy: Legacy { tensor, manager, deleter: Some(delete_legacy) },
            versioned: Versioned { version: [1, 0], manager, deleter: Some(delete_later), flags: 0, tensor },
            keeper,
            layout,
        });
    }
    Ok(header)
}

/// Copies `len` bytes, detached from the interpreter if that takes a while.
///
/// # Safety
/// Both ranges are valid, do not overlap, and stay so until the return.
pub(super) unsafe fn copy(py: Python<'_>, from: usize, to: usize, len: usize) {
    // SAFETY: the caller's promise.
    let copy = move || unsafe { copy_nonoverlapping(from as *const u8, to as *mut u8, len) };
    if len < DETACH { copy() } else { without_interpreter(py, copy) }
}

/// How many threads collect what their deleters would drop.
static COLLECTING: AtomicU32 = AtomicU32::new(0);

thread_local! {
    /// On a thread that collects: the last of the headers that deleters were called for, each of which has the one
    /// before in its `manager`. `None` on any other. Without a destructor, so that deleters find it at any time.
    static COLLECTED: Cell<Option<*mut c_void>> = const { Cell::new(None) };
}

/// What keeps memory that torch has taken out of a storage, for as long as views of it may be left.
///
/// torch puts other memory behind a storage that it shares with another process. What was made of the storage before,
/// arrays and DLPack capsules, still reads the old memory. All of it holds the storage, or a tensor over it;
/// `_common/moved_storages.py` keeps this for as long.
#[pyclass(module = "ringloader._native")]
pub(crate) struct Kept {
    /// The last header of a chain.
    last: *mut c_void,
    /// While it collects: the thread, and what was collected there before.
    collects: Option<(ThreadId, Option<*mut c_void>)>,
}

// SAFETY: the headers are its own, and may be dropped on any thread (D2).
unsafe impl Send for Kept {}
// SAFETY: as above; nothing is read of them before they are dropped.
unsafe impl Sync for Kept {}

#[pymethods]
impl Kept {
    /// From now on, what this thread's deleters are called for is collected and not dropped.
    #[new]
    fn new() -> Self {
        COLLECTING.fetch_add(1, Ordering::Relaxed);
        // Not empty where a finaliser has come here in the middle of another's.
        let outer = COLLECTED.replace(Some(std::ptr::null_mut()));
        Self { last: std::ptr::null_mut(), collects: Some((thread::current().id(), outer)) }
    }

    /// Collects no more. Whether there is anything to keep.
    #[pyo3(name = "finish")]
    fn end(&mut self) -> bool {
        self.finish();
        !self.last.is_null()
    }
}

impl Kept {
    fn finish(&mut self) {
        if let Some((thread, outer)) = self.collects
            && thread == thread::current().id()
        {
            self.last = COLLECTED.replace(outer).unwrap_or(std::ptr::null_mut());
            self.collects = None;
            COLLECTING.fetch_sub(1, Ordering::Relaxed);
        }
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.finish();
        let mut next = self.last;
        while !next.is_null() {
            let header = next.cast::<Header>();
            // SAFETY: a header of which nobody but this chain knows, as `drop_or_collect` has left it.
            unsafe {
                next = (*header).versioned.manager;
                drop_header(header);
            }
        }
    }
}

/// The deleters' way to what they drop, on whatever thread.
///
/// # Safety
/// As for [`drop_header`].
unsafe fn drop_or_collect(header: *mut Header) {
    if COLLECTING.load(Ordering::Relaxed) != 0
        && let Some(last) = COLLECTED.get()
    {
        // SAFETY: the header is whole, and from here on the chain's alone; its tensor is gone, so nobody reads
        // `manager` as what it was.
        unsafe { (*header).versioned.manager = last };
        COLLECTED.set(Some(header.cast()));
        return;
    }
    // SAFETY: the caller's promise.
    unsafe { drop_header(header) };
}

/// # Safety
/// `header` was made by [`build`], and this is the only call for it.
unsafe fn drop_header(header: *mut Header) {
    // SAFETY: the caller's promise: the header is whole, and nobody looks at it after. Moved out first,
    // since the keeper of a header in shared memory keeps the header itself.
    let Header { keeper, layout, .. } = unsafe { header.read() };
    drop(keeper);
    if let Some(layout) = layout {
        // SAFETY: the header had this memory for itself.
        unsafe { dealloc(header.cast(), layout) };
    }
}

unsafe extern "C" fn delete_legacy(tensor: *mut Legacy) {
    // SAFETY: torch calls the deleter of a tensor it was given once (D1); `manager` is its header.
    unsafe { drop_or_collect((*tensor).manager.cast()) };
}

unsafe extern "C" fn delete_versioned(tensor: *mut Versioned) {
    // SAFETY: as in `delete_legacy`.
    unsafe { drop_or_collect((*tensor).manager.cast()) };
}

/// The deleter while torch is taking a tensor over. When it fails, it may have called the deleter or not.
unsafe extern "C" fn delete_later(_tensor: *mut Versioned) {}

fn import_versioned(py: Python<'_>, api: ExchangeApi, header: NonNull<Header>) -> PyResult<Bound<'_, PyAny>> {
    let mut object = std::ptr::null_mut();
    // SAFETY: `to_object` is torch's, the interpreter is attached, the managed tensor is whole, and its deleter
    // does nothing yet. On success torch owns it and gives us a new reference, and nobody else has the tensor:
    // torch looks up the deleter when the storage dies, so from here on it is the one that drops the header. On
    // failure an error is set and nothing of torch's is left that knows of the header.
    unsafe {
        let managed = &raw mut (*header.as_ptr()).versioned;
        if (api.to_object)(managed, &raw mut object) != 0 || object.is_null() {
            drop_header(header.as_ptr());
            return Err(PyErr::take(py).unwrap_or_else(|| PyRuntimeError::new_err("torch took no tensor")));
        }
        (*managed).deleter = Some(delete_versioned);
        Ok(Bound::from_owned_ptr(py, object.cast()))
    }
}

fn import_capsule<'py>(
    py: Python<'py>,
    torch: &Torch,
    header: NonNull<Header>,
) -> PyResult<Bound<'py, PyAny>> {
    const NAME: &std::ffi::CStr = c"dltensor";
    // SAFETY: a capsule without destructor over the managed tensor. torch renames the capsule when it
    // takes the tensor over; as long as it has the old name, the tensor is ours.
    unsafe {
        let managed = &raw mut (*header.as_ptr()).legacy;
        let capsule = ffi::PyCapsule_New(managed.cast(), NAME.as_ptr(), None);
        let Some(capsule) = Bound::from_owned_ptr_or_opt(py, capsule) else {
            drop_header(header.as_ptr());
            return Err(PyErr::fetch(py));
        };
        let tensor = torch.from_capsule.bind(py).call1((&capsule,));
        if ffi::PyCapsule_IsValid(capsule.as_ptr(), NAME.as_ptr()) == 1 {
            drop_header(header.as_ptr());
        }
        tensor
    }
}

/// A descriptor of our own for `fd`, one of the caller's.
///
/// # Errors
/// `RuntimeError` for a negative number; `OSError` when it is not open, or too many are.
pub(crate) fn duplicate(fd: RawFd) -> PyResult<OwnedFd> {
    if fd < 0 {
        return Err(PyRuntimeError::new_err(format!("{fd} is no file descriptor")));
    }
    // SAFETY: not -1, and only borrowed for the call, which fails for a number that is no open descriptor.
    Ok(unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned()?)
}
