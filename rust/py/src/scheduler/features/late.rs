//! Tasks that are late, and those of lost workers: the indices of all that were sent, what each worker is at, and the
//! moments at which a wait is reported.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use ringloader_core::scheduler::Scheduler;
use ringloader_core::transport::engine::Engine as CoreEngine;
use ringloader_core::transport::message::{TaskIndex, TaskKind};

use super::ParentEnd;
use crate::gil::exception;
use crate::python::{Callbacks, Late};
use crate::sampling::places;
use crate::scheduler::parent_end::{IndexOf, RingEnd, TransportEnd};
use crate::scheduler::{EpochState, Scheduling};
use crate::transport::claimed::Core as CoreQueues;
use crate::transport::queues::ThreadQueues;

/// In each pickle that has what torch sends of a tensor to another process.
const REDUCTIONS: &[u8] = b"torch.multiprocessing.reductions";

/// What the parent's end knows of the tasks that workers are at.
pub(crate) trait LateEnd: TransportEnd {
    /// The task that `worker` took last, as it was sent, and its index; `None` where that is not known.
    fn in_hand(_core: &Self::Core, _worker: u32) -> Option<(u64, IndexOf<Self>)> {
        None
    }

    /// Returns the task that each busy worker makes samples of, with its index, where all workers share the tasks.
    fn all_in_hand(core: &Self::Core, py: Python<'_>) -> Option<Vec<(u32, u64, IndexOf<Self>)>>;

    /// Returns true if a worker runs on another machine: nobody knows which task it took last.
    fn is_elsewhere(_core: &Self::Core, _worker: u32) -> bool {
        false
    }
}

impl<R: RingEnd> LateEnd for R {
    fn in_hand(core: &R::Core, worker: u32) -> Option<(u64, TaskIndex)> {
        R::joint(core).map_or_else(|| in_ring(R::rings(core), worker), |joint| joint.in_hand(worker))
    }

    fn all_in_hand(core: &R::Core, _py: Python<'_>) -> Option<Vec<(u32, u64, TaskIndex)>> {
        let joint = R::joint(core)?;
        let of = |worker| joint.in_hand(worker).map(|(seq, index)| (worker, seq, index));
        Some((0..joint.workers()).filter_map(of).collect())
    }

    fn is_elsewhere(core: &R::Core, worker: u32) -> bool {
        R::rings(core).is_relayed(worker)
    }
}

impl LateEnd for ThreadQueues {
    fn all_in_hand(core: &CoreQueues, py: Python<'_>) -> Option<Vec<(u32, u64, IndexOf<Self>)>> {
        let tasks = core.all_in_hand().ok().flatten()?;
        Some(tasks.iter().map(|(worker, seq, index)| (*worker, *seq, index.clone_ref(py))).collect())
    }
}

fn in_ring(core: &CoreEngine, worker: u32) -> Option<(u64, TaskIndex)> {
    let task = core.in_hand(worker).ok().flatten()?;
    let (kind, bytes) = match task.kind {
        TaskKind::Seeded => places::split(&task.bytes).map(|(_, kind, bytes)| (kind, bytes.to_vec())).ok()?,
        kind => (kind, task.bytes),
    };
    // Messages and calls have no number.
    let asks = matches!(
        kind,
        TaskKind::Indices | TaskKind::Index | TaskKind::Nones | TaskKind::PickledIndex | TaskKind::None
    );
    // A tensor that torch sends in its own way can be taken only once, and not here.
    let once =
        kind == TaskKind::PickledIndex && bytes.windows(REDUCTIONS.len()).any(|part| part == REDUCTIONS);
    (asks && !once).then_some((task.seq, (kind, bytes)))
}

/// The indices of tasks, where they are kept until their results have come: for errors of lateness, for successors, and
/// for the recorder.
pub(in super::super) struct SentTasks<I> {
    keeps: bool,
    /// True if workers take tasks before their turn: the one that a worker took last is not the one that it is at.
    are_ahead: bool,
    /// Tasks of this epoch by their numbers: all that are awaited, and some that were answered.
    indices: BTreeMap<u64, I>,
    /// The time after which a wait for a batch is reported.
    watch: Option<Duration>,
}

impl<I> SentTasks<I> {
    pub(super) fn new(keeps: bool) -> Self {
        Self { keeps, are_ahead: false, indices: BTreeMap::new(), watch: None }
    }

    pub(super) fn keep(&mut self) {
        self.keeps = true;
    }

    pub(in super::super) fn keeps(&self) -> bool {
        self.keeps
    }

    /// Forgets the tasks of the epoch before.
    pub(in super::super) fn reset(&mut self) {
        self.indices.clear();
    }

    /// Exchanges the indices of two epochs.
    pub(super) fn swap(&mut self, indices: &mut BTreeMap<u64, I>) {
        std::mem::swap(&mut self.indices, indices);
    }

    /// Keeps the index that `core` is about to send.
    pub(in super::super) fn insert<T>(&mut self, core: &Scheduler<T>, index: I) {
        if self.indices.len() as u64 >= 2 * core.most_tasks() {
            let awaited: Vec<u64> = core.awaited().map(|(seq, _)| seq).collect();
            self.indices.retain(|seq, _| awaited.contains(seq));
        }
        let (seq, ..) = core.positions();
        self.indices.insert(seq, index);
    }

