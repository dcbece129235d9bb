//! A transport between threads of one process: queues of what they hand to each other. Nothing is copied.
//!
//! If workers share tasks, a worker is told of another epoch by [`Request::Epoch`]. It takes that request, and
//! then tasks of the epoch, once all tasks before have their replies, or nobody wants them any more. Tasks are claimed as
//! between processes ([`joint`](crate::joint)), and samples stay where they are.
//!
//! INVARIANT: no value is dropped while the lock is held, for the end of one may run any code.

mod joint;
mod state;
mod transport;

use std::collections::VecDeque;
use std::mem::take;
use std::sync::{Condvar, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

pub use self::joint::TaskRun;

use self::joint::JointTasks;
use self::state::{QueueState, Worker};
use super::message::ResultKind;
use crate::error::{Error, Result};
use crate::process::{self, Process};
use crate::sync::{AtomicBool, Lock};

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
    state: Lock<QueueState<I, R>>,
    /// Spares others a look under the lock.
    has_joint: AtomicBool,
    /// For each worker, says that it has a request, or that all is closed.
    requested: Box<[Condvar]>,
    /// Says that there is something that the parent waits for.
    replied: Condvar,
    /// The process that made it. Another has none of its threads, and one of them may have had the lock at the fork.
    process: &'static Process,
}

/// The contents of the queues when they were closed.
#[derive(Debug)]
pub struct Remains<I, R> {
    _requests: Vec<VecDeque<Request<I>>>,
    _replies: Vec<VecDeque<Reply<R>>>,
    _tasks: JointTasks<I, R>,
}

impl<I, R> Queues<I, R> {
    /// For `workers` workers.
    #[must_use]
    pub fn new(workers: u32) -> Self {
        Self {
            state: Lock::new(QueueState::new(workers)),
            has_joint: AtomicBool::new(false),
            requested: (0..workers).map(|_| Condvar::new()).collect(),
            replied: Condvar::new(),
            process: process::current(),
        }
    }

    fn lock(&self) -> Result<MutexGuard<'_, QueueState<I, R>>> {
        if !self.process.is_current() {
            return Err(Error::Inherited { owner: self.process.pid() });
        }
        Ok(self.state.lock())
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
        while state.request_for(worker).is_none() && !state.joint.is_open_for(worker) && !state.is_closed {
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
        let request = state.workers[worker as usize].requests.remove(first);
        if let Some(Request::Epoch { number, .. }) = &request {
            state.joint.enter(worker, *number);
        }
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
        sender.replies.push_back(reply);
        // Others may wait for it to begin an epoch.
        let is_last = kind == ResultKind::Batch && state.joint.note_sent(worker, seq);
        let may_begin = is_last && state.workers.iter().any(|worker| !worker.requests.is_empty());
        self.notify_of(worker, state);
        if may_begin {
            self.wake_workers();
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
        state.joint.enter(worker, epoch);
        // The one before may have been told of an epoch that it never began.
        let left = take(&mut state.workers[worker as usize].requests);
        drop(state);
        drop(left);
        Ok(())
    }

    fn notify_of(&self, worker: u32, state: MutexGuard<'_, QueueState<I, R>>) {
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
        let remains = Remains {
            _requests: state.workers.iter_mut().map(|worker| take(&mut worker.requests)).collect(),
            _replies: state.workers.iter_mut().map(|worker| take(&mut worker.replies)).collect(),
            _tasks: take(&mut state.joint),
        };
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

    /// Replies that have come, and batches that were sent in this epoch. A worker may be in the next one.
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
