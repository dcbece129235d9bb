//! What lies where in a segment, and the only place where a pointer becomes a reference.
//!
//! ```text
//! [header, ready bits | worker 0: control | worker 1: control | .. ]  dense: a few pages
//! [worker 0: task arena | worker 1: task arena | .. ]                 sparse
//! [worker 0: window of slot 0, 1, .. | worker 1: .. ]                 sparse, nearly all of the address space
//! ```
//!
//! INVARIANT L1: a [`Control`]'s geometry fits its segment: every range it names ends inside the mapping.
//! INVARIANT L2: every structure lies at a multiple of its alignment; the mapping starts at a page. Control blocks,
//! arenas and windows begin and end at multiples of `GRANULE`, so at pages, whatever the size of the machine's.
//! INVARIANT L3: a fresh memfd reads as zero, and zero is a valid value of every structure here:
//! they consist of atomics and padding.
//! INVARIANT L4: the ranges of different structures and of different workers do not overlap.

use std::ops::Range;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::{Mutex, PoisonError};

use rustix::io::Errno;

use crate::error::{Error, Result};
use crate::os::Segment;
use crate::os::segment::page_size;
use crate::pool::{SlotId, SlotWords, is_retired, retire};
use crate::ring::{Descriptor, Ring, RingHeader};
use crate::sync::ready::ReadyBits;
use crate::sync::{AtomicU32, AtomicU64, Ordering, WaitFlag};

const MAGIC: u64 = u64::from_le_bytes(*b"ringload");
/// Raised whenever a structure in the segment changes: both ends must be of one build.
const LAYOUT_VERSION: u64 = 3;
/// The largest page that Linux has on the machines that we know.
pub(crate) const GRANULE: u64 = 64 << 10;
/// What different processes write lies this far apart: two cache lines, which are fetched together.
const LINE: usize = 128;
/// Address space that one segment may take. A process has 128 TiB, which all loaders that live share with all else.
const MAX_SEGMENT: u64 = 4 << 40;
/// What the windows of a segment take together, unless they had to be less than useful for it.
const USUAL: u64 = 1 << 39;
/// The window of an ordinary large batch. What does not fit into its window travels in a segment of its own.
const USEFUL: u64 = 64 << 20;
/// Slots that a worker has in any case, if it has tasks for them: half may be leased, half be on their way.
const FEWEST: u64 = 32;

