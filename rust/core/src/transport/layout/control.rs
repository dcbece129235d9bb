//! A segment with structures in it, and what it says of itself.
#![forbid(unsafe_code)]

use std::ops::Range;

use super::geometry::{GRANULE, Geometry, SegmentOffsets};
use super::structures::WorkerView;
use super::views::Views;
use crate::error::{Error, Result};
use crate::number::u32_from;
use crate::os::Segment;
use crate::os::page::page_size;
use crate::pool::{Limits, SlotId, retire};
use crate::process::Process;
use crate::sync::ready::ReadyBits;
use crate::sync::{Lock, Ordering, WaitFlag};

/// A segment with structures in it.
#[derive(Debug)]
pub struct Control {
    /// Before the segment, in which they lie: dropped first.
    pub(super) views: Views,
    pub(super) segment: Segment,
    pub(super) geometry: Geometry,
    /// The offsets that follow from the geometry, kept because each batch needs them several times.
    pub(super) offsets: SegmentOffsets,
    refusal: Lock<Option<Error>>,
    /// The process that made the segment: what drivers have registered is that process's alone.
    maker: Option<&'static Process>,
}

impl Control {
    pub(super) fn over(
        segment: Segment,
        geometry: Geometry,
        maker: Option<&'static Process>,
    ) -> Result<Self> {
        let page = page_size();
        if !GRANULE.is_multiple_of(page) {
            return Err(Error::Config(format!(
                "pages of {page} bytes are not supported, only up to {GRANULE}"
            )));
        }
        let offsets = geometry.offsets();
        let views = Views::new(&segment, &geometry, &offsets);
        Ok(Self { views, segment, geometry, offsets, refusal: Lock::default(), maker })
    }

    /// The segment.
    #[must_use]
    pub fn segment(&self) -> &Segment {
        &self.segment
    }

    /// Returns the bits of the workers that have committed something that the parent has not looked at.
    #[must_use]
    pub fn ready(&self) -> ReadyBits<'_> {
        self.views.ready
    }

    /// The structures of one worker.
    ///
    /// # Panics
    /// When there is no such worker.
    #[inline]
    #[must_use]
    pub fn worker(&self, worker: u32) -> &WorkerView<'_> {
        &self.views.workers[worker as usize]
    }

    /// Returns the geometry of the segment.
    #[must_use]
    pub fn geometry(&self) -> &Geometry {
        &self.geometry
    }

    /// Says to every worker that nothing more is wanted.
    pub fn set_done(&self) {
        // ORDERING done: a flag that orders nothing else; workers that must see it soon are woken by their eventfds.
        self.views.header.done.store(1, Ordering::Release);
    }

    /// Returns true if nothing more is wanted.
    #[must_use]
    pub fn is_done(&self) -> bool {
        // ORDERING done: see `set_done`.
        self.views.header.done.load(Ordering::Acquire) != 0
    }

    /// Takes back that nothing more is wanted, and what was counted. No worker is left to see it.
    pub(crate) fn begin_again(&self) {
        self.views.header.done.store(0, Ordering::Relaxed);
        for worker in 0..self.geometry.workers {
            self.worker(worker).counters.clear();
        }
    }

    /// Raised while the parent sleeps for a result of any worker.
    #[must_use]
    pub fn parent_sleeps(&self) -> &WaitFlag {
        &self.views.header.parent_sleeps
    }

    /// Returns the range of a worker's task arena in the segment.
    #[must_use]
    pub fn arena(&self, worker: u32) -> Range<u64> {
        let start = self.offsets.arenas + u64::from(worker) * self.geometry.arena;
        start..start + self.geometry.arena
    }

    /// Returns the range of a slot's window in the segment.
    #[must_use]
    pub fn window(&self, worker: u32, slot: SlotId) -> Range<u64> {
        let index = u64::from(worker) * u64::from(self.geometry.slots) + u64::from(slot.get());
        let start = self.offsets.windows + index * self.geometry.window;
        start..start + self.geometry.window
    }

    /// The slot that the byte at `offset` is of, with its worker, if it is of one.
    #[must_use]
    pub fn slot_at(&self, offset: u64) -> Option<(u32, SlotId)> {
        let index = offset.checked_sub(self.offsets.windows)? / self.geometry.window;
        let worker = u32::try_from(index / u64::from(self.geometry.slots)).ok()?;
        let slot = SlotId::new(u32_from(index % u64::from(self.geometry.slots)));
        (worker < self.geometry.workers).then_some((worker, slot))
    }

    /// The limits of every worker of which each may take `share` bytes.
    pub(crate) fn limits(&self, share: u64) -> Limits {
        Limits { share, window: self.geometry.window, page: page_size() }
    }

    /// Ends the use of slots for good, of those that are not held and of which no driver has the memory: gives their pages
    /// back. Called for workers that have ended.
    pub(crate) fn release_unheld(&self, worker: u32, slots: impl Iterator<Item = SlotId>) {
        let words = self.worker(worker).slots;
        for slot in slots {
            if retire(words, slot) && words.touched()[slot.index()].load(Ordering::Relaxed) > 0 {
                self.give_back(self.window(worker, slot));
            }
        }
    }

    /// Gives the pages of a part back for good, of which nothing is used any more.
    pub(crate) fn give_back(&self, part: Range<u64>) {
        self.record_refusal(self.segment.punch(part.start, part.end - part.start));
    }

    /// Keeps the first refusal. All else continues: what was not given back now goes with the mapping.
    pub(crate) fn record_refusal(&self, result: Result<()>) {
        if let Err(refused) = result {
            self.refusal.lock().get_or_insert(refused);
        }
    }

    /// Why memory was not given back that is not needed any more, once.
    #[must_use]
    pub fn take_refusal(&self) -> Option<Error> {
        self.refusal.lock().take()
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        // Memory that a driver of this process still has must outlive this object.
        let has_driver = |worker| {
            let mut registered = self.worker(worker).slots.registered().iter();
            registered.any(|bytes| bytes.load(Ordering::Relaxed) > 0)
        };
        if self.maker.is_some_and(Process::is_current) && (0..self.geometry.workers).any(has_driver) {
            self.segment.keep_mapped();
        }
    }
}
