//! Tasks that all threads share: their claims lie in memory of this process, and samples stay where they are.

use std::sync::Condvar;

use super::Queues;
use crate::error::Result;
use crate::joint::Part;
use crate::number::u32_from;
use crate::sync::{Arc, AtomicU64, Ordering};
use crate::transport::joint::{Claimed, Claims, Joint, LaidOut, Tasks};
use crate::transport::task_number::{epoch_of, is_before};

/// The tasks that workers share, if they share them. Without them, a hook does nothing.
#[derive(Debug)]
pub(super) struct JointTasks<I, R>(Option<ThreadTasks<I, R>>);

impl<I, R> Default for JointTasks<I, R> {
    fn default() -> Self {
        Self(None)
    }
}

impl<I, R> JointTasks<I, R> {
    /// Returns true if workers may begin the epoch of this number.
    pub(super) fn may_begin(&self, number: u64) -> bool {
        self.0.as_ref().is_none_or(|joint| joint.claims().are_over_before(number))
    }

    /// Notes that a worker begins the epoch of this number.
    pub(super) fn enter(&mut self, worker: u32, number: u64) {
        if let Some(joint) = &mut self.0 {
            joint.workers[worker as usize].entered = number;
        }
    }

    /// Returns true if a worker finds something that it may claim.
    pub(super) fn is_open_for(&self, worker: u32) -> bool {
        self.0.as_ref().is_some_and(|joint| {
            let entered = joint.workers[worker as usize].entered;
            joint.claims().is_open(|seq| !is_before(entered, epoch_of(seq)))
        })
    }

    /// Notes that a worker has sent the batch of a task. Returns true if it had claimed the task's last step.
    pub(super) fn note_sent(&mut self, worker: u32, seq: u64) -> bool {
        let Some(joint) = &mut self.0 else { return false };
        let sent = joint.workers[worker as usize].collating.take_if(|claimed| claimed.plan.seq == seq);
        sent.inspect(|sent| joint.claims().of(sent).note_sent(sent.claim)).is_some()
    }

    /// Takes the task that has its result, for the caller to drop. Returns true if workers must be woken.
    pub(super) fn answered(&mut self, seq: u64) -> (Option<Task<I, R>>, bool) {
        let Some(joint) = &mut self.0 else { return (None, false) };
        let claims = Claims::over(&joint.words, joint.places);
        let Some(place) = joint.tasks.place_of(seq) else { return (None, false) };
        (joint.tasks.close(claims, place), joint.lay_out())
    }
}

/// A worker of tasks that workers share.
#[derive(Debug, Clone, Copy, Default)]
struct Sharer {
    /// The claim of the task that it answers next.
    collating: Option<Claimed>,
    /// The epoch of the tasks that it may take, and of those before.
    entered: u64,
}

#[derive(Debug)]
struct ThreadTasks<I, R> {
    workers: Box<[Sharer]>,
    words: Box<[AtomicU64]>,
    places: u32,
    /// Returns the number of an index's samples; `None`: a task is never cut.
    samples_of: Option<fn(&I) -> u64>,
    /// With the samples of each run that is made.
    tasks: Tasks<Arc<I>, Vec<Option<R>>>,
}

/// A task that has a place, with the samples of each run that is made.
type Task<I, R> = LaidOut<Arc<I>, Vec<Option<R>>>;

/// A thread's claim of a task: a run of its samples, or the collation.
#[derive(Debug)]
pub struct TaskRun<I> {
    /// What is claimed.
    pub claimed: Claimed,
    /// The index that the task asks for.
    pub index: Arc<I>,
    /// True if nobody wants the batch any more: its epoch was given up.
    pub is_stale: bool,
}

impl<I, R> ThreadTasks<I, R> {
    fn new(places: u32, workers: u32, samples_of: Option<fn(&I) -> u64>) -> Self {
        Self {
            workers: vec![Sharer::default(); workers as usize].into(),
            words: (0..Claims::words(places)).map(|_| AtomicU64::new(0)).collect(),
            places,
            samples_of,
            tasks: Tasks::new(places, workers, samples_of.is_none()),
        }
    }

