//! The memory before a tensor's bytes: the structure that torch gets, and the owner of the bytes; and their end.
//!
//! Deleters that torch calls while it moves a storage drop nothing yet: INVARIANT D2 of `tensor.rs`.

use std::alloc::Layout;
use std::cell::Cell;
use std::ffi::c_void;
use std::mem::ManuallyDrop;
use std::ptr::{NonNull, copy_nonoverlapping};
use std::thread::{self, ThreadId};

use pyo3::exceptions::PyMemoryError;
use pyo3::prelude::*;
use ringloader_core::batch::Dtype;
use ringloader_core::batch::wire::MAX_NDIM;
use ringloader_core::number::{u32_from, usize_from};
use ringloader_core::sync::{AtomicU32, Ordering};

use super::abi::{CPU, DlTensor, Legacy, Versioned};
use super::memory::{ALIGNMENT, Memory};
use super::source::{Keeper, Location, Source};
use crate::gil::run_copy;

/// The start of each tensor's memory: both forms of a managed tensor, of which one is used. After it come
/// shape and strides, then the bytes of a tensor that owns them.
#[repr(C)]
pub(super) struct Header {
    pub(super) legacy: Legacy,
    pub(super) versioned: Versioned,
    /// `None` where the bytes lie in the header's own allocation.
    keeper: Option<Keeper>,
    /// `None` in shared memory.
    layout: Option<Layout>,
}

/// A size or a stride as it is in a batch's table: little endian.
pub(super) type Dim = [u8; 8];

/// Returns about how many bytes a tensor takes, with its header.
pub(crate) fn cost(len: u64, ndim: usize) -> usize {
    (size_of::<Header>() + 16 * ndim).next_multiple_of(ALIGNMENT)
        + usize_from(len).next_multiple_of(ALIGNMENT)
}

/// A new header with everything filled in but the deleters. To be given to torch, or to [`drop_header`].
pub(super) fn build(
    py: Python<'_>,
    source: Source<'_>,
    dtype: Dtype,
    dims: &[Dim],
) -> PyResult<NonNull<Header>> {
    let ndim = dims.len() / 2;
    assert!(dims.len().is_multiple_of(2) && ndim <= MAX_NDIM, "D3");
    let dims_at = size_of::<Header>();
    let data_at = (dims_at + size_of_val(dims)).next_multiple_of(ALIGNMENT);
    let len = if matches!(source.location, Location::Original(_)) { 0 } else { source.len };
    let no_memory = || PyMemoryError::new_err(format!("no memory for a tensor of {len} bytes"));
    let alone = || {
        let memory = ManuallyDrop::new(Memory::new(data_at + len).ok_or_else(no_memory)?);
        Ok::<_, PyErr>((memory.start, Some(memory.layout)))
    };
    let ((base, layout), keeper) = match source.location {
        Location::Original(keeper) => (alone()?, Some(keeper)),
        Location::Copied => (alone()?, None),
        Location::CopiedWith(copies) => {
            let (base, memory) = copies.borrow_mut().take(data_at + len).ok_or_else(no_memory)?;
            ((base, None), Some(Keeper::Shared { _memory: memory }))
        }
    };
    let is_copy = matches!(keeper, None | Some(Keeper::Shared { .. }));
    let header = base.cast::<Header>();
    // SAFETY: header, dims and data lie one after the other in new memory of ours alone, each aligned:
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
            ndim: u32_from(ndim as u64).cast_signed(),
            code,
            bits,
            lanes,
            shape,
            strides: shape.add(ndim),
            byte_offset: 0,
        };
        let manager = base.as_ptr().cast();
        header.write(Header {
            legacy: Legacy { tensor, manager, deleter: None },
            versioned: Versioned { version: [1, 0], manager, deleter: None, flags: 0, tensor },
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
unsafe fn copy(py: Python<'_>, from: usize, to: usize, len: usize) {
    // SAFETY: the caller's promise.
    run_copy(py, len, move || unsafe { copy_nonoverlapping(from as *const u8, to as *mut u8, len) });
}

/// # Safety
/// `header` was made by [`build`], and this is the only call for it.
pub(super) unsafe fn drop_header(header: *mut Header) {
    // SAFETY: the caller's promise: the header is whole, and nothing looks at it after. Moved out first,
    // since the keeper of a header in shared memory keeps the header itself.
    let Header { keeper, layout, .. } = unsafe { header.read() };
    drop(keeper);
    if let Some(layout) = layout {
        // The header had this memory for itself.
        let start = NonNull::new(header.cast()).expect("the address of a header");
        drop(Memory { start, layout });
    }
}

/// The number of threads that collect what their deleters would drop.
static COLLECTING: AtomicU32 = AtomicU32::new(0);

thread_local! {
    /// On a thread that collects: the last of the headers that deleters were called for, each of which has the one
    /// before in its `manager`. `None` on any other. Without a destructor, so that deleters find it at any time.
    static COLLECTED: Cell<Option<*mut c_void>> = const { Cell::new(None) };
}

/// The owner of memory that torch has taken out of a storage, for as long as views of it may be left.
///
/// torch gives a storage that it shares with another process other memory. Arrays and DLPack capsules that were made of
/// the storage before still read the old memory. All of them hold the storage, or a tensor over it;
/// `_common/held_memory.py` keeps this for as long.
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
    /// Begins to collect what this thread's deleters would drop.
    #[new]
    fn new() -> Self {
        COLLECTING.fetch_add(1, Ordering::Relaxed);
        // Not empty where a finaliser has come here in the middle of another's.
        let outer = COLLECTED.replace(Some(std::ptr::null_mut()));
        Self { last: std::ptr::null_mut(), collects: Some((thread::current().id(), outer)) }
    }

    /// Collects no more. Returns true if there is anything to keep.
    fn finish(&mut self) -> bool {
        self.end();
        !self.last.is_null()
    }
}

impl Kept {
    fn end(&mut self) {
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
        self.end();
        let mut next = self.last;
        while !next.is_null() {
            let header = next.cast::<Header>();
            // SAFETY: a header of which only this chain knows, as `drop_or_defer` has left it.
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
/// The conditions of [`drop_header`].
pub(super) unsafe fn drop_or_defer(header: *mut Header) {
    if COLLECTING.load(Ordering::Relaxed) != 0
        && let Some(last) = COLLECTED.get()
    {
        // SAFETY: the header is whole, and from here on the chain's alone; its tensor is gone, so nothing reads
        // `manager` as what it was.
        unsafe { (*header).versioned.manager = last };
        COLLECTED.set(Some(header.cast()));
        return;
    }
    // SAFETY: the caller's promise.
    unsafe { drop_header(header) };
}
