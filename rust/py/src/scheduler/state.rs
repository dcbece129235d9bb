//! The state of an epoch, which the scheduler has under one lock.

use std::collections::VecDeque;
use std::time::Duration;

use pyo3::prelude::*;

use super::Core;
use super::following::{Following, Reading};
use super::late::SentTasks;
use super::timed::Made;
use crate::sampling::source::IndexSource;

/// The state of an epoch.
pub(super) struct State<I> {
    pub(super) core: Core,
    pub(super) source: Py<IndexSource>,
    pub(super) reading: Reading,
    /// The epoch that follows, once its first tasks may go out.
    pub(super) following: Option<Following<I>>,
    /// Batches that were taken and not yet handed out, in their order.
    pub(super) taken: VecDeque<Taken>,
    /// A batch that was to be handed out when an interrupt came, with its task and its worker. It is the next.
    pub(super) interrupted: Option<((u64, u32), Py<PyAny>)>,
    /// The batch that was taken next, if there was no memory to keep it with the others.
    pub(super) unqueued: Option<(Taken, Py<PyAny>)>,
    /// The end of a worker's iterable dataset, where that was found ahead of its turn. To end the worker then would
    /// change which worker gets which of the tasks that are sent until its turn.
    pub(super) end_ahead: Option<End>,
    /// Workers whose end was taken and is stored until its turn.
    pub(super) ends_stored: Vec<u32>,
    /// True if the indices of tasks are kept until their results have come: for errors of lateness, and for successors.
    pub(super) keeps_sent: bool,
    /// The indices that are kept.
    pub(super) sent: SentTasks<I>,
    /// The moments of results that came before this epoch began, for the recorder.
    pub(super) early: Vec<(u64, Made)>,
    /// The time after which a wait for a batch is reported.
    pub(super) watch: Option<Duration>,
}

impl<I> State<I> {
    pub(super) fn new(core: Core, source: Py<IndexSource>, keeps_sent: bool) -> Self {
        Self {
            core,
            source,
            reading: Reading::Open,
            following: None,
            taken: VecDeque::new(),
            interrupted: None,
            unqueued: None,
            end_ahead: None,
            ends_stored: Vec::new(),
            keeps_sent,
            sent: SentTasks::default(),
            early: Vec::new(),
            watch: None,
        }
    }

    /// Forgets the batches that this epoch has taken, and the epoch that follows. Returns the objects, for the caller
    /// to drop after the lock is released.
    pub(super) fn forget(&mut self) -> impl Sized + use<I> {
        self.taken.clear();
        self.end_ahead = None;
        self.ends_stored.clear();
        self.early.clear();
        (self.interrupted.take(), self.unqueued.take(), self.following.take())
    }

    /// Returns the number of tasks that were sent and whose batches were not handed out.
    pub(super) fn outstanding(&self) -> u64 {
        let taken = self.taken.len() + usize::from(self.unqueued.is_some());
        self.core.positions().2 + taken as u64 + u64::from(self.interrupted.is_some())
    }
}

/// The end of a worker's iterable dataset.
#[derive(Clone, Copy)]
pub(super) enum End {
    /// The answer to this task, which is still awaited.
    Answer(u64),
    /// The end of this worker, whose answer was stored until its turn.
    Stored(u32),
}

/// A result whose turn it is.
pub(super) struct Due<'py> {
    /// The task's number in the epoch.
    pub(super) seq: u64,
    pub(super) worker: u32,
    pub(super) data: Bound<'py, PyAny>,
}

/// A batch that was taken and not yet handed out.
pub(super) struct Taken {
    pub(super) seq: u64,
    pub(super) worker: u32,
    /// torch's `_rcvd_idx` before it.
    pub(super) received: u64,
}