/// What the loader decides about a segment: all else follows.
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
        let too_many = || Error::Config(format!("{max_tasks} tasks for one worker are too many"));
        // Half of the slots may be leased to the user; the other half holds what is undelivered and
        // the one that is being filled.
        let slots = max_tasks.checked_add(2).and_then(|n| n.checked_mul(2)).ok_or_else(too_many)?;
        let slots = slots.checked_next_multiple_of(64).ok_or_else(too_many)?;
        // Beside the tasks: a resume marker, an end marker, results of an abandoned epoch.
        let ring_capacity = max_tasks.checked_add(8).ok_or_else(too_many)?.next_power_of_two();
        let wanted = largest.max(GRANULE).checked_next_power_of_two().unwrap_or(MAX_SEGMENT);
        let useful = wanted.min(USEFUL);
        let fit = USUAL / (u64::from(workers) * useful);
        let slots = u64::from(slots).min((fit - fit % FEWEST).max(FEWEST)) as u32;
        let windows = u64::from(workers) * u64::from(slots);
        let window =
            prev_power_of_two(USUAL / windows).max(useful).min(prev_power_of_two(MAX_SEGMENT / 2 / windows));
        let window = window.min(wanted);
        let geometry = Self { workers, slots, ring_capacity, arena: 256 << 20, window };
        if window < GRANULE || geometry.total() > MAX_SEGMENT {
            return Err(Error::Config(format!(
                "{workers} workers with {slots} slots each do not fit into {MAX_SEGMENT} bytes of address space"
            )));
        }
        Ok(geometry)
    }

    /// The same with windows of half the size, for a system that refuses so much address space.
    fn halved(self) -> Option<Self> {
        (self.window > (1 << 20)).then_some(Self { window: self.window / 2, ..self })
    }

    fn offsets(&self) -> SegmentOffsets {
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
        let touched = take(slots * size_of::<AtomicU64>());
        let tasks = take(ring);
        let results = take(ring);
        BlockOffsets { free, holds, touched, tasks, results, len: end.next_multiple_of(GRANULE) }
    }

    /// Bytes of the whole segment.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.offsets().windows + u64::from(self.workers) * u64::from(self.slots) * self.window
    }

    fn words(&self) -> [u64; 7] {
        let Self { workers, slots, ring_capacity, arena, window } = *self;
        [MAGIC, LAYOUT_VERSION, workers.into(), slots.into(), ring_capacity.into(), arena, window]
    }

    /// The geometry that stands in a header, believed only where it is one that `new` makes.
    fn from_words(words: [u64; 7], len: u64) -> Result<Self> {
        let [magic, version, workers, slots, ring_capacity, arena, window] = words;
        let corrupt = || Error::Corrupt(format!("no segment of this version of ringloader: {words:x?}"));
        if magic != MAGIC || version != LAYOUT_VERSION {
            return Err(corrupt());
        }
        let narrow = |word: u64| u32::try_from(word).map_err(|_| corrupt());
        let (workers, slots, ring_capacity) = (narrow(workers)?, narrow(slots)?, narrow(ring_capacity)?);
        let plausible = workers <= 1 << 16
            && (1..=1 << 20).contains(&slots)
            && ring_capacity.is_power_of_two()
            && ring_capacity <= 1 << 20
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

/// Where in the segment things begin.
#[derive(Debug)]
struct SegmentOffsets {
    ready: u64,
    controls: u64,
    block: BlockOffsets,
    arenas: u64,
    windows: u64,
}

/// Offsets inside one worker's control block.
#[derive(Debug)]
struct BlockOffsets {
    free: u64,
    holds: u64,
    touched: u64,
    tasks: u64,
    results: u64,
    len: u64,
}

#[repr(C)]
#[derive(Debug)]
struct SegmentHeader {
    geometry: [AtomicU64; 7],
    done: AtomicU32,
    parent_sleeps: WaitFlag,
}

#[repr(C)]
#[derive(Debug)]
struct WorkerHeader {
    tasks: RingHeader,
    results: RingHeader,
    worker_sleeps: WaitFlag,
    parent_sleeps: WaitFlag,
    counters: Counters,
    resident: AtomicU64,
}

/// What a worker did: written by the worker, read by any process, exact only while the worker is idle.
#[repr(C)]
#[derive(Debug, Default)]
pub struct Counters {
    /// Batches committed.
    pub batches: AtomicU64,
    /// Storages that collate had already written into the slot.
    pub in_place: AtomicU64,
    /// Storages copied into the slot.
    pub copied: AtomicU64,
    /// Batches whose tree went through pickle.
    pub pickled: AtomicU64,
    /// Batches in a segment of their own.
    pub oversize: AtomicU64,
}

impl Counters {
    /// The figures, with their names.
    #[must_use]
    pub fn read(&self) -> [(&'static str, u64); 5] {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        [
            ("batches", get(&self.batches)),
            ("in_place", get(&self.in_place)),
            ("copied", get(&self.copied)),
            ("pickled", get(&self.pickled)),
            ("oversize", get(&self.oversize)),
        ]
    }

    fn clear(&self) {
        let Self { batches, in_place, copied, pickled, oversize } = self;
        for counter in [batches, in_place, copied, pickled, oversize] {
            counter.store(0, Ordering::Relaxed);
        }
    }
}

const _: () = assert!(size_of::<Descriptor>() == 64 && align_of::<WorkerHeader>() <= LINE);

/// One worker's structures in the segment, borrowed.
#[derive(Debug, Clone, Copy)]
pub struct WorkerView<'a> {
    /// Tasks: the parent produces, the worker consumes.
    pub tasks: Ring<'a>,
    /// Results: the worker produces, the parent consumes.
    pub results: Ring<'a>,
    /// Which side has which slot.
    pub slots: SlotWords<'a>,
    /// Raised while the worker sleeps for a task or for room.
    pub worker_sleeps: &'a WaitFlag,
    /// Raised while the parent sleeps for a result of this worker alone.
    pub parent_sleeps: &'a WaitFlag,
    /// What the worker did.
    pub counters: &'a Counters,
}

