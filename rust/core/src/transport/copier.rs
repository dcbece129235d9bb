//! Copies bytes of batches to memory elsewhere, on a thread of its own.
//!
//! Either the thread does a job or the caller that needs it done, whichever comes first. INVARIANT: exactly one of them
//! takes a job's work out of its place, and nothing reads or writes through its pointers after the job is over.

pub mod streaming;

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::process::{self, Process};
use crate::sync::{AtomicU32, AtomicU64, Awaited, Lock, Ordering};
use crate::transport::received::Backing;

/// Bytes of a batch, and where a copy of them belongs.
#[derive(Debug)]
pub struct CopyPart {
    from: *const u8,
    into: *mut u8,
    len: usize,
}

// SAFETY: plain addresses; who makes one promises that they may be read and written from any thread.
unsafe impl Send for CopyPart {}

impl CopyPart {
    /// `len` bytes at `from`, to be copied to `into`.
    ///
    /// # Safety
    /// Until the job that has this part is over, `from` may be read and `into` written for `len` bytes, by any thread,
    /// and no one else writes there.
    #[must_use]
    pub const unsafe fn new(from: *const u8, into: *mut u8, len: usize) -> Self {
        Self { from, into, len }
    }

    /// Copies at once, as fits a small part that this core has at hand.
    pub fn copy_now(&self) {
        // SAFETY: the promise of `new`; memory of a batch and memory elsewhere do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(self.from, self.into, self.len) };
    }

    fn copy(&self) {
        // SAFETY: the promise of `new`; memory of a batch and memory elsewhere do not overlap.
        unsafe { streaming::copy(self.from, self.into, self.len) };
    }
}

/// The parts to copy, and the owner that keeps the bytes meanwhile.
#[derive(Debug)]
struct Work {
    parts: Vec<CopyPart>,
    /// Dropped when they are copied: then the slot goes back.
    _backing: Arc<Backing>,
}

/// A job: [`finish`](Self::finish) it before its memory is used. Dropped, it is over too, done or not.
///
/// In a forked child a job of its parent is never touched.
#[derive(Debug)]
pub struct CopyJob {
    shared: Arc<SharedJob>,
    process: &'static Process,
}

#[derive(Debug)]
struct SharedJob {
    state: Lock<JobState>,
    over: Condvar,
}

#[derive(Debug)]
enum JobState {
    Waiting(Work),
    Running,
    Over,
}

impl SharedJob {
    /// Does the work if it still waits. Returns the state after it.
    fn run(&self) -> MutexGuard<'_, JobState> {
        let mut state = self.state.lock();
        if matches!(*state, JobState::Waiting(_))
            && let JobState::Waiting(work) = std::mem::replace(&mut *state, JobState::Running)
        {
            drop(state);
            for part in &work.parts {
                part.copy();
            }
            drop(work);
            state = self.state.lock();
            *state = JobState::Over;
            self.over.notify_all();
        }
        state
    }
}

impl CopyJob {
    /// Returns true if everything is copied.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.process.is_current() && matches!(*self.shared.state.lock(), JobState::Over)
    }

    /// Returns once everything is copied: copies it here, if the thread has not begun.
    pub fn finish(&self) {
        if !self.process.is_current() {
            return;
        }
        let mut state = self.shared.run();
        while matches!(*state, JobState::Running) {
            state = self.shared.over.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Drop for CopyJob {
    fn drop(&mut self) {
        if !self.process.is_current() {
            // The job's lock may never be released here, and what the job keeps is the parent's.
            std::mem::forget(self.shared.clone());
            return;
        }
        let mut state = self.shared.state.lock();
        while matches!(*state, JobState::Running) {
            state = self.shared.over.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        let work = std::mem::replace(&mut *state, JobState::Over);
        drop(state);
        drop(work);
    }
}

/// Runs jobs on a thread, which ends when this is dropped.
#[derive(Debug)]
pub struct Copier {
    queue: Arc<Queue>,
    thread: Option<JoinHandle<()>>,
    process: &'static Process,
}

#[derive(Debug, Default)]
struct Queue {
    jobs: Lock<Jobs>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Jobs {
    waiting: VecDeque<Arc<SharedJob>>,
    closed: bool,
}

impl Copier {
    /// Makes a copier with a thread. If no thread can start, callers copy when they [`finish`](CopyJob::finish) a job.
    #[must_use]
    pub fn new() -> Self {
        let queue = Arc::new(Queue::default());
        let own = queue.clone();
        let thread =
            std::thread::Builder::new().name("ringloader-copy".into()).spawn(move || own.serve()).ok();
        Self { queue, thread, process: process::current() }
    }

    /// Begins to copy. `backing` keeps what the parts read until they are copied.
    #[must_use]
    pub fn copy(&self, parts: Vec<CopyPart>, backing: Arc<Backing>) -> CopyJob {
        let state = Lock::new(JobState::Waiting(Work { parts, _backing: backing }));
        let shared = Arc::new(SharedJob { state, over: Condvar::new() });
        if self.thread.is_some() && self.process.is_current() {
            self.queue.jobs.lock().waiting.push_back(shared.clone());
            self.queue.changed.notify_one();
        }
        CopyJob { shared, process: process::current() }
    }
}

impl Drop for Copier {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        if !self.process.is_current() {
            // The parent has the thread, and may have had the lock at the fork.
            std::mem::forget((self.queue.clone(), thread));
            return;
        }
        self.queue.jobs.lock().closed = true;
        self.queue.changed.notify_one();
        // The thread ends after the copy that it is at.
        let _ = thread.join();
    }
}

impl Queue {
    fn serve(&self) {
        loop {
            let mut jobs = self.jobs.lock();
            let job = loop {
                if jobs.closed {
                    return;
                }
                match jobs.waiting.pop_front() {
                    Some(job) => break job,
                    None => jobs = self.changed.wait(jobs).unwrap_or_else(PoisonError::into_inner),
                }
            };
            drop(jobs);
            let pid = std::process::id();
            if !RUNNING.enter(pid, || STOPPED.load(Ordering::Relaxed) == pid) {
                return;
            }
            drop(job.run());
            RUNNING.leave(pid);
        }
    }
}

/// The threads that copy at this moment.
static RUNNING: Awaited = Awaited::over(AtomicU64::new(0));
/// The process in which no thread begins to copy any more.
static STOPPED: AtomicU32 = AtomicU32::new(0);

/// Returns once no thread copies, and none will begin to: the memory that is written to goes with the process.
pub fn stop_copies() {
    let pid = std::process::id();
    STOPPED.store(pid, Ordering::Relaxed);
    while RUNNING.count(pid) > 0 {
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[cfg(test)]
mod tests;
