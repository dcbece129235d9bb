//! The indices of tasks that were sent, for errors that name them, and for workers that begin them anew.

use std::collections::BTreeMap;

use pyo3::prelude::*;
use ringloader_core::scheduler::Scheduler;

use crate::python::Late;

/// Tasks of this epoch by their numbers: all that are awaited, and some that were answered.
pub(crate) struct SentTasks<I>(BTreeMap<u64, I>);

impl<I> Default for SentTasks<I> {
    fn default() -> Self {
        Self(BTreeMap::new())
    }
}

impl<I> SentTasks<I> {
    /// Keeps the index that `core` is about to send.
    pub(crate) fn note<T>(&mut self, core: &Scheduler<T>, index: I) {
        if self.0.len() as u64 >= 2 * core.most_tasks() {
            let awaited: Vec<u64> = core.awaited().map(|(seq, _)| seq).collect();
            self.0.retain(|seq, _| awaited.contains(seq));
        }
        let (seq, ..) = core.positions();
        self.0.insert(seq, index);
    }

    /// The index of a task that is awaited.
    pub(crate) fn get(&self, seq: u64) -> Option<&I> {
        self.0.get(&seq)
    }

    /// Returns the task that each worker is at, or begins with: for the worker whose turn it is, or for all. A worker
    /// does its tasks in their order. `decode` makes an index's object.
    pub(crate) fn late<'py, T>(
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
