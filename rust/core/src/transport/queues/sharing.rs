//! Tasks that all workers share: which runs are left, and who has which.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Condvar;

use super::Queues;
use super::shared_task::{SharedTask, TaskRun};
use crate::error::Result;
use crate::joint::{self, Cost};
use crate::sync::{Arc, Ordering};

/// The tasks that workers share.
#[derive(Debug)]
pub(super) struct Sharing<I, R> {
    /// Runs that no worker has taken, in the order of their tasks.
    pub(super) runs: VecDeque<TaskRun<I, R>>,
    /// Tasks that have no reply.
    pub(super) unanswered: BTreeSet<u64>,
    /// Returns the number of an index's samples; `None`: a task is never cut.
    pub(super) samples_of: Option<fn(&I) -> u64>,
    /// The number of workers that make the tasks: the first ones.
    pub(super) sharers: u32,
    /// The task that was sent last.
    pub(super) newest: u64,
    /// The time that a sample takes; 0: not known.
    pub(super) nanoseconds: u64,
}

impl<I, R> Queues<I, R> {
    /// Lets all workers share all tasks from now on. `samples_of` returns the number of an index's samples; without it,
    /// a task is never cut.
    ///
    /// # Errors
    /// [`Error::Inherited`](crate::Error::Inherited) in a forked child.
    pub fn share_tasks(&self, samples_of: Option<fn(&I) -> u64>) -> Result<()> {
        let mut state = self.lock()?;
        let sharers = state.workers.len() as u32;
        state.sharing = Some(Sharing {
            runs: VecDeque::new(),
            unanswered: BTreeSet::new(),
            samples_of,
            sharers,
            newest: 0,
            nanoseconds: 0,
        });
        drop(state);
        self.shares.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// A worker takes the next run that no other has taken, of the earliest task. It has no request of its own.
    ///
    /// # Errors
    /// [`Error::Inherited`](crate::Error::Inherited) in a forked child.
    pub fn take_run(&self, worker: u32) -> Result<Option<TaskRun<I, R>>> {
        if !self.shares.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let mut state = self.lock()?;
        let is_there = state.is_run_for(worker);
        let found = state.sharing.as_mut().filter(|_| is_there).and_then(|sharing| sharing.runs.pop_front());
        let taker = &mut state.workers[worker as usize];
        taker.has_made |= found.is_some();
        let before = std::mem::replace(&mut taker.in_hand, found.clone());
        drop(state);
        drop(before);
        Ok(found)
    }

    /// Returns the run that each worker took last, if it has not looked for another; `None` where each task is one
    /// worker's.
    ///
    /// # Errors
    /// [`Error::Inherited`](crate::Error::Inherited) in a forked child.
    #[expect(clippy::type_complexity, reason = "a list")]
    pub fn runs_in_hand(&self) -> Result<Option<Vec<(u32, TaskRun<I, R>)>>> {
        let state = self.lock()?;
        let workers = (0..).zip(&state.workers);
        let runs = workers.filter_map(|(number, worker)| Some((number, worker.in_hand.clone()?)));
        Ok(state.sharing.is_some().then(|| runs.collect()))
    }

    /// Notes the time that a sample took.
    ///
    /// # Errors
    /// [`Error::Inherited`](crate::Error::Inherited) in a forked child.
    pub fn note_time(&self, nanoseconds: u64) -> Result<()> {
        if let Some(sharing) = &mut self.lock()?.sharing {
            sharing.nanoseconds = joint::mean(sharing.nanoseconds, nanoseconds);
        }
        Ok(())
    }

    /// Shares a task among all workers.
    pub(super) fn share(&self, seq: u64, index: I) -> Result<()> {
        let mut state = self.lock()?;
        let is_closed = state.is_closed;
        let Some(sharing) = state.sharing.as_mut().filter(|_| !is_closed) else {
            drop(state);
            return Ok(());
        };
        let samples = sharing.samples_of.map_or(1, |samples_of| samples_of(&index));
        let cost = Cost { making: sharing.nanoseconds, sending: 0 };
        let per_run = joint::per_run(samples, sharing.sharers, cost);
        sharing.newest = seq;
        let task = Arc::new(SharedTask::new(seq, index, samples, per_run));
        sharing.runs.extend(SharedTask::all_runs(&task));
        sharing.unanswered.insert(seq);
        drop(state);
        self.requested.iter().for_each(Condvar::notify_one);
        Ok(())
    }
}
