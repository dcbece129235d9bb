//! Memory for tensors that own their bytes.

use std::alloc::{Layout, alloc, dealloc};
use std::cell::RefCell;
use std::mem::MaybeUninit;
use std::ptr::NonNull;

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use ringloader_core::number::usize_from;
use ringloader_core::sync::Arc;

/// Alignment of tensors' bytes: what torch's own allocator keeps.
pub(super) const ALIGNMENT: usize = 64;

/// An allocation.
pub(crate) struct Memory {
    pub(super) start: NonNull<u8>,
    pub(super) layout: Layout,
}

// SAFETY: plain memory. Tensors in it own disjoint parts.
unsafe impl Send for Memory {}
// SAFETY: as above; the fields are only read.
unsafe impl Sync for Memory {}

impl Memory {
    pub(crate) fn new(len: usize) -> Option<Self> {
        let layout = Layout::from_size_align(len.max(1), ALIGNMENT).ok()?;
        // SAFETY: the size is not zero.
        let start = NonNull::new(unsafe { alloc(layout) })?;
        spike::note_made(layout.size());
        Some(Self { start, layout })
    }

    /// The address of `len` bytes at `offset`.
    ///
    /// # Errors
    /// `RuntimeError` when they do not lie in it.
    pub(crate) fn pointer(&self, offset: u64, len: u64) -> PyResult<NonNull<u8>> {
        let size = self.layout.size() as u64;
        if offset.checked_add(len).is_none_or(|end| end > size) {
            return Err(PyRuntimeError::new_err(format!("{len} bytes at {offset} of a sample of {size}")));
        }
        // SAFETY: inside the allocation, by the check.
        Ok(unsafe { self.start.add(usize_from(offset)) })
    }

    /// All bytes, while nobody else has the memory.
    pub(crate) fn uninit(&mut self) -> &mut [MaybeUninit<u8>] {
        // SAFETY: the allocation has the layout's size, and is this borrow's alone.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr().cast(), self.layout.size()) }
    }

    /// All bytes.
    ///
    /// # Safety
    /// All of them were written, and nobody writes to them while the slice lives.
    pub(crate) unsafe fn bytes(&self) -> &[u8] {
        // SAFETY: the allocation has the layout's size; the caller's promise.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.layout.size()) }
    }

    /// All bytes, to write to.
    ///
    /// # Safety
    /// All of them were written.
    pub(crate) unsafe fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`; the allocation is this borrow's alone.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.layout.size()) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: it was allocated with this layout, and nothing refers to it any more (D1).
        unsafe { dealloc(self.start.as_ptr(), self.layout) };
        spike::note_gone(self.layout.size());
    }
}

/// Gives memory back to the system after many batches were held: glibc keeps what it has given out from its heap.
mod spike {
    use ringloader_core::os::clock::monotonic;
    use ringloader_core::sync::{AtomicU64, Ordering};

    /// Bytes of an allocation that counts.
    const COUNTS: usize = 64 << 10;
    /// Bytes that are worth the milliseconds.
    const MANY: u64 = 64 << 20;
    /// The memory is given back once at most this fraction (1 / `FEW`) of the most is held.
    const FEW: u64 = 8;
    /// Samples of large batches come and go with each batch: what was just given back would be asked for again, a page
    /// fault for every 4 KB. So the memory of a spike that is no larger than twice the last one is given back once in
    /// this time.
    const PAUSE_NS: u64 = 10_000_000_000;

    static HELD: AtomicU64 = AtomicU64::new(0);
    /// The most that was held since memory was given back.
    static MOST: AtomicU64 = AtomicU64::new(0);
    /// When memory was last given back, and the most that was held before; zeros: never.
    static TRIMMED_NS: AtomicU64 = AtomicU64::new(0);
    static TRIMMED_MOST: AtomicU64 = AtomicU64::new(0);

    #[inline]
    pub(super) fn note_made(len: usize) {
        if len >= COUNTS {
            let held = HELD.fetch_add(len as u64, Ordering::Relaxed) + len as u64;
            MOST.fetch_max(held, Ordering::Relaxed);
        }
    }

    #[inline]
    pub(super) fn note_gone(len: usize) {
        if len < COUNTS {
            return;
        }
        let left = HELD.fetch_sub(len as u64, Ordering::Relaxed) - len as u64;
        let most = MOST.load(Ordering::Relaxed);
        if most >= MANY && left <= most / FEW {
            note_fall(most, left);
        }
    }

    #[cold]
    fn note_fall(most: u64, left: u64) {
        let now = monotonic();
        let (at, before) = (TRIMMED_NS.load(Ordering::Relaxed), TRIMMED_MOST.load(Ordering::Relaxed));
        let is_due = most / 2 > before || now.saturating_sub(at) >= PAUSE_NS;
        // If several threads come to this at once, one of them continues.
        if is_due && MOST.compare_exchange(most, left, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
            TRIMMED_NS.store(now, Ordering::Relaxed);
            TRIMMED_MOST.store(most, Ordering::Relaxed);
            trim();
        }
    }

    #[cfg(target_env = "gnu")]
    fn trim() {
        unsafe extern "C" {
            fn malloc_trim(pad: usize) -> std::ffi::c_int;
        }
        // SAFETY: has no conditions: it looks at memory that was freed, under malloc's own locks.
        unsafe { malloc_trim(0) };
    }

    #[cfg(not(target_env = "gnu"))]
    fn trim() {}
}

/// The largest memory that several small tensors share: as much as one that is kept can keep.
pub(super) const SHARED: usize = 32 << 10;

/// Memory for the copied tensors of one batch, which share allocations.
pub(crate) struct Copies {
    memory: Option<Arc<Memory>>,
    used: usize,
    /// The bytes that are still expected to be asked for.
    expected: usize,
}

impl Copies {
    /// Memory for about `expected` bytes in all, headers included.
    pub(crate) fn new(expected: usize) -> RefCell<Self> {
        RefCell::new(Self { memory: None, used: 0, expected })
    }

    pub(super) fn take(&mut self, len: usize) -> Option<(NonNull<u8>, Arc<Memory>)> {
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
