//! The claims of all batches under way, in memory that workers share, or in that of one process.

use std::ops::Range;

use super::Claimed;
use crate::joint::{Batch, Cost, Pending, WORDS, mean, per_run};
use crate::sync::{AtomicU64, Ordering};
use crate::transport::task_number::{epoch_of, is_before};

/// Words before those of the batches.
const HEADER: usize = 8;
/// The two words of a [`Cost`].
const MAKING: usize = 0;
const SENDING: usize = 1;
/// Runs whose samples could not be sent.
const UNSENT: usize = 2;
/// The epoch of which the main process awaits batches. Batches of earlier epochs are thrown away.
const AWAITED: usize = 3;
/// The word of [`Pending`].
const PENDING: usize = 4;

/// After this many runs that cannot be sent, batches are cut no more.
const FEW: u64 = 4;

/// The claims, borrowed.
#[derive(Debug, Clone, Copy)]
pub struct Claims<'a> {
    words: &'a [AtomicU64],
    places: u32,
}

impl<'a> Claims<'a> {
    /// The number of words for `places` batches at a time.
    pub(crate) fn words(places: u32) -> usize {
        HEADER + places as usize * WORDS
    }

    /// The claims in the first of `words`, which were zero.
    pub(crate) fn over(words: &'a [AtomicU64], places: u32) -> Self {
        Self { words, places }
    }

    pub(super) fn batch(&self, place: usize) -> &'a Batch {
        Batch::over(&self.words[HEADER + place * WORDS..])
    }

    pub(super) fn places(&self) -> Range<usize> {
        0..self.places as usize
    }

    pub(super) fn pending(&self) -> Pending<'a> {
        Pending::new(&self.words[PENDING])
    }

    /// From now on only batches of `epoch` and of later ones are awaited.
    pub(super) fn await_from(&self, epoch: u64) {
        self.words[AWAITED].store(epoch, Ordering::Relaxed);
    }

    /// Returns true if nobody wants the batch of a task any more: its epoch was given up.
    #[must_use]
    pub fn is_stale(&self, seq: u64) -> bool {
        // Relaxed: what is made of such a batch is only thrown away.
        is_before(epoch_of(seq), self.words[AWAITED].load(Ordering::Relaxed))
    }

    /// Returns true if no batch is left to be made of the epochs before `epoch` that anybody wants, so that a worker may
    /// begin it, which was told so after their last task was sent.
    #[must_use]
    pub fn are_over_before(&self, epoch: u64) -> bool {
        let pending = self.pending().first();
        let is_over = |place| {
            let batch = self.batch(place);
            let seq = batch.seq();
            !is_before(epoch_of(seq), epoch) || self.is_stale(seq) || !batch.is_left()
        };
        pending.is_none_or(|pending| !is_before(pending, epoch)) && self.places().all(is_over)
    }

    /// Returns true if a worker may claim something of a task that `is_wanted`.
    pub fn is_open(&self, is_wanted: impl Fn(u64) -> bool) -> bool {
        self.places().map(|place| self.batch(place)).any(|batch| is_wanted(batch.seq()) && batch.is_open())
    }

    /// Claims something of the earliest batch of which something is free, if its task `is_wanted`.
    pub fn claim(&self, worker: u32, is_wanted: impl Fn(u64) -> bool) -> Option<Claimed> {
        loop {
            let open = self.places().filter(|&place| self.batch(place).is_open());
            let place = open
                .filter(|&place| is_wanted(self.batch(place).seq()))
                .min_by_key(|&place| self.batch(place).seq())?;
            let batch = self.batch(place);
            if let Some(claim) = batch.claim(worker, &is_wanted) {
                return Some(Claimed { place, plan: batch.plan(), claim });
            }
        }
    }

    /// Returns the batch of which a worker has claimed something.
    #[must_use]
    pub fn of(&self, claimed: &Claimed) -> &'a Batch {
        self.batch(claimed.place)
    }

    /// Notes the nanoseconds that each sample of a run took to make.
    pub fn note_making(&self, nanoseconds: u64) {
        self.note(MAKING, nanoseconds);
    }

    /// Notes the nanoseconds that each sample of a run took to send.
    pub fn note_sending(&self, nanoseconds: u64) {
        self.note(SENDING, nanoseconds);
    }

    /// Publishes nothing: of two notes at once, one may be lost.
    fn note(&self, word: usize, nanoseconds: u64) {
        let word = &self.words[word];
        word.store(mean(word.load(Ordering::Relaxed), nanoseconds), Ordering::Relaxed);
    }

    /// Notes that a run cannot be sent. Returns true once it has happened so often that batches are cut no more.
    pub fn note_unsent(&self) -> bool {
        self.words[UNSENT].fetch_add(1, Ordering::Relaxed) + 1 == FEW
    }

    /// Returns the samples of a run, for a batch of `samples` that `workers` make.
    pub(super) fn per_run(&self, samples: u64, workers: u32) -> u64 {
        let word = |word: usize| self.words[word].load(Ordering::Relaxed);
        if word(UNSENT) >= FEW {
            return samples;
        }
        per_run(samples, workers, Cost { making: word(MAKING), sending: word(SENDING) })
    }
}