/// A segment with structures in it.
#[derive(Debug)]
pub struct Control {
    segment: Segment,
    geometry: Geometry,
    /// Those of the geometry: asked for several times for each batch.
    offsets: SegmentOffsets,
    /// What was retired, but would not be unmapped.
    stuck: Mutex<Vec<Range<u64>>>,
    refusal: Mutex<Option<Error>>,
}

impl Control {
    /// Makes a segment for `geometry`, with smaller windows where the system refuses so much address
    /// space. The descriptor is for those that attach.
    ///
    /// # Errors
    /// [`Error::Os`] when no segment can be had.
    pub fn create(mut geometry: Geometry) -> Result<(Self, OwnedFd)> {
        let (segment, fd) = loop {
            match Segment::create("ringloader", geometry.total()) {
                Err(Error::Os { errno, .. }) if errno == Errno::NOMEM.raw_os_error() => {
                    geometry = geometry.halved().ok_or_else(|| Error::os("mmap", Errno::NOMEM))?;
                }
                other => break other?,
            }
        };
        let control = Self::over(segment, geometry)?;
        for (word, value) in control.header().geometry.iter().zip(geometry.words()) {
            word.store(value, Ordering::Relaxed);
        }
        Ok((control, fd))
    }

    /// Reads the geometry of a segment that another process made.
    ///
    /// # Errors
    /// [`Error::Corrupt`] when it is none of this version's.
    pub fn attach(segment: Segment) -> Result<Self> {
        let header = header(&segment)?;
        let words = std::array::from_fn(|i| header.geometry[i].load(Ordering::Relaxed));
        let geometry = Geometry::from_words(words, segment.len())?;
        Self::over(segment, geometry)
    }

    fn over(segment: Segment, geometry: Geometry) -> Result<Self> {
        let page = page_size();
        if !GRANULE.is_multiple_of(page) {
            return Err(Error::Config(format!(
                "pages of {page} bytes are not supported, only up to {GRANULE}"
            )));
        }
        let offsets = geometry.offsets();
        Ok(Self { segment, geometry, offsets, stuck: Mutex::default(), refusal: Mutex::default() })
    }

    /// The memory behind it.
    #[must_use]
    pub fn segment(&self) -> &Segment {
        &self.segment
    }

    /// Its geometry.
    #[must_use]
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    fn header(&self) -> &SegmentHeader {
        header(&self.segment).expect("a Control's segment has a header (L1)")
    }

    /// Says to every worker that nothing more is wanted.
    pub fn set_done(&self) {
        // ORDERING done: a flag that orders nothing else; workers that must see it soon are woken by their eventfds.
        self.header().done.store(1, Ordering::Release);
    }

    /// Whether nothing more is wanted.
    #[must_use]
    pub fn is_done(&self) -> bool {
        // ORDERING done: see `set_done`.
        self.header().done.load(Ordering::Acquire) != 0
    }

    /// Takes back that nothing more is wanted, and what was counted. No worker is left to see it.
    pub(crate) fn begin_again(&self) {
        self.header().done.store(0, Ordering::Relaxed);
        for worker in 0..self.geometry.workers {
            self.worker(worker).counters.clear();
        }
    }

    /// Raised while the parent sleeps for a result of any worker.
    #[must_use]
    pub fn parent_sleeps(&self) -> &WaitFlag {
        &self.header().parent_sleeps
    }

