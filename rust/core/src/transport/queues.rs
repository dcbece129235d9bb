//! A transport between threads of one process: queues of what they hand to each other. Nothing is copied.
//!
//! If workers share tasks, a worker is told of another epoch by [`Request::Epoch`]. It takes that request, and
//! then tasks of the epoch, once all tasks before have their replies, or nobody wants them any more.
//!
//! INVARIANT: no value is dropped while the lock is held, for the end of one may run any code.

use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::interface::Transport;
use super::message::ResultKind;
use super::task_number::{epoch_of, is_before};
use crate::error::{Error, Result};
use crate::joint::{self, Cost};
use crate::process::{self, Process};
use crate::sync::{Arc, AtomicBool, Ordering};

/// A request to a worker.
#[derive(Debug)]
pub enum Request<I> {
    /// torch's final signal.
    End,
    /// A task.
    Task {
        /// The number of the task.
        seq: u64,
        /// The index that the task asks for.
        index: I,
    },
    /// Another message of torch's protocol.
    Object(I),
    /// The message that begins an epoch, where all workers share all tasks.
    Epoch {
        /// The number of the epoch in those of its tasks.
        number: u64,
        /// The message.
        message: I,
    },
}

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
    /// True once they were taken, to be collated.
    are_taken: bool,
}

/// A run of a task's samples, which one worker makes.
#[derive(Debug)]
pub struct TaskRun<I, R> {
    /// The task.
    pub task: Arc<SharedTask<I, R>>,
    run: u64,
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
        drop(parts);
        drop(before);
        is_last
    }
}

impl<I, R> SharedTask<I, R> {
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
        let mut parts = self.lock();
        parts.are_taken = true;
        parts.by_run.iter_mut().filter_map(Option::take).collect()
    }

    /// Returns the runs to make again when the worker of `run` has ended. One that was collating has taken
    /// what the others had made.
    fn lost_with(&self, run: u64) -> Range<u64> {
        if std::mem::take(&mut self.lock().are_taken) { 0..self.runs() } else { run..run + 1 }
    }

    fn lock(&self) -> MutexGuard<'_, Parts<R>> {
        self.parts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What workers share, and how it is cut.
#[derive(Debug)]
struct Sharing<I, R> {
    /// Runs that no worker has taken, in the order of their tasks.
    runs: VecDeque<TaskRun<I, R>>,
    /// Tasks that have no reply.
    unanswered: BTreeSet<u64>,
    /// Returns the number of an index's samples; `None`: a task is never cut.
    samples_of: Option<fn(&I) -> u64>,
    /// The number of workers that make the tasks: the first ones.
    sharers: u32,
    /// The task that was sent last.
    newest: u64,
    /// The time that a sample takes; 0: not known.
    nanoseconds: u64,
}

/// A reply of a worker.
#[derive(Debug)]
pub struct Reply<R> {
    /// The task that the reply answers; 0 where there is none.
    pub seq: u64,
    /// The kind of the result.
    pub kind: ResultKind,
    /// The content of the reply.
    pub content: R,
}

/// Both ends: `I` goes to the workers, `R` comes back.
#[derive(Debug)]
pub struct Queues<I, R> {
    state: Mutex<State<I, R>>,
    /// True once all workers share all tasks. Spares others a look under the lock.
    shares: AtomicBool,
    /// For each worker, says that it has a request, or that all is closed.
    requested: Box<[Condvar]>,
    /// Says that there is something that the parent waits for.
    replied: Condvar,
    /// The process that made it. Another has none of its threads, and one of them may have had the lock at the fork.
    process: &'static Process,
}

#[derive(Debug)]
struct Worker<I, R> {
    requests: VecDeque<Request<I>>,
    /// The run that it took last, until it answers the task, or looks for another.
    in_hand: Option<TaskRun<I, R>>,
    /// True if it has taken a run since it is one of those that make tasks.
    has_made: bool,
    replies: VecDeque<Reply<R>>,
    /// Epochs that it has begun after its first one, and the batches that it has made in the last even one and the last
    /// odd one.
    epoch: u64,
    batches: [u64; 2],
    /// The epoch of the tasks that it may take, and of those before.
    entered: u64,
}

