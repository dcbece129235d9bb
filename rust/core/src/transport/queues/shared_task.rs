//! A task that all workers share: its runs, and the samples that were made of it.

use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::sync::Arc;

/// A task that all workers share: each takes a run of its samples, and the one that makes the last run answers it.
#[derive(Debug)]
pub struct SharedTask<I, R> {
    /// The number of the task.
    pub seq: u64,
    /// The index that the task asks for.
    pub index: I,
    /// The number of its samples.
    pub samples: u64,
    per_run: u64,
    parts: Mutex<Parts<R>>,
}

/// The samples of a task that were made.
#[derive(Debug)]
struct Parts<R> {
    by_run: Vec<Option<R>>,
    /// The run that was made last: its worker takes the samples of all, and collates.
    last: Option<u64>,
}

/// A run of a task's samples, which one worker makes.
#[derive(Debug)]
pub struct TaskRun<I, R> {
    /// The task.
    pub task: Arc<SharedTask<I, R>>,
    pub(super) run: u64,
}

impl<I, R> Clone for TaskRun<I, R> {
    fn clone(&self) -> Self {
        Self { task: self.task.clone(), run: self.run }
    }
}

impl<I, R> TaskRun<I, R> {
    /// The samples of the run, as a range of the task's.
    #[must_use]
    pub fn samples(&self) -> Range<u64> {
        self.task.samples_of(self.run)
    }

    /// Returns true if the run is all there is of the task.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.task.runs() == 1
    }

    /// The run was made. Returns true if all runs are, so that its worker answers the task.
    pub fn finish(&self, part: R) -> bool {
        let mut parts = self.task.lock();
        let before = parts.by_run[self.run as usize].replace(part);
        let is_last = parts.by_run.iter().all(Option::is_some);
        if is_last {
            parts.last = Some(self.run);
        }
        drop(parts);
        drop(before);
        is_last
    }
}

impl<I, R> SharedTask<I, R> {
    pub(super) fn new(seq: u64, index: I, samples: u64, per_run: u64) -> Self {
        let parts = Mutex::new(Parts { by_run: Vec::new(), last: None });
        let task = Self { seq, index, samples, per_run, parts };
        let runs = task.runs();
        task.lock().by_run.resize_with(runs as usize, || None);
        task
    }

    /// Returns all runs, in their order.
    pub(super) fn all_runs(task: &Arc<Self>) -> impl Iterator<Item = TaskRun<I, R>> {
        (0..task.runs()).map(|run| TaskRun { task: task.clone(), run })
    }

    fn runs(&self) -> u64 {
        self.samples.div_ceil(self.per_run.max(1)).max(1)
    }

    /// The samples of a run, as a range of the task's.
    #[must_use]
    pub fn samples_of(&self, run: u64) -> Range<u64> {
        let start = (run * self.per_run).min(self.samples);
        start..(start + self.per_run).min(self.samples)
    }

    /// Gives the samples of all runs, in their order.
    pub fn take_parts(&self) -> Vec<R> {
        self.lock().by_run.iter_mut().filter_map(Option::take).collect()
    }

    /// Returns the runs to make again when the worker of `run` has ended: none that another worker has the samples of.
    pub(super) fn lost_with(&self, run: u64) -> Range<u64> {
        let mut parts = self.lock();
        let is_made = parts.by_run[run as usize].is_some();
        match parts.last {
            // The lost worker had taken the samples of all.
            Some(last) if last == run && !is_made => {
                parts.last = None;
                0..self.runs()
            }
            // The lost worker was to collate: the one that makes its run again does.
            Some(last) if last == run => run..run + 1,
            None if !is_made => run..run + 1,
            _ => run..run,
        }
    }

    fn lock(&self) -> MutexGuard<'_, Parts<R>> {
        self.parts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
