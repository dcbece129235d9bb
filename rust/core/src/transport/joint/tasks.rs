//! The tasks that workers share, in the main process: which have a place, and which wait for one.

use std::collections::VecDeque;

use super::Claimed;
use super::claims::Claims;
use crate::error::Result;
use crate::joint::JointPlan;
use crate::transport::task_number::{epoch_of, is_before};

/// The tasks: `I` is an index, and `K` what is kept for a task that has a place.
#[derive(Debug)]
pub(crate) struct Tasks<I, K> {
    /// By place.
    laid_out: Vec<Option<LaidOut<I, K>>>,
    /// Tasks without a place, each with the number of its samples.
    pending: VecDeque<(u64, I, u64)>,
    /// The task that was sent last.
    newest: u64,
    /// True if no batch may be cut.
    keeps_whole: bool,
    /// The most workers that there may be, and how many make the tasks: the first ones.
    workers: u32,
    sharers: u32,
    /// By worker: true if it has made some of a task since it is one of them. Empty where their number does not change.
    have_made: Vec<bool>,
}

/// A task that has a place.
#[derive(Debug)]
pub(crate) struct LaidOut<I, K> {
    pub(crate) seq: u64,
    pub(crate) index: I,
    pub(crate) kept: K,
}

impl<I, K> Tasks<I, K> {
    /// For `workers` workers at most, and as many until [`share_among`](Self::share_among).
    pub(crate) fn new(places: u32, workers: u32, keeps_whole: bool) -> Self {
        Self {
            laid_out: (0..places).map(|_| None).collect(),
            pending: VecDeque::new(),
            newest: 0,
            keeps_whole,
            workers,
            sharers: workers,
            have_made: Vec::new(),
        }
    }

    /// See [`Joint::share_among`](super::Joint::share_among).
    pub(crate) fn share_among(&mut self, workers: u32) {
        self.have_made.resize(self.workers as usize, false);
        let before = self.sharers.min(workers);
        self.have_made[before as usize..].fill(false);
        self.sharers = workers;
    }

    /// Returns true if a worker has something of a task that is not answered.
    pub(crate) fn has_claim(&self, claims: Claims<'_>, worker: u32) -> bool {
        claims.places().any(|place| claims.batch(place).is_with(worker))
    }

    /// Returns true if no worker has some of a task, the one that was sent last aside.
    pub(crate) fn is_open(&self, claims: Claims<'_>) -> bool {
        claims.is_open(|seq| seq != self.newest)
    }

    /// Returns true if a worker has made some of a task that was answered, since it [shares](Self::share_among) tasks.
    pub(crate) fn has_made(&self, worker: u32) -> bool {
        self.have_made.get(worker as usize).is_some_and(|&has| has)
    }

    /// Adds a task of `samples` samples, which has no place yet.
    pub(crate) fn add(&mut self, seq: u64, index: I, samples: u64) {
        self.newest = seq;
        self.pending.push_back((seq, index, samples));
    }

    /// Takes a task that has no place back: the caller says that it was not sent.
    pub(crate) fn take_back(&mut self, seq: u64) {
        self.pending.retain(|&(pending, ..)| pending != seq);
    }

    /// Lays out tasks while there is a place. Returns the number of their runs. `room`: bytes of a window. `write` writes
    /// the index of a task to a place, and returns the kind, the length and the window for its [`JointPlan`], and what is
    /// kept; `None`: not now.
    ///
    /// # Errors
    /// Those of `write`.
    pub(crate) fn lay_out(
        &mut self,
        claims: Claims<'_>,
        room: u64,
        mut write: impl FnMut(usize, &I) -> Result<Option<([u64; 2], u32, K)>>,
    ) -> Result<u32> {
        let mut laid_out = 0;
        let mut refused = Ok(());
        while let Some(place) = self.laid_out.iter().position(Option::is_none)
            && let Some((_, index, _)) = self.pending.front()
        {
            let written = write(place, index);
            let Ok(Some(([kind, len], window, kept))) = written else {
                refused = written.map(drop);
                break;
            };
            let Some((seq, index, samples)) = self.pending.pop_front() else { break };
            let per_run = if self.keeps_whole { samples } else { claims.per_run(samples, self.sharers) };
            let plan = JointPlan { seq, samples, per_run, kind, len, window };
            claims.batch(place).lay_out(&plan, room);
            self.laid_out[place] = Some(LaidOut { seq, index, kept });
            laid_out += plan.runs();
        }
        self.note_pending(claims);
        refused.map(|()| laid_out)
    }

    /// The tasks that have no place.
    #[cfg(test)]
    pub(super) fn waiting(&self) -> Vec<u64> {
        self.pending.iter().map(|&(seq, ..)| seq).collect()
    }

    fn note_pending(&self, claims: Claims<'_>) {
        claims.pending().set(self.pending.front().map(|&(seq, ..)| epoch_of(seq)));
    }

    /// The place of a task.
    pub(crate) fn place_of(&self, seq: u64) -> Option<usize> {
        self.laid_out
            .iter()
            .position(|laid_out| laid_out.as_ref().is_some_and(|laid_out| laid_out.seq == seq))
    }

    /// The task of which a worker has claimed something.
    pub(crate) fn of(&mut self, claimed: &Claimed) -> Option<&mut LaidOut<I, K>> {
        let laid_out = self.laid_out.get_mut(claimed.place)?.as_mut()?;
        (laid_out.seq == claimed.plan.seq).then_some(laid_out)
    }

    /// Takes the task out of its place: it has its result.
    pub(crate) fn close(&mut self, claims: Claims<'_>, place: usize) -> Option<LaidOut<I, K>> {
        for worker in claims.batch(place).makers() {
            // A worker may have written anything there.
            if let Some(has_made) = self.have_made.get_mut(worker as usize) {
                *has_made = true;
            }
        }
        claims.batch(place).close();
        self.laid_out[place].take()
    }

    /// Takes all tasks that have a place: the workers have ended.
    pub(crate) fn close_all(&mut self) -> impl Iterator<Item = LaidOut<I, K>> + '_ {
        self.laid_out.iter_mut().filter_map(Option::take)
    }

    /// From now on only batches of `epoch` and of later ones are awaited. Returns the tasks of others without a place.
    pub(crate) fn begin_epoch(&mut self, claims: Claims<'_>, epoch: u64) -> VecDeque<(u64, I, u64)> {
        claims.await_from(epoch);
        let is_stale = |&(seq, ..): &(u64, I, u64)| is_before(epoch_of(seq), epoch);
        let stale;
        (stale, self.pending) = std::mem::take(&mut self.pending).into_iter().partition(is_stale);
        self.note_pending(claims);
        stale
    }

    /// Frees what a worker had claimed, which has ended and whose results were taken.
    pub(crate) fn lose(&self, claims: Claims<'_>, worker: u32) {
        for place in claims.places().filter(|&place| self.laid_out[place].is_some()) {
            claims.batch(place).lose(worker);
        }
    }

    /// The task of which a worker has claimed something.
    pub(crate) fn in_hand(&self, claims: Claims<'_>, worker: u32) -> Option<&LaidOut<I, K>> {
        let found = claims.places().find(|&place| claims.batch(place).is_with(worker))?;
        self.laid_out[found].as_ref()
    }
}
