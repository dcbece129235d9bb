//! Tasks that are late: the indices of all that were sent, and the moments at which a wait is reported.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use pyo3::prelude::*;
use ringloader_core::scheduler::Scheduler;

use crate::python::Late;

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
    pub(super) fn is_due(&mut self) -> Option<Duration> {
        let waited = self.since.elapsed();
        let is_due = waited >= self.next;
        while waited >= self.next {
            // More than nothing, or it would never be more.
            self.next = self.next.max(Duration::from_millis(1)).saturating_mul(2);
        }
        is_due.then_some(waited)
    }

    /// Returns the time until the next report.
    pub(super) fn left(&self) -> Duration {
        self.next.saturating_sub(self.since.elapsed())
    }
}
