//! Sizes and offsets: pure arithmetic.
#![forbid(unsafe_code)]

use super::structures::{SegmentHeader, WorkerHeader};
use crate::error::{Error, Result};
use crate::number::u32_from;
use crate::ring::Descriptor;
use crate::sync::ready::ReadyBits;
use crate::sync::{AtomicU32, AtomicU64};

const MAGIC: u64 = u64::from_le_bytes(*b"ringload");
/// Raised whenever a structure in the segment changes: both ends must be of one build.
const LAYOUT_VERSION: u64 = 4;
/// The largest page that Linux has on the machines that we know.
pub(crate) const GRANULE: u64 = 64 << 10;
/// The distance between words that different processes write: two cache lines, which are fetched together.
const LINE: usize = 128;
/// The most address space that one segment may take. A process has 128 TiB, which all loaders share with the rest
/// of the process.
pub(super) const MAX_SEGMENT: u64 = 4 << 40;
/// The most that the windows of a segment take together, unless they would become smaller than [`USEFUL`] by it.
const USUAL: u64 = 1 << 39;
/// The window of an ordinary large batch. What does not fit into its window travels in a segment of its own.
const USEFUL: u64 = 64 << 20;
/// The sizes to which windows and arenas shrink where address space is short.
const LEAST_WINDOW: u64 = 1 << 20;
const LEAST_ARENA: u64 = 16 << 20;
/// The most descriptors in a ring, and the most slots of a worker.
const MOST_DESCRIPTORS: u32 = 1 << 24;
const MOST_SLOTS: u64 = 1 << 20;
/// Slots that a worker has in any case, if it has tasks for them: half may be leased, half be on their way.
const FEWEST: u64 = 32;

/// The sizes of a segment that the loader decides; all else follows from them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    /// Worker processes.
    pub workers: u32,
    /// Slots of each worker.
    pub slots: u32,
    /// Descriptors in each ring, a power of two.
    pub ring_capacity: u32,
    /// Bytes of each worker's task arena.
    pub arena: u64,
    /// Bytes of one slot's window, a power of two.
    pub window: u64,
}

impl Geometry {
    /// The geometry for `workers` workers of which each may have `max_tasks` batches undelivered and
    /// fill slots up to `largest` bytes.
    ///
    /// There is a slot for each task only while windows of a useful size leave room for them: a worker without a free
    /// slot waits as one without memory does.
    ///
    /// # Errors
    /// [`Error::Config`] when a figure is zero or the windows do not fit into the address space.
    pub fn new(workers: u32, max_tasks: u32, largest: u64) -> Result<Self> {
        if workers == 0 || max_tasks == 0 || largest == 0 {
            return Err(Error::Config(format!(
                "{workers} workers with {max_tasks} tasks of {largest} bytes: none of these may be zero"
            )));
        }
        let too_many =
            || Error::Config(format!("{max_tasks} tasks for a worker are too many; lower prefetch_factor"));
        // Half of the slots may be leased to the user; the other half holds what is undelivered and
        // the one that is being filled.
        let slots = max_tasks.checked_add(2).and_then(|n| n.checked_mul(2)).ok_or_else(too_many)?;
        let slots = slots.checked_next_multiple_of(64).ok_or_else(too_many)?;
        // In addition to the tasks: a resume marker, an end marker, results of an abandoned epoch.
        let ring_capacity = max_tasks.checked_add(8).ok_or_else(too_many)?;
        if ring_capacity > MOST_DESCRIPTORS {
            return Err(too_many());
        }
        let ring_capacity = ring_capacity.next_power_of_two();
        let wanted = largest.max(GRANULE).checked_next_power_of_two().unwrap_or(MAX_SEGMENT);
        let useful = wanted.min(USEFUL);
        let fit = USUAL / (u64::from(workers) * useful);
        let slots = u32_from(u64::from(slots).min((fit - fit % FEWEST).clamp(FEWEST, MOST_SLOTS)));
        let windows = u64::from(workers) * u64::from(slots);
        let window =
            prev_power_of_two(USUAL / windows).max(useful).min(prev_power_of_two(MAX_SEGMENT / 2 / windows));
        let window = window.min(wanted);
        let geometry = Self { workers, slots, ring_capacity, arena: 256 << 20, window };
        if window < GRANULE || geometry.total() > MAX_SEGMENT {
            return Err(Error::Config(format!(
                "{workers} workers with {slots} slots each need too much address space; use fewer workers"
            )));
        }
        Ok(geometry)
    }

