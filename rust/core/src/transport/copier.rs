//! Copies bytes of batches to memory elsewhere, on a thread of its own.
//!
//! Either the thread does a job or the caller that needs it done, whichever comes first. INVARIANT: exactly one of them
//! takes a job's work out of its place, with the job's lock until it is done; nothing reads or writes through its
//! pointers after that.

pub mod streaming;

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
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

/// The work, until it is done. It is done under the lock: who has the lock and finds none knows that it is over.
#[derive(Debug)]
struct SharedJob(Lock<Option<Work>>);

impl SharedJob {
    /// Returns once the work is done: does it, or waits for the thread that does.
    fn run(&self) {
        let mut waiting = self.0.lock();
        if let Some(work) = waiting.take() {
            work.parts.iter().for_each(CopyPart::copy);
        }
    }
}

impl CopyJob {
    /// Returns true if everything is copied.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.process.is_current() && self.shared.0.try_lock().is_some_and(|work| work.is_none())
    }

    /// Returns once everything is copied: copies it here, if the thread has not begun.
    pub fn finish(&self) {
        if self.process.is_current() {
            self.shared.run();
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
        let work = self.shared.0.lock().take();
        drop(work);
    }
}

/// Runs jobs on a thread, which ends when this is dropped.
#[derive(Debug)]
pub struct Copier {
    /// `None` if no thread could start.
    thread: Option<(Sender<Arc<SharedJob>>, JoinHandle<()>)>,
    process: &'static Process,
}

impl Copier {
    /// Makes a copier with a thread. If no thread can start, callers copy when they [`finish`](CopyJob::finish) a job.
    #[must_use]
    pub fn new() -> Self {
        let (jobs, own) = channel();
        let thread = std::thread::Builder::new().name("ringloader-copy".into()).spawn(move || serve(&own));
        Self { thread: thread.ok().map(|thread| (jobs, thread)), process: process::current() }
    }

    /// Begins to copy. `backing` keeps what the parts read until they are copied.
    #[must_use]
    pub fn copy(&self, parts: Vec<CopyPart>, backing: Arc<Backing>) -> CopyJob {
        let shared = Arc::new(SharedJob(Lock::new(Some(Work { parts, _backing: backing }))));
        if let Some((jobs, _)) = self.thread.as_ref().filter(|_| self.process.is_current()) {
            // The thread takes none once the process has stopped copying.
            let _ = jobs.send(shared.clone());
        }
        CopyJob { shared, process: process::current() }
    }
}

impl Drop for Copier {
    fn drop(&mut self) {
        let Some((jobs, thread)) = self.thread.take() else { return };
        if !self.process.is_current() {
            // The parent has the thread, which may have had a lock of the channel at the fork.
            std::mem::forget((jobs, thread));
            return;
        }
        // The thread ends after the jobs that wait.
        drop(jobs);
        let _ = thread.join();
    }
}

fn serve(jobs: &Receiver<Arc<SharedJob>>) {
    let pid = std::process::id();
    while let Ok(job) = jobs.recv()
        && RUNNING.enter(pid, || STOPPED.load(Ordering::Relaxed) == pid)
    {
        job.run();
        RUNNING.leave(pid);
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
