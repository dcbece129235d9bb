//! The only place where a pointer into the mapping becomes a reference.

use super::geometry::{Geometry, SegmentOffsets};
use super::structures::{SegmentHeader, WorkerHeader, WorkerView};
use crate::error::Result;
use crate::number::usize_from;
use crate::os::Segment;
use crate::pool::SlotWords;
use crate::ring::{Descriptor, Ring};
use crate::sync::ready::ReadyBits;
use crate::sync::{AtomicU32, AtomicU64};

/// The structures in a segment, made once because each batch needs them several times.
///
/// INVARIANT: only a [`Control`](super::Control) has them, beside their segment, and lends them for as long as itself
/// is borrowed. So no reference outlives the mapping.
#[derive(Debug)]
pub(super) struct Views {
    pub(super) header: &'static SegmentHeader,
    pub(super) ready: ReadyBits<'static>,
    pub(super) workers: Box<[WorkerView<'static>]>,
}

impl Views {
    /// Views of a segment that has this geometry.
    pub(super) fn new(segment: &Segment, geometry: &Geometry, offsets: &SegmentOffsets) -> Self {
        let block = &offsets.block;
        let slots = geometry.slots as usize;
        let ring = geometry.ring_capacity as usize;
        let worker = |worker| {
            let at = offsets.controls + u64::from(worker) * block.len;
            // SAFETY: offsets and lengths are those of this geometry's block (L1, L2), disjoint (L4), and
            // each range holds only the type named, for which zero and all that peers store is valid (L3).
            let (header, free, holds, sizes, tasks, results) = unsafe {
                (
                    &slice::<WorkerHeader>(segment, at, 1)[0],
                    slice::<AtomicU64>(segment, at + block.free, slots.div_ceil(64)),
                    slice::<AtomicU32>(segment, at + block.holds, slots),
                    slice::<AtomicU64>(segment, at + block.sizes, 2 * slots),
                    slice::<Descriptor>(segment, at + block.tasks, ring),
                    slice::<Descriptor>(segment, at + block.results, ring),
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
        };
        // SAFETY: the header is at the start, and the words, which are atomics, lie between it and the first worker's
        // structures (L1, L4), at a multiple of their alignment (L2).
        let (header, ready) = unsafe {
            let ready = slice(segment, offsets.ready, ReadyBits::words(geometry.workers));
            (&slice(segment, 0, 1)[0], ReadyBits::new(ready))
        };
        Self { header, ready, workers: (0..geometry.workers).map(worker).collect() }
    }
}

/// `len` structures at `offset`.
///
/// # Safety
/// The range lies in the segment, is aligned for `T`, and only `T`s are ever accessed in it, whose
/// fields are all atomics, so that other processes may write them at any time. The segment outlives what is returned.
unsafe fn slice<T>(segment: &Segment, offset: u64, len: usize) -> &'static [T] {
    debug_assert!(offset + (len * size_of::<T>()) as u64 <= segment.len());
    debug_assert!(offset.is_multiple_of(align_of::<T>() as u64));
    // SAFETY: the caller's promise; the base is page-aligned.
    unsafe {
        let first = segment.base().add(usize_from(offset)).cast::<T>();
        std::slice::from_raw_parts(first.as_ptr(), len)
    }
}

pub(super) fn header(segment: &Segment) -> Result<&SegmentHeader> {
    let at = segment.pointer(0, size_of::<SegmentHeader>() as u64)?;
    // SAFETY: the range was checked, the mapping is page-aligned and lives as long as `segment`, and
    // the header consists of atomics, for which every bit pattern is valid.
    Ok(unsafe { at.cast::<SegmentHeader>().as_ref() })
}