    /// Returns the same geometry with windows, or arenas, of half the size, for a system that refuses so much address
    /// space.
    pub(super) fn halved(self) -> Option<Self> {
        if self.window > LEAST_WINDOW.max(self.arena / 16) {
            return Some(Self { window: self.window / 2, ..self });
        }
        if self.arena > LEAST_ARENA {
            return Some(Self { arena: self.arena / 2, ..self });
        }
        (self.window > LEAST_WINDOW).then_some(Self { window: self.window / 2, ..self })
    }

    pub(super) fn offsets(&self) -> SegmentOffsets {
        let block = self.block();
        let ready = size_of::<SegmentHeader>().next_multiple_of(LINE);
        let ready_end = ready + ReadyBits::words(self.workers) * size_of::<AtomicU64>();
        let controls = (ready_end as u64).next_multiple_of(GRANULE);
        let arenas = controls + u64::from(self.workers) * block.len;
        let windows = arenas + u64::from(self.workers) * self.arena;
        SegmentOffsets { ready: ready as u64, controls, block, arenas, windows }
    }

    fn block(&self) -> BlockOffsets {
        let mut end = size_of::<WorkerHeader>() as u64;
        let mut take = |bytes: usize| {
            let start = end.next_multiple_of(LINE as u64);
            end = start + bytes as u64;
            start
        };
        let slots = self.slots as usize;
        let ring = self.ring_capacity as usize * size_of::<Descriptor>();
        let free = take(slots.div_ceil(64) * size_of::<AtomicU64>());
        let holds = take(slots * size_of::<AtomicU32>());
        let sizes = take(2 * slots * size_of::<AtomicU64>());
        let tasks = take(ring);
        let results = take(ring);
        BlockOffsets { free, holds, sizes, tasks, results, len: end.next_multiple_of(GRANULE) }
    }

    /// Bytes of the whole segment.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.offsets().windows + u64::from(self.workers) * u64::from(self.slots) * self.window
    }

    pub(super) fn words(&self) -> [u64; 7] {
        let Self { workers, slots, ring_capacity, arena, window } = *self;
        [MAGIC, LAYOUT_VERSION, workers.into(), slots.into(), ring_capacity.into(), arena, window]
    }

    /// The geometry that stands in a header, believed only where it is one that `new` makes.
    pub(super) fn from_words(words: [u64; 7], len: u64) -> Result<Self> {
        let [magic, version, workers, slots, ring_capacity, arena, window] = words;
        let corrupt = || Error::Corrupt(format!("no segment of this version of ringloader: {words:x?}"));
        if magic != MAGIC || version != LAYOUT_VERSION {
            return Err(corrupt());
        }
        let narrow = |word: u64| u32::try_from(word).map_err(|_| corrupt());
        let (workers, slots, ring_capacity) = (narrow(workers)?, narrow(slots)?, narrow(ring_capacity)?);
        let plausible = workers <= 1 << 16
            && (1..=MOST_SLOTS).contains(&slots.into())
            && ring_capacity.is_power_of_two()
            && ring_capacity <= MOST_DESCRIPTORS
            && arena <= MAX_SEGMENT
            && arena.is_multiple_of(GRANULE)
            && (GRANULE..=MAX_SEGMENT).contains(&window)
            && window.is_power_of_two();
        let geometry = Self { workers, slots, ring_capacity, arena, window };
        let windows = u64::from(workers) * u64::from(slots);
        if !plausible || windows.checked_mul(window).is_none_or(|sum| sum > len) || geometry.total() > len {
            return Err(corrupt());
        }
        Ok(geometry)
    }
}

fn prev_power_of_two(n: u64) -> u64 {
    if n == 0 { 0 } else { 1 << n.ilog2() }
}

/// The offsets in the segment at which its parts begin.
#[derive(Debug)]
pub(super) struct SegmentOffsets {
    pub(super) ready: u64,
    pub(super) controls: u64,
    pub(super) block: BlockOffsets,
    pub(super) arenas: u64,
    pub(super) windows: u64,
}

/// Offsets inside one worker's control block.
#[derive(Debug)]
pub(super) struct BlockOffsets {
    pub(super) free: u64,
    pub(super) holds: u64,
    pub(super) sizes: u64,
    pub(super) tasks: u64,
    pub(super) results: u64,
    pub(super) len: u64,
}

const _: () = assert!(size_of::<Descriptor>() == 64 && align_of::<WorkerHeader>() <= LINE);
