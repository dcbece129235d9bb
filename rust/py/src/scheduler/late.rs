//! Tasks that are late: the indices of all that were sent, and the moments at which a wait is reported.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use ringloader_core::scheduler::Scheduler;

use super::parent_end::{IndexOf, ParentEnd};
use super::{EpochState, Scheduling};
use crate::python::{Callbacks, Late};

/// Tasks of this epoch by their numbers: all that are awaited, and some that were answered.
pub(super) struct SentTasks<I>(BTreeMap<u64, I>);

impl<I> Default for SentTasks<I> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<I> SentTasks<I> {
    /// Keeps the index that `core` is about to send.
    pub(super) fn insert<T>(&mut self, core: &Scheduler<T>, index: I) {
        if self.0.len() as u64 >= 2 * core.most_tasks() {
            let awaited: Vec<u64> = core.awaited().map(|(seq, _)| seq).collect();
            self.0.retain(|seq, _| awaited.contains(seq));
        }
        let (seq, ..) = core.positions();
        self.0.insert(seq, index);
    }

    /// The index of a task that is awaited.
    pub(super) fn get(&self, seq: u64) -> Option<&I> {
        self.0.get(&seq)
    }

    /// Returns the task that each worker is at, or begins with: for the worker whose turn it is, or for all. A worker
    /// does its tasks in their order. `decode` makes an index's object.
    pub(super) fn late<'py, T>(
        &self,
        core: &Scheduler<T>,
        turn: Option<u32>,
        decode: impl Fn(&I) -> PyResult<Bound<'py, PyAny>>,
    ) -> Vec<Late<'py>> {
        let mut first = BTreeMap::new();
        for (seq, worker) in core.awaited().filter(|&(_, worker)| turn.is_none_or(|turn| turn == worker)) {
            first.entry(worker).and_modify(|before: &mut u64| *before = seq.min(*before)).or_insert(seq);
        }
        // Lateness is the error, and not what a user's index raises.
        let index = |seq: &u64| self.0.get(seq).and_then(|index| decode(index).ok());
        first.iter().map(|(&worker, seq)| (worker, *seq, index(seq))).collect()
    }
}

impl<E: ParentEnd> Scheduling<E> {
    /// Reports each wait for a batch from now on: after `seconds`, and again each time it is twice as long.
    pub(super) fn watch(&self, py: Python<'_>, seconds: f64) -> PyResult<()> {
        let mut state = self.lock(py)?;
        // A time that no clock can count to never comes.
        state.watch = Duration::try_from_secs_f64(seconds).ok();
        state.keeps_sent = true;
        Ok(())
    }

    /// Returns the task that each worker is at, or begins with: for the worker whose turn it is, or for all. If all
    /// workers share the tasks: the ones of which they make samples, the earliest first.
    pub(super) fn late<'py>(
        py: Python<'py>,
        state: &EpochState<IndexOf<E>>,
        engine: &E::Core,
        turn: Option<u32>,
    ) -> Vec<Late<'py>> {
        let mut at: Vec<Late<'py>> = (E::all_in_hand(engine, py).into_iter().flatten())
            .filter_map(|(worker, seq, index)| {
                Some((worker, state.core.awaited_task(seq)?, E::index(py, &index).ok()))
            })
            .collect();
        at.sort_by_key(|&(_, number, _)| number);
        if at.is_empty() { state.sent.late(&state.core, turn, |index| E::index(py, index)) } else { at }
    }

    /// Returns the task that each worker owes. The worker whose turn it is comes first.
    fn owing<'py>(
        py: Python<'py>,
        state: &EpochState<IndexOf<E>>,
        engine: &E::Core,
        turn: Option<u32>,
    ) -> Vec<Late<'py>> {
        let mut owing = Self::late(py, state, engine, None);
        if E::all_in_hand(engine, py).is_some() {
            return owing;
        }
        owing.sort_by_key(|&(worker, ..)| Some(worker) != turn);
        for (worker, number, index) in &mut owing {
            // Results of earlier tasks may lie in the worker's ring already, so look at the task that it took last.
            // Nothing lies in the ring of the worker whose turn it is.
            let taken = (Some(*worker) != turn).then(|| E::in_hand(engine, *worker)).flatten();
            if let Some((seq, taken)) = taken
                && let Some(awaited) = state.core.awaited_task(seq)
            {
                (*number, *index) = (awaited, E::index(py, &taken).ok());
            }
        }
        owing
    }

    /// Reports the wait for a batch, if it must be reported now. Else returns the time until then.
    pub(super) fn report(
        watched: &mut Watched,
        state: &EpochState<IndexOf<E>>,
        callbacks: &Callbacks<'_, '_>,
        engine: &E::Core,
        turn: Option<u32>,
    ) -> PyResult<Option<Duration>> {
        let Some(waited) = watched.is_due() else { return Ok(Some(watched.left())) };
        let owing = Self::owing(callbacks.py(), state, engine, turn);
        callbacks.note_wait(waited.as_secs_f64(), owing)?;
        Ok(None)
    }
}

/// A wait for a batch, which is reported when it has become long, and again whenever it is twice as long.
pub(super) struct Watched {
    since: Instant,
    /// The length at which the wait is reported next.
    next: Duration,
}

impl Watched {
    pub(super) fn new(after: Duration) -> Self {
        Self { since: Instant::now(), next: after }
    }

    /// Returns the length of the wait, if it must be reported now.
    fn is_due(&mut self) -> Option<Duration> {
        let waited = self.since.elapsed();
        let is_due = waited >= self.next;
        while waited >= self.next {
            // More than nothing, or it would never be more.
            self.next = self.next.max(Duration::from_millis(1)).saturating_mul(2);
        }
        is_due.then_some(waited)
    }

    /// Returns the time until the next report.
    fn left(&self) -> Duration {
        self.next.saturating_sub(self.since.elapsed())
    }
}
