//! Deleters that torch calls while it moves a storage: what they would drop is kept. INVARIANT D2 of `tensor.rs`.

use std::cell::Cell;
use std::ffi::c_void;
use std::thread::{self, ThreadId};

use ringloader_core::sync::{AtomicU32, Ordering};

use super::header::{Header, drop_header};

/// The number of threads that collect what their deleters would drop.
static COLLECTING: AtomicU32 = AtomicU32::new(0);

thread_local! {
    /// On a thread that collects: the last of the headers that deleters were called for, each of which has the one
    /// before in its `manager`. `None` on any other. Without a destructor, so that deleters find it at any time.
    static COLLECTED: Cell<Option<*mut c_void>> = const { Cell::new(None) };
}

/// The owner of memory that torch has taken out of a storage, for as long as views of it may be left.
///
/// torch puts other memory behind a storage that it shares with another process. Arrays and DLPack capsules that were
/// made of the storage before still read the old memory. All of them hold the storage, or a tensor over it;
/// `_common/held_memory.py` keeps this for as long.
pub(crate) struct Deferred {
    /// The last header of a chain.
    last: *mut c_void,
    /// While it collects: the thread, and what was collected there before.
    collects: Option<(ThreadId, Option<*mut c_void>)>,
}

// SAFETY: the headers are its own, and may be dropped on any thread (D2).
unsafe impl Send for Deferred {}
// SAFETY: as above; nothing is read of them before they are dropped.
unsafe impl Sync for Deferred {}

impl Deferred {
    /// Begins to collect what this thread's deleters would drop.
    pub(crate) fn begin() -> Self {
        COLLECTING.fetch_add(1, Ordering::Relaxed);
        // Not empty where a finaliser has come here in the middle of another's.
        let outer = COLLECTED.replace(Some(std::ptr::null_mut()));
        Self { last: std::ptr::null_mut(), collects: Some((thread::current().id(), outer)) }
    }

    /// Collects no more.
    pub(crate) fn finish(&mut self) {
        if let Some((thread, outer)) = self.collects
            && thread == thread::current().id()
        {
            self.last = COLLECTED.replace(outer).unwrap_or(std::ptr::null_mut());
            self.collects = None;
            COLLECTING.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// Returns true if nothing was collected.
    pub(crate) fn is_empty(&self) -> bool {
        self.last.is_null()
    }
}

impl Drop for Deferred {
    fn drop(&mut self) {
        self.finish();
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