#[derive(Debug)]
struct State<I, R> {
    workers: Vec<Worker<I, R>>,
    /// `None` where each task is one worker's.
    sharing: Option<Sharing<I, R>>,
    /// The epoch of which batches are counted.
    epoch: u64,
    ended: VecDeque<u32>,
    /// The worker at which the next look at all begins.
    turn: usize,
    is_done: bool,
    is_woken: bool,
    is_closed: bool,
    /// The number of threads that wait for replies. If it is one thread, `only` names the worker that it waits for, if
    /// any.
    waiting: u32,
    only: Option<u32>,
}

/// The contents of the queues when they were closed.
#[derive(Debug)]
pub struct Remains<I, R> {
    _workers: Vec<Worker<I, R>>,
    _sharing: Option<Sharing<I, R>>,
}

impl<I, R> State<I, R> {
    fn is_there(&self, only: Option<u32>) -> bool {
        let has_replies = |worker: &Worker<I, R>| !worker.replies.is_empty();
        self.is_woken
            || self.is_closed
            || !self.ended.is_empty()
            || match only {
                Some(worker) => has_replies(&self.workers[worker as usize]),
                None => self.workers.iter().any(has_replies),
            }
    }

    fn is_run_for(&self, worker: u32) -> bool {
        let entered = self.workers[worker as usize].entered;
        let first = self.sharing.as_ref().and_then(|sharing| sharing.runs.front());
        first.is_some_and(|run| !is_before(entered, epoch_of(run.task.seq)))
    }

    /// The place of the first request that a worker may take: one that begins an epoch has to wait.
    fn request_for(&self, worker: u32) -> Option<usize> {
        let unanswered = self.sharing.as_ref().map(|sharing| &sharing.unanswered);
        self.workers[worker as usize].requests.iter().position(|request| match request {
            Request::Epoch { number, .. } => {
                unanswered.is_none_or(|all| all.iter().all(|&seq| !is_before(epoch_of(seq), *number)))
            }
            _ => true,
        })
    }

    /// Returns true if a thread that waits may be glad of news of `worker`.
    fn is_awaited(&self, worker: u32) -> bool {
        self.waiting > 1 || self.waiting == 1 && self.only.is_none_or(|only| only == worker)
    }
}

impl<I, R> Queues<I, R> {
    /// For `workers` workers.
    #[must_use]
    pub fn new(workers: u32) -> Self {
        let worker = |_| Worker {
            requests: VecDeque::new(),
            in_hand: None,
            has_made: false,
            replies: VecDeque::new(),
            epoch: 0,
            batches: [0; 2],
            entered: 0,
        };
        let state = State {
            workers: (0..workers).map(worker).collect(),
            sharing: None,
            epoch: 0,
            ended: VecDeque::new(),
            turn: 0,
            is_done: false,
            is_woken: false,
            is_closed: false,
            waiting: 0,
            only: None,
        };
        Self {
            state: Mutex::new(state),
            shares: AtomicBool::new(false),
            requested: (0..workers).map(|_| Condvar::new()).collect(),
            replied: Condvar::new(),
            process: process::current(),
        }
    }

    /// Lets all workers share all tasks from now on. `samples_of` returns the number of an index's samples; without it,
    /// a task is never cut.
    ///
    /// # Errors
    /// [`Error::Inherited`] in a forked child.
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
    /// [`Error::Inherited`] in a forked child.
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
    /// [`Error::Inherited`] in a forked child.
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
    /// [`Error::Inherited`] in a forked child.
    pub fn note_time(&self, nanoseconds: u64) -> Result<()> {
        if let Some(sharing) = &mut self.lock()?.sharing {
            sharing.nanoseconds = joint::mean(sharing.nanoseconds, nanoseconds);
        }
        Ok(())
    }

    /// Shares a task among all workers.
    fn share(&self, seq: u64, index: I) -> Result<()> {
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
        let parts = Mutex::new(Parts { by_run: Vec::new(), are_taken: false });
        let task = SharedTask { seq, index, samples, per_run, parts };
        let runs = task.runs();
        task.lock().by_run.resize_with(runs as usize, || None);
        let task = Arc::new(task);
        sharing.runs.extend((0..runs).map(|run| TaskRun { task: task.clone(), run }));
        sharing.unanswered.insert(seq);
        drop(state);
        self.requested.iter().for_each(Condvar::notify_one);
        Ok(())
    }