    fn claims(&self) -> Claims<'_> {
        Claims::over(&self.words, self.places)
    }

    fn claim(&mut self, worker: u32) -> Option<TaskRun<I>> {
        let entered = self.workers[worker as usize].entered;
        let claims = Claims::over(&self.words, self.places);
        let claimed = claims.claim(worker, |seq| !is_before(entered, epoch_of(seq)))?;
        let index = self.tasks.of(&claimed)?.index.clone();
        Some(TaskRun { claimed, index, is_stale: claims.is_stale(claimed.plan.seq) })
    }

    /// Returns the samples that are kept for nobody, and whether the caller answers the task.
    fn finish(&mut self, claimed: &Claimed, mut part: Option<R>) -> (Option<R>, bool) {
        let made = if part.is_some() { Part::Rows } else { Part::Unsent };
        if let (Some(run), false) = (claimed.claim.run, claimed.is_whole())
            && let Some(LaidOut { kept, .. }) = self.tasks.of(claimed)
        {
            let run = run as usize;
            kept.resize_with(kept.len().max(run + 1), || None);
            part = std::mem::replace(&mut kept[run], part);
        }
        (part, self.claims().of(claimed).finish(claimed.claim, made))
    }

    fn lay_out(&mut self) -> bool {
        let claims = Claims::over(&self.words, self.places);
        self.tasks.lay_out(claims, 0, |_, _| Ok(Some(([0; 2], 0, Vec::new())))).is_ok_and(|runs| runs > 0)
    }
}

impl<I, R> Queues<I, R> {
    /// Lets all workers share all tasks from now on, of which `places` are under way at a time. `samples_of` returns the
    /// number of an index's samples; without it, a task is never cut.
    ///
    /// # Errors
    /// [`Error::Inherited`](crate::Error::Inherited) in a forked child.
    pub fn share_tasks(&self, places: u32, samples_of: Option<fn(&I) -> u64>) -> Result<()> {
        let mut state = self.lock()?;
        state.joint.0 = Some(ThreadTasks::new(places, u32_from(state.workers.len() as u64), samples_of));
        drop(state);
        self.has_joint.store(true, Ordering::Relaxed);
        Ok(())
    }

    /// A worker claims something of the earliest task of which something is free. It has no request of its own.
    ///
    /// # Errors
    /// [`Error::Inherited`](crate::Error::Inherited) in a forked child.
    pub fn take_run(&self, worker: u32) -> Result<Option<TaskRun<I>>> {
        if !self.has_joint.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let mut state = self.lock()?;
        Ok(state.joint.0.as_mut().and_then(|joint| joint.claim(worker)))
    }

    /// A worker has made a run, without samples where these are not for others. Returns true if it answers the task.
    ///
    /// # Errors
    /// [`Error::Inherited`](crate::Error::Inherited) in a forked child.
    pub fn finish(&self, worker: u32, run: &Claimed, part: Option<R>) -> Result<bool> {
        let mut state = self.lock()?;
        let Some(joint) = &mut state.joint.0 else { return Ok(false) };
        let (unused, is_last) = joint.finish(run, part);
        if is_last {
            joint.workers[worker as usize].collating = Some(*run);
        }
        drop(state);
        drop(unused);
        Ok(is_last)
    }

    /// Gives the worker that answers a task the samples of all runs, in their order; `None` if some are not there: made
    /// for nobody, or taken by a worker that has ended since.
    ///
    /// # Errors
    /// [`Error::Inherited`](crate::Error::Inherited) in a forked child.
    pub fn take_parts(&self, run: &Claimed) -> Result<Option<Vec<R>>> {
        let mut state = self.lock()?;
        let task = state.joint.0.as_mut().and_then(|joint| joint.tasks.of(run));
        let parts = task.map(|task| std::mem::take(&mut task.kept)).unwrap_or_default();
        drop(state);
        if parts.len() != run.plan.runs() as usize {
            return Ok(None);
        }
        Ok(parts.into_iter().collect())
    }

