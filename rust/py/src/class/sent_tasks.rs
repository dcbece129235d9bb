//! The indices of tasks that were sent, for errors that name them.

use std::collections::BTreeMap;

use pyo3::prelude::*;
use ringloader_core::scheduler::Scheduler;
use ringloader_core::transport::message::TaskKind;

use crate::index::codec::decode_index;
use crate::python::Late;

/// Tasks of this epoch by their numbers: all that are awaited, and some that were answered.
#[derive(Default)]
pub(crate) struct SentTasks(BTreeMap<u64, (TaskKind, Vec<u8>)>);

impl SentTasks {
    /// Keeps the index that `core` is about to send.
    pub(crate) fn note<T>(&mut self, core: &Scheduler<T>, kind: TaskKind, bytes: &[u8]) {
        if self.0.len() as u64 >= 2 * core.most_tasks() {
            let awaited: Vec<u64> = core.awaited().map(|(seq, _)| seq).collect();
            self.0.retain(|seq, _| awaited.contains(seq));
        }
        let (seq, ..) = core.positions();
        self.0.insert(seq, (kind, bytes.to_vec()));
    }

    /// What each worker is in, or is to begin with: of the one whose turn it is, or of all. A worker does its tasks in
    /// their order.
    pub(crate) fn late<'py, T>(
        &self,
        py: Python<'py>,
        core: &Scheduler<T>,
        turn: Option<u32>,
    ) -> Vec<Late<'py>> {
        let mut first = BTreeMap::new();
        for (seq, worker) in core.awaited().filter(|&(_, worker)| turn.is_none_or(|turn| turn == worker)) {
            first.entry(worker).and_modify(|before: &mut u64| *before = seq.min(*before)).or_insert(seq);
        }
        let index = |seq: &u64| {
            let (kind, bytes) = self.0.get(seq)?;
            // Lateness is the error, and not what a user's index raises.
            decode_index(py, *kind, bytes).ok()
        };
        first.iter().map(|(&worker, seq)| (worker, *seq, index(seq))).collect()
    }
}