    /// Which workers have committed something that the parent has not looked at.
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
        let (header, free, holds, touched, tasks, results) = unsafe {
            (
                &self.slice::<WorkerHeader>(at, 1)[0],
                self.slice::<AtomicU64>(at + block.free, slots.div_ceil(64)),
                self.slice::<AtomicU32>(at + block.holds, slots),
                self.slice::<AtomicU64>(at + block.touched, slots),
                self.slice::<Descriptor>(at + block.tasks, ring),
                self.slice::<Descriptor>(at + block.results, ring),
            )
        };
        WorkerView {
            tasks: Ring::new(&header.tasks, tasks).expect("the capacity is a power of two"),
            results: Ring::new(&header.results, results).expect("the capacity is a power of two"),
            slots: SlotWords::new(free, holds, touched, &header.resident).expect("the lengths agree"),
            worker_sleeps: &header.worker_sleeps,
            parent_sleeps: &header.parent_sleeps,
            counters: &header.counters,
        }
    }

    /// Where a worker's task arena lies in the segment.
    #[must_use]
    pub fn arena(&self, worker: u32) -> Range<u64> {
        let start = self.offsets.arenas + u64::from(worker) * self.geometry.arena;
        start..start + self.geometry.arena
    }

    /// Where the window of a slot lies in the segment.
    #[must_use]
    pub fn window(&self, worker: u32, slot: SlotId) -> Range<u64> {
        let index = u64::from(worker) * u64::from(self.geometry.slots) + u64::from(slot.get());
        let start = self.offsets.windows + index * self.geometry.window;
        start..start + self.geometry.window
    }

    /// Ends the use of a slot for good, if it is not held: gives its pages back and unmaps its window, so
    /// that a batch which the user keeps does not keep the address space of its whole epoch. To be called
    /// for workers that have ended.
    pub(crate) fn release_unheld(&self, worker: u32, slots: impl Iterator<Item = SlotId>) {
        let words = self.worker(worker).slots;
        let mut unused: Option<Range<u64>> = None;
        for slot in slots {
            if !retire(words, slot) {
                continue;
            }
            let window = self.window(worker, slot);
            if words.touched[slot.index()].load(Ordering::Relaxed) > 0 {
                self.give_back(window.clone());
            }
            unused = match unused {
                Some(before) if before.end == window.start => Some(before.start..window.end),
                Some(before) => {
                    self.unmap(before);
                    Some(window)
                }
                None => Some(window),
            };
        }
        if let Some(last) = unused {
            self.unmap(last);
        }
    }

    /// Gives up windows that were just retired.
    fn unmap(&self, windows: Range<u64>) {
        // SAFETY: the exchange in `retire` lets each window come here once, when it is not held; its
        // worker has ended, and a retired slot is never held again.
        let unmapped = unsafe { self.segment.unmap(windows.clone()) };
        if unmapped.is_err() {
            self.stuck.lock().unwrap_or_else(PoisonError::into_inner).push(windows);
        }
        self.note(unmapped);
    }

    /// Gives the pages of a part back for good, of which nothing is used any more.
    pub(crate) fn give_back(&self, part: Range<u64>) {
        self.note(self.segment.punch(part.start, part.end - part.start));
    }

    /// Keeps the first refusal. All else goes on: what was not given back now goes with the mapping.
    fn note(&self, result: Result<()>) {
        if let Err(refused) = result {
            self.refusal.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(refused);
        }
    }

    /// Why memory was not given back that is not needed any more, once.
    #[must_use]
    pub fn take_refusal(&self) -> Option<Error> {
        self.refusal.lock().unwrap_or_else(PoisonError::into_inner).take()
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

impl Drop for Control {
    fn drop(&mut self) {
        if !self.segment.is_in_parts() {
            return;
        }
        let stuck = std::mem::take(self.stuck.get_mut().unwrap_or_else(PoisonError::into_inner));
        let mut mapped: Vec<Range<u64>> = std::iter::once(0..self.offsets.windows).collect();
        for worker in 0..self.geometry.workers {
            let words = self.worker(worker).slots;
            for slot in (0..self.geometry.slots).map(SlotId::new).filter(|&slot| !is_retired(words, slot)) {
                join(&mut mapped, self.window(worker, slot));
            }
        }
        let mut left = Vec::new();
        for range in in_order(mapped, stuck) {
            join(&mut left, range);
        }
        for range in left {
            // SAFETY: no one else has this `Control`, and all that use its memory do so through one; what
            // was unmapped before is left out.
            // From front to back, so that no mapping is split for it, which is what the system could refuse.
            let _ = unsafe { self.segment.unmap(range) };
        }
    }
}

/// Both lists in one, by where the ranges begin.
fn in_order(mut ranges: Vec<Range<u64>>, more: Vec<Range<u64>>) -> Vec<Range<u64>> {
    if !more.is_empty() {
        ranges.extend(more);
        ranges.sort_by_key(|range| range.start);
    }
    ranges
}

/// Adds a range, to the last one where they meet.
fn join(ranges: &mut Vec<Range<u64>>, range: Range<u64>) {
    match ranges.last_mut() {
        Some(last) if last.end == range.start => last.end = range.end,
        _ => ranges.push(range),
    }
}

fn header(segment: &Segment) -> Result<&SegmentHeader> {
    let at = segment.pointer(0, size_of::<SegmentHeader>() as u64)?;
    // SAFETY: the range was checked, the mapping is page-aligned and lives as long as `segment`, and
    // the header consists of atomics, for which every bit pattern is valid.
    Ok(unsafe { at.cast::<SegmentHeader>().as_ref() })
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    fn create(geometry: Geometry) -> (Control, OwnedFd) {
        Control::create(geometry).unwrap()
    }

    fn attach(fd: &OwnedFd) -> Result<Control> {
        Control::attach(Segment::attach(fd.as_fd())?)
    }

    #[test]
    fn two_mappings_see_one_ring() {
        let (ours, fd) = create(Geometry::new(3, 6, 1 << 20).unwrap());
        let theirs = attach(&fd).unwrap();
        assert_eq!(ours.geometry(), theirs.geometry());
        for worker in 0..3 {
            let (ours, theirs) = (ours.worker(worker), theirs.worker(worker));
            let mut producer = crate::ring::Producer::attach(ours.tasks).unwrap();
            let mut consumer = crate::ring::Consumer::attach(theirs.tasks).unwrap();
            let words = [u64::from(worker), 2, 3, 4, 5, 6, 7, 8];
            assert!(producer.push(ours.tasks, &words).unwrap());
            assert_eq!(consumer.pop(theirs.tasks).unwrap(), Some(words));
        }
    }

    #[test]
    fn no_two_ranges_overlap() {
        let geometry = Geometry::new(3, 40, 100_000).unwrap();
        let (control, _fd) = create(geometry);
        let mut ranges = Vec::new();
        for worker in 0..3 {
            let at = control.offsets.controls + u64::from(worker) * control.offsets.block.len;
            ranges.push(at..at + control.offsets.block.len);
            ranges.push(control.arena(worker));
            ranges.extend((0..geometry.slots).map(|slot| control.window(worker, SlotId::new(slot))));
        }
        ranges.push(0..control.offsets.controls);
        ranges.sort_by_key(|range| range.start);
        assert!(ranges.windows(2).all(|pair| pair[0].end <= pair[1].start));
        assert!(ranges.last().unwrap().end <= control.segment().len());
        assert!(
            ranges
                .iter()
                .all(|range| range.start.is_multiple_of(GRANULE) && range.end.is_multiple_of(GRANULE))
        );
    }

    #[test]
    fn what_could_not_be_unmapped_goes_with_the_rest() {
        let (control, fd) = create(Geometry::new(2, 6, 1 << 20).unwrap());
        let inode = rustix::fs::fstat(&fd).unwrap().st_ino.to_string();
        let mapped = || {
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
            maps.lines().filter(|line| line.split_whitespace().nth(4) == Some(&inode)).count()
        };
        let slots = || (3..9).map(SlotId::new);
        control.release_unheld(1, slots());
        assert_eq!((mapped(), control.take_refusal()), (2, None));
        // As if the system had refused it.
        let [first, last] = [20, 22].map(|slot| control.window(1, SlotId::new(slot)));
        assert!((20..23).all(|slot| retire(control.worker(1).slots, SlotId::new(slot))));
        control.note(Err(Error::os("munmap", Errno::NOMEM)));
        control.note(Err(Error::os("munmap", Errno::INVAL)));
        control.stuck.lock().unwrap().push(first.start..last.end);
        assert_eq!(control.take_refusal(), Some(Error::os("munmap", Errno::NOMEM)), "the first one");
        assert_eq!(control.take_refusal(), None, "once");
        drop(control);
        assert_eq!(mapped(), 0);
    }

    #[test]
    fn a_refusal_to_unmap_is_kept() {
        let (control, _fd) = create(Geometry::new(1, 6, 1 << 20).unwrap());
        let window = control.window(0, SlotId::new(5));
        control.unmap(window.start + 1..window.end);
        let stuck = control.stuck.lock().unwrap().clone();
        assert_eq!((stuck.len(), stuck[0].start), (1, window.start + 1));
        assert!(matches!(control.take_refusal(), Some(Error::Os { call: "munmap", .. })));
    }

    #[test]
    fn geometry_grows_with_the_tasks_and_stays_in_the_address_space() {
        for (workers, tasks, largest) in
            [(1, 1, 1), (2, 4, 3 << 30), (64, 256, 1 << 40), (512, 2048, 1 << 30), (4096, 5, 1 << 40)]
        {
            let geometry = Geometry::new(workers, tasks, largest).unwrap();
            assert!(geometry.slots > 0 && geometry.slots.is_multiple_of(32));
            assert!(geometry.ring_capacity > tasks);
            assert!(geometry.window >= GRANULE && geometry.total() <= MAX_SEGMENT, "{geometry:?}");
            assert_eq!(Geometry::from_words(geometry.words(), geometry.total()), Ok(geometry));
            let offsets = geometry.offsets();
            assert!(offsets.ready >= size_of::<SegmentHeader>() as u64);
            assert!(offsets.ready + u64::from(workers.div_ceil(64)) * 8 <= offsets.controls);
        }
        assert!(Geometry::new(0, 1, 1).is_err());
        assert!(Geometry::new(1, u32::MAX, 1).is_err());
        assert!(Geometry::new(1 << 16, 1, 1).is_err());
    }

    /// Slots and windows, for two tasks at a time: with a turn for each worker, and where one may be asked for all.
    #[test]
    fn windows_stay_useful_for_many_workers() {
        let geometry = |workers, tasks, largest: u64| {
            let Geometry { slots, window, .. } = Geometry::new(workers, tasks, largest).unwrap();
            (slots, window)
        };
        let in_turn = |workers, largest| geometry(workers, 5, largest);
        let any = |workers, largest| geometry(workers, 2 * workers + 3, largest);
        const LARGE: u64 = 32 << 30;
        assert_eq!(in_turn(1, LARGE), (64, 8 << 30));
        assert_eq!(any(1, LARGE), (64, 8 << 30));
        assert_eq!(in_turn(2, LARGE), (64, 4 << 30));
        assert_eq!(any(2, LARGE), (64, 4 << 30));
        assert_eq!(in_turn(64, LARGE), (64, 128 << 20));
        assert_eq!(any(64, LARGE), (128, 64 << 20));
        assert_eq!(in_turn(1000, LARGE), (32, 64 << 20));
        assert_eq!(any(1000, LARGE), (32, 64 << 20));
        // Small batches need no large windows, and may have many slots.
        assert_eq!(any(64, 1 << 20), (320, 1 << 20));
        assert_eq!(any(1000, 1 << 20), (512, 1 << 20));
        assert_eq!(any(1000, 1), (4032, GRANULE));
        assert_eq!(in_turn(1000, 38 << 20), (32, 64 << 20));
    }

    #[test]
    fn the_segment_of_a_thousand_workers_can_be_had() {
        let (control, fd) = create(Geometry::new(1000, 2003, 38 << 20).unwrap());
        assert!(control.geometry().window > 38 << 20, "{:?}", control.geometry());
        let theirs = attach(&fd).unwrap();
        let last = SlotId::new(theirs.geometry().slots - 1);
        theirs.segment().copy_in(theirs.window(999, last).end - 1, &[7]).unwrap();
        let mut read = Vec::new();
        control.segment().copy_out(control.window(999, last).end - 1, 1, &mut read).unwrap();
        assert_eq!(read, [7]);
    }

    #[test]
    fn a_foreign_segment_is_refused() {
        let (blank, _fd) = Segment::create("test", 1 << 20).unwrap();
        assert!(matches!(Control::attach(blank), Err(Error::Corrupt(_))));
        let (ours, fd) = create(Geometry::new(1, 1, 1 << 20).unwrap());
        for word in &ours.header().geometry {
            let held = word.swap(u64::MAX / 3, Ordering::Relaxed);
            assert!(attach(&fd).is_err(), "{held} replaced");
            word.store(held, Ordering::Relaxed);
        }
        assert!(attach(&fd).is_ok());
    }
}
