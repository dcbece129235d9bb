//! The only place where a pointer into the mapping becomes a reference.

use std::ptr::NonNull;

use super::control::Control;
use super::structures::{SegmentHeader, WorkerHeader, WorkerView};
use crate::error::Result;
use crate::os::Segment;
use crate::pool::SlotWords;
use crate::ring::{Descriptor, Ring};
use crate::sync::ready::ReadyBits;
use crate::sync::{AtomicU32, AtomicU64};

impl Control {
    pub(super) fn header(&self) -> &SegmentHeader {
        header(&self.segment).expect("a Control's segment has a header (L1)")
    }

    /// Returns the bits of the workers that have committed something that the parent has not looked at.
    #[must_use]
    pub fn ready(&self) -> ReadyBits<'_> {
        // SAFETY: the words, which are atomics, lie between the header and the first worker's structures (L1, L4), at
        // a multiple of their alignment (L2).
        let words = unsafe { self.slice(self.offsets.ready, ReadyBits::words(self.geometry.workers)) };
        ReadyBits::new(words)
    }

    /// The structures of one worker.
    ///
    /// # Panics
    /// When there is no such worker.
    #[must_use]
    pub fn worker(&self, worker: u32) -> WorkerView<'_> {
        assert!(worker < self.geometry.workers, "worker {worker} of {}", self.geometry.workers);
        let block = &self.offsets.block;
        let at = self.offsets.controls + u64::from(worker) * block.len;
        let slots = self.geometry.slots as usize;
        let ring = self.geometry.ring_capacity as usize;
        // SAFETY: offsets and lengths are those of this geometry's block (L1, L2), disjoint (L4), and
        // each range holds only the type named, for which zero and all that peers store is valid (L3).
        let (header, free, holds, sizes, tasks, results) = unsafe {
            (
                &self.slice::<WorkerHeader>(at, 1)[0],
                self.slice::<AtomicU64>(at + block.free, slots.div_ceil(64)),
                self.slice::<AtomicU32>(at + block.holds, slots),
                self.slice::<AtomicU64>(at + block.sizes, 2 * slots),
                self.slice::<Descriptor>(at + block.tasks, ring),
                self.slice::<Descriptor>(at + block.results, ring),
            )
        };
        WorkerView {
            tasks: Ring::new(&header.tasks, tasks),
            results: Ring::new(&header.results, results),
            slots: SlotWords::new(free, holds, sizes, &header.resident),
            worker_sleeps: &header.worker_sleeps,
            parent_sleeps: &header.parent_sleeps,
            counters: &header.counters,
        }
    }

    /// `len` structures at `offset`.
    ///
    /// # Safety
    /// The range lies in the segment, is aligned for `T`, and only `T`s are ever accessed in it, whose
    /// fields are all atomics, so that other processes may write them at any time.
    unsafe fn slice<T>(&self, offset: u64, len: usize) -> &[T] {
        debug_assert!(offset + (len * size_of::<T>()) as u64 <= self.segment.len());
        debug_assert!(offset.is_multiple_of(align_of::<T>() as u64));
        // SAFETY: the caller's promise; the mapping lives as long as `self` and its base is page-aligned.
        unsafe {
            let first: NonNull<T> = self.segment.base().add(offset as usize).cast();
            std::slice::from_raw_parts(first.as_ptr(), len)
        }
    }
}

pub(super) fn header(segment: &Segment) -> Result<&SegmentHeader> {
    let at = segment.pointer(0, size_of::<SegmentHeader>() as u64)?;
    // SAFETY: the range was checked, the mapping is page-aligned and lives as long as `segment`, and
    // the header consists of atomics, for which every bit pattern is valid.
    Ok(unsafe { at.cast::<SegmentHeader>().as_ref() })
}