    /// The index of a task that is awaited.
    pub(super) fn get(&self, seq: u64) -> Option<&I> {
        self.indices.get(&seq)
    }

    /// Returns the task that each worker is at, or begins with: for the worker whose turn it is, or for all. A worker
    /// does its tasks in their order. `decode` makes an index's object.
    fn late<'py, T>(
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
        let index = |seq: &u64| self.indices.get(seq).and_then(|index| decode(index).ok());
        first.iter().map(|(&worker, seq)| (worker, *seq, index(seq))).collect()
    }
}

impl<E: ParentEnd> Scheduling<E> {
    /// Reports each wait for a batch from now on: after `seconds`, and again each time it is twice as long.
    pub(in super::super) fn watch(&self, py: Python<'_>, seconds: f64) -> PyResult<()> {
        let sent = &mut self.lock(py)?.features.sent;
        // A time that no clock can count to never comes.
        sent.watch = Duration::try_from_secs_f64(seconds).ok();
        sent.keep();
        Ok(())
    }

    /// Keeps the indices of tasks from now on, until their results have come.
    pub(in super::super) fn keep_sent(&self, py: Python<'_>) -> PyResult<()> {
        self.lock(py)?.features.sent.keep();
        Ok(())
    }

    /// Says that workers take tasks before their turn.
    pub(in super::super) fn take_ahead(&self, py: Python<'_>) -> PyResult<()> {
        self.lock(py)?.features.sent.are_ahead = true;
        Ok(())
    }

    /// A worker has ended and owes a result: a successor gets its tasks.
    ///
    /// # Errors
    /// The error for a lost worker, where it has no successor.
    pub(in super::super) fn replace_lost(
        &self,
        state: &mut EpochState<IndexOf<E>>,
        callbacks: &Callbacks<'_, '_>,
        core: &E::Core,
        worker: u32,
    ) -> PyResult<()> {
        let py = callbacks.py();
        state.features.lose_next(&state.core);
        let sent = &state.features.sent;
        let taken = (!sent.are_ahead).then(|| E::in_hand(core, worker)).flatten();
        let in_hand = taken.and_then(|(seq, index)| {
            Some((worker, state.core.awaited_task(seq)?, E::index(py, &index).ok()))
        });
        // Not known of a worker that is elsewhere, or takes tasks ahead: it does its tasks in their order.
        let in_hand = in_hand.or_else(|| {
            let index = |index: &_| E::index(py, index);
            let is_oldest = sent.are_ahead || E::is_elsewhere(core, worker);
            is_oldest.then(|| sent.late(&state.core, Some(worker), index).pop())?
        });
        state.source.get().record_lost(worker, || state.core.awaited_of(worker));
        if callbacks.replace_lost(worker, in_hand.clone())? {
            let sent = |seq| sent.get(seq).map(|index| E::clone_index(index, py));
            state.core.resume(core, worker, sent).map_err(exception)?;
            return Ok(());
        }
        state.core.leave_to_others(core, worker);
        callbacks.raise_lost(worker, in_hand)?;
        Err(PyRuntimeError::new_err(format!("DataLoader worker {worker} exited unexpectedly")))
    }

    /// Returns the task that each worker is at, or begins with: for the worker whose turn it is, or for all. If all
    /// workers share the tasks: the ones of which they make samples, the earliest first.
    pub(in super::super) fn late<'py>(
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
        if at.is_empty() {
            state.features.sent.late(&state.core, turn, |index| E::index(py, index))
        } else {
            at
        }
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
            let is_taken_last = Some(*worker) != turn && !state.features.sent.are_ahead;
            let taken = is_taken_last.then(|| E::in_hand(engine, *worker)).flatten();
            if let Some((seq, taken)) = taken
                && let Some(awaited) = state.core.awaited_task(seq)
            {
                (*number, *index) = (awaited, E::index(py, &taken).ok());
            }
        }
        owing
    }

    /// Reports the wait for a batch, if it must be reported now. Else returns the time until then. `watched` is `None`
    /// when the wait begins.
    pub(in super::super) fn report_wait(
        watched: &mut Option<Watched>,
        state: &EpochState<IndexOf<E>>,
        callbacks: &Callbacks<'_, '_>,
        engine: &E::Core,
        turn: Option<u32>,
    ) -> PyResult<Option<Duration>> {
        let Some(after) = state.features.sent.watch else { return Ok(Some(Duration::MAX)) };
        let watched = watched.get_or_insert_with(|| Watched::new(after));
        let Some(waited) = watched.is_due() else { return Ok(Some(watched.left())) };
        let owing = Self::owing(callbacks.py(), state, engine, turn);
        callbacks.note_wait(waited.as_secs_f64(), owing)?;
        Ok(None)
    }
}

/// A wait for a batch, which is reported when it has become long, and again whenever it is twice as long.
pub(in super::super) struct Watched {
    since: Instant,
    /// The length at which the wait is reported next.
    next: Duration,
}

impl Watched {
    fn new(after: Duration) -> Self {
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
