//! The end of windows: slots that are not held are unmapped, at once or at the end.

use std::ops::Range;

use super::control::Control;
use crate::error::{Error, Result};
use crate::pool::{SlotId, SlotWords, retire};
use crate::process::Process;
use crate::sync::Ordering;

impl Control {
    /// Ends the use of a slot for good, if it is not held and no driver has its memory: gives its pages back and
    /// unmaps its window, so that a batch which the user keeps does not keep the address space of its whole epoch.
    /// Called for workers that have ended.
    pub(crate) fn release_unheld(&self, worker: u32, slots: impl Iterator<Item = SlotId>) {
        let words = self.worker(worker).slots;
        let mut unused: Option<Range<u64>> = None;
        for slot in slots {
            if !retire(words, slot) || !self.gone.insert(worker, slot) {
                continue;
            }
            let window = self.window(worker, slot);
            if words.touched()[slot.index()].load(Ordering::Relaxed) > 0 {
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
    pub(super) fn unmap(&self, windows: Range<u64>) {
        // SAFETY: the exchange in `retire` lets a window come here when it is not held, and `gone` lets it come once,
        // whatever became of the shared words; its worker has ended, and a retired slot is never held again.
        let unmapped = unsafe { self.segment.unmap(windows.clone()) };
        if unmapped.is_err() {
            self.stuck.lock().push(windows);
        }
        self.record_refusal(unmapped);
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
        // Memory that this process's driver still has must outlive this object: the mapping is left until the process
        // ends.
        let is_ours = self.maker.is_some_and(Process::is_current);
        let stays = |words: SlotWords<'_>, slot: SlotId| {
            is_ours && words.registered()[slot.index()].load(Ordering::Relaxed) > 0
        };
        let slots = || (0..self.geometry.slots).map(SlotId::new);
        let any_stays = |worker| slots().any(|slot| stays(self.worker(worker).slots, slot));
        if !self.segment.is_in_parts() && !(0..self.geometry.workers).any(any_stays) {
            return;
        }
        let stuck = std::mem::take(self.stuck.get_mut());
        let mut mapped: Vec<Range<u64>> = std::iter::once(0..self.offsets.windows).collect();
        for worker in 0..self.geometry.workers {
            let words = self.worker(worker).slots;
            for slot in slots().filter(|&slot| !self.gone.contains(worker, slot) && !stays(words, slot)) {
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