    /// Returns the task that each worker makes samples of; `None` where each task is one worker's.
    ///
    /// # Errors
    /// [`Error::Inherited`](crate::Error::Inherited) in a forked child.
    #[expect(clippy::type_complexity, reason = "a list")]
    pub fn all_in_hand(&self) -> Result<Option<Vec<(u32, u64, Arc<I>)>>> {
        let state = self.lock()?;
        let Some(joint) = &state.joint.0 else { return Ok(None) };
        let of = |worker| {
            let task = joint.tasks.in_hand(joint.claims(), worker)?;
            Some((worker, task.seq, task.index.clone()))
        };
        Ok(Some((0..u32_from(state.workers.len() as u64)).filter_map(of).collect()))
    }

    /// Notes the time that a sample took.
    ///
    /// # Errors
    /// [`Error::Inherited`](crate::Error::Inherited) in a forked child.
    pub fn note_time(&self, nanoseconds: u64) -> Result<()> {
        if let Some(joint) = &self.lock()?.joint.0 {
            joint.claims().note_making(nanoseconds);
        }
        Ok(())
    }

    /// Shares a task among all workers.
    pub(super) fn share(&self, seq: u64, index: I) -> Result<()> {
        let mut state = self.lock()?;
        let is_closed = state.is_closed;
        let Some(joint) = state.joint.0.as_mut().filter(|_| !is_closed) else {
            drop(state);
            return Ok(());
        };
        let samples = joint.samples_of.map_or(1, |samples_of| samples_of(&index));
        joint.tasks.add(seq, Arc::new(index), samples);
        let is_laid_out = joint.lay_out();
        drop(state);
        if is_laid_out {
            self.wake_workers();
        }
        Ok(())
    }

    pub(super) fn lose_joint(&self, worker: u32) {
        let Ok(mut state) = self.lock() else { return };
        if let Some(joint) = &mut state.joint.0 {
            joint.workers[worker as usize].collating = None;
            joint.tasks.lose(joint.claims(), worker);
        }
        drop(state);
        self.wake_workers();
    }

    pub(super) fn wake_workers(&self) {
        self.requested.iter().for_each(Condvar::notify_one);
    }

    /// As [`Transport::begin_epoch`](crate::transport::Transport::begin_epoch).
    pub(super) fn begin_joint(&self, epoch: u64) {
        let Ok(mut state) = self.lock() else { return };
        // Nobody waits for what an epoch that was given up has left.
        let stale = state
            .joint
            .0
            .as_mut()
            .map(|joint| joint.tasks.begin_epoch(Claims::over(&joint.words, joint.places), epoch));
        drop(state);
        drop(stale);
        self.wake_workers();
    }

    fn of_tasks(&self, ask: impl FnOnce(&ThreadTasks<I, R>) -> bool) -> bool {
        self.lock().is_ok_and(|state| state.joint.0.as_ref().is_some_and(ask))
    }
}

impl<I, R> Joint for Queues<I, R> {
    fn share_among(&self, workers: u32) {
        if let Ok(mut state) = self.lock()
            && let Some(joint) = &mut state.joint.0
        {
            joint.tasks.share_among(workers);
        }
    }

    fn has_claim(&self, worker: u32) -> bool {
        self.of_tasks(|joint| joint.tasks.has_claim(joint.claims(), worker))
    }

    fn is_open(&self) -> bool {
        self.of_tasks(|joint| joint.tasks.is_open(joint.claims()))
    }

    fn has_made(&self, worker: u32) -> bool {
        self.of_tasks(|joint| joint.tasks.has_made(worker))
    }
}