    fn lock(&self) -> Result<MutexGuard<'_, State<I, R>>> {
        if !self.process.is_current() {
            return Err(Error::Inherited { owner: self.process.pid() });
        }
        Ok(self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Sends a worker something. After [`close`](Self::close) it is dropped.
    ///
    /// # Errors
    /// [`Error::Inherited`] in a forked child.
    pub fn put(&self, worker: u32, request: Request<I>) -> Result<()> {
        let mut state = self.lock()?;
        if state.is_closed {
            drop(state);
            return Ok(());
        }
        state.workers[worker as usize].requests.push_back(request);
        drop(state);
        self.requested[worker as usize].notify_one();
        Ok(())
    }

    /// Waits, no longer than `limit`, until a worker has a request, or all is closed.
    ///
    /// # Errors
    /// [`Error::Inherited`] in a forked child.
    pub fn wait_for_request(&self, worker: u32, limit: Duration) -> Result<()> {
        let deadline = Instant::now().checked_add(limit);
        let mut state = self.lock()?;
        while state.request_for(worker).is_none() && !state.is_run_for(worker) && !state.is_closed {
            let Some(left) = left(deadline) else { break };
            let wait = self.requested[worker as usize].wait_timeout(state, left);
            state = wait.unwrap_or_else(PoisonError::into_inner).0;
        }
        Ok(())
    }

    /// A worker takes its next request. After [`close`](Self::close) that is the end.
    ///
    /// # Errors
    /// [`Error::Inherited`] in a forked child.
    pub fn take_request(&self, worker: u32) -> Result<Option<Request<I>>> {
        let mut state = self.lock()?;
        if state.is_closed {
            return Ok(Some(Request::End));
        }
        let Some(first) = state.request_for(worker) else { return Ok(None) };
        let taker = &mut state.workers[worker as usize];
        let request = taker.requests.remove(first);
        if let Some(Request::Epoch { number, .. }) = &request {
            taker.entered = *number;
        }
        // The worker has made its last run, and answered all its tasks.
        let made = matches!(request, Some(Request::End)).then(|| taker.in_hand.take());
        drop(state);
        drop(made);
        Ok(request)
    }

    /// A worker sends something, which is counted if it is a batch. Any object begins the worker's next epoch. After
    /// [`close`](Self::close) it is given back.
    ///
    /// # Errors
    /// [`Error::Inherited`] in a forked child.
    pub fn reply(&self, worker: u32, reply: Reply<R>, is_batch: bool) -> Result<Option<Reply<R>>> {
        let mut state = self.lock()?;
        if state.is_closed {
            return Ok(Some(reply));
        }
        let sender = &mut state.workers[worker as usize];
        if reply.kind == ResultKind::Object {
            sender.epoch += 1;
            sender.batches[(sender.epoch % 2) as usize] = 0;
        }
        sender.batches[(sender.epoch % 2) as usize] += u64::from(is_batch);
        let (kind, seq) = (reply.kind, reply.seq);
        let answered = sender.in_hand.take_if(|run| run.task.seq == seq);
        sender.replies.push_back(reply);
        let was_awaited = kind == ResultKind::Batch
            && state.sharing.as_mut().is_some_and(|sharing| sharing.unanswered.remove(&seq));
        // Others may wait for it to begin an epoch.
        let may_begin = was_awaited && state.workers.iter().any(|worker| !worker.requests.is_empty());
        self.notify_of(worker, state);
        drop(answered);
        if may_begin {
            self.requested.iter().for_each(Condvar::notify_one);
        }
        Ok(None)
    }

    /// A worker has ended.
    ///
    /// # Errors
    /// [`Error::Inherited`] in a forked child.
    pub fn record_end(&self, worker: u32) -> Result<()> {
        let mut state = self.lock()?;
        state.ended.push_back(worker);
        // Wakes also a thread that waits for another worker's reply: it may have to be told of this at once.
        let is_awaited = state.waiting > 0;
        drop(state);
        if is_awaited {
            self.replied.notify_all();
        }
        Ok(())
    }

    /// Another thread is to run as `worker`, which has ended and owed nothing: its end is no news any more. It
    /// begins with this epoch, in the numbers of its tasks.
    ///
    /// # Errors
    /// [`Error::Inherited`] in a forked child.
    pub fn begin_worker(&self, worker: u32, epoch: u64) -> Result<()> {
        let mut state = self.lock()?;
        state.ended.retain(|&ended| ended != worker);
        let begun = &mut state.workers[worker as usize];
        begun.entered = epoch;
        // The one before may have been told of an epoch that it never began.
        let left = std::mem::take(&mut begun.requests);
        drop(state);
        drop(left);
        Ok(())
    }

    fn notify_of(&self, worker: u32, state: MutexGuard<'_, State<I, R>>) {
        let is_awaited = state.is_awaited(worker);
        drop(state);
        if is_awaited {
            self.replied.notify_all();
        }
    }

    /// Waits, no longer than `limit`, for a reply of any worker or of `only` one, for the end of any worker, and for
    /// [`wake`](Self::wake) and [`close`](Self::close).
    ///
    /// # Errors
    /// [`Error::Inherited`] in a forked child.
    pub fn wait_for(&self, only: Option<u32>, limit: Duration) -> Result<()> {
        let deadline = Instant::now().checked_add(limit);
        let mut state = self.lock()?;
        state.waiting += 1;
        while !state.is_there(only) {
            let Some(left) = left(deadline) else { break };
            state.only = only;
            state = self.replied.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        state.waiting -= 1;
        state.only = None;
        Ok(())
    }

    /// Ends the wait of one thread that is in [`wait_for`](Self::wait_for), or comes there next.
    ///
    /// # Errors
    /// [`Error::Inherited`] in a forked child.
    pub fn wake(&self) -> Result<()> {
        self.lock()?.is_woken = true;
        self.replied.notify_all();
        Ok(())
    }

    /// Returns true if [`wake`](Self::wake) was called since the last call of this.
    ///
    /// # Errors
    /// [`Error::Inherited`] in a forked child.
    pub fn take_wake(&self) -> Result<bool> {
        Ok(std::mem::take(&mut self.lock()?.is_woken))
    }

    /// Nothing more is wanted: each worker ends when it looks next.
    ///
    /// # Errors
    /// [`Error::Inherited`] in a forked child.
    pub fn set_done(&self) -> Result<()> {
        self.lock()?.is_done = true;
        Ok(())
    }

    /// Returns true if [`set_done`](Self::set_done) was called.
    ///
    /// # Errors
    /// [`Error::Inherited`] in a forked child.
    pub fn is_done(&self) -> Result<bool> {
        Ok(self.lock()?.is_done)
    }

    /// Ends every wait, and gives back what was in the queues, for the caller to drop.
    ///
    /// # Errors
    /// [`Error::Inherited`] in a forked child.
    pub fn close(&self) -> Result<Remains<I, R>> {
        let mut state = self.lock()?;
        state.is_done = true;
        state.is_closed = true;
        let runs = state.sharing.take();
        let take = |worker: &mut Worker<I, R>| Worker {
            requests: std::mem::take(&mut worker.requests),
            in_hand: worker.in_hand.take(),
            has_made: worker.has_made,
            replies: std::mem::take(&mut worker.replies),
            epoch: worker.epoch,
            batches: worker.batches,
            entered: worker.entered,
        };
        let remains = Remains { _workers: state.workers.iter_mut().map(take).collect(), _sharing: runs };
        drop(state);
        self.requested.iter().for_each(Condvar::notify_all);
        self.replied.notify_all();
        Ok(remains)
    }

    /// Counts the batches of another epoch from now on, which each worker begins in its turn.
    ///
    /// # Errors
    /// [`Error::Inherited`] in a forked child.
    pub fn begin_epoch(&self) -> Result<()> {
        self.lock()?.epoch += 1;
        Ok(())
    }

    /// Replies that are there, and batches that were sent in this epoch. A worker may be in the next one.
    ///
    /// # Errors
    /// [`Error::Inherited`] in a forked child.
    pub fn counts(&self) -> Result<(u64, u64)> {
        let state = self.lock()?;
        let there = state.workers.iter().map(|worker| worker.replies.len() as u64).sum();
        let has_counts = |worker: &&Worker<I, R>| worker.epoch.wrapping_sub(state.epoch) <= 1;
        let at = (state.epoch % 2) as usize;
        Ok((there, state.workers.iter().filter(has_counts).map(|worker| worker.batches[at]).sum()))
    }
}

/// Returns the time until `deadline`, if some is left. At most so long that a `Condvar` can wait for it.
fn left(deadline: Option<Instant>) -> Option<Duration> {
    const LONG: Duration = Duration::from_secs(1 << 20);
    let Some(deadline) = deadline else { return Some(LONG) };
    let left = deadline.saturating_duration_since(Instant::now());
    (!left.is_zero()).then(|| left.min(LONG))
}

impl<I, R> Transport for Queues<I, R> {
    type Index = I;
    type Received = Reply<R>;

    fn answered(reply: &Reply<R>) -> (u64, ResultKind) {
        (reply.seq, reply.kind)
    }

    fn put_task(&self, worker: u32, seq: u64, index: I) -> Result<()> {
        if self.shares.load(Ordering::Relaxed) {
            return self.share(seq, index);
        }
        self.put(worker, Request::Task { seq, index })
    }

    fn try_next(&self) -> Result<Option<Reply<R>>> {
        let state = &mut *self.lock()?;
        let count = state.workers.len();
        let from = state.turn;
        for at in (from..from + count).map(|at| at % count) {
            if let Some(reply) = state.workers[at].replies.pop_front() {
                state.turn = at + 1;
                return Ok(Some(reply));
            }
        }
        Ok(None)
    }

    fn try_next_of(&self, worker: u32) -> Result<Option<Reply<R>>> {
        Ok(self.lock()?.workers[worker as usize].replies.pop_front())
    }

    fn peek_of(&self, worker: u32) -> Result<Option<(u64, ResultKind)>> {
        Ok(self.lock()?.workers[worker as usize].replies.front().map(Self::answered))
    }

    fn begin_epoch(&self, epoch: u64) {
        if !self.shares.load(Ordering::Relaxed) {
            return;
        }
        let Ok(mut state) = self.lock() else { return };
        let mut stale = VecDeque::new();
        if let Some(sharing) = &mut state.sharing {
            // Nobody waits for what an epoch that was given up has left.
            sharing.unanswered.retain(|&seq| !is_before(epoch_of(seq), epoch));
            (stale, sharing.runs) = std::mem::take(&mut sharing.runs)
                .into_iter()
                .partition(|run| is_before(epoch_of(run.task.seq), epoch));
        }
        drop(state);
        drop(stale);
        self.requested.iter().for_each(Condvar::notify_one);
    }

    fn there_of(&self, worker: u32) -> Result<u64> {
        Ok(self.lock()?.workers[worker as usize].replies.len() as u64)
    }

    fn take_ended(&self) -> Option<u32> {
        self.lock().ok()?.ended.pop_front()
    }

    fn lose(&self, worker: u32) {
        let Ok(mut state) = self.lock() else { return };
        let lost = state.workers[worker as usize].in_hand.take();
        if let (Some(sharing), Some(run)) = (&mut state.sharing, &lost) {
            for lost in run.task.lost_with(run.run).rev() {
                sharing.runs.push_front(TaskRun { task: run.task.clone(), run: lost });
            }
        }
        drop(state);
        drop(lost);
        self.requested.iter().for_each(Condvar::notify_one);
    }

    fn share_among(&self, workers: u32) {
        let Ok(mut state) = self.lock() else { return };
        let Some(sharing) = &mut state.sharing else { return };
        let before = std::mem::replace(&mut sharing.sharers, workers).min(workers);
        state.workers[before as usize..].iter_mut().for_each(|worker| worker.has_made = false);
    }

    fn has_claim(&self, worker: u32) -> bool {
        self.lock().is_ok_and(|state| state.workers[worker as usize].in_hand.is_some())
    }

    fn is_open(&self) -> bool {
        let is_open =
            |sharing: &Sharing<I, R>| sharing.runs.front().is_some_and(|run| run.task.seq != sharing.newest);
        self.lock().is_ok_and(|state| state.sharing.as_ref().is_some_and(is_open))
    }

    fn has_made(&self, worker: u32) -> bool {
        self.lock().is_ok_and(|state| state.workers[worker as usize].has_made)
    }
}
