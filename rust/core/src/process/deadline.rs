//! The end of this process when a piece of its work takes too long, whatever the process does then: native code that
//! holds the interpreter lock, an endless loop.
//!
//! A thread counts ticks, not time: a process that is stopped, and a machine that sleeps, have none. A forked child has
//! no such thread, and so no deadline.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use rustix::process::{Signal, getpid, kill_process};

use crate::error::{Error, Result};
use crate::sync::{AtomicBool, AtomicU64, Ordering};

/// Ticks that one piece of work may take.
const TICKS: u32 = 16;

/// Kills this process when one piece of work takes longer than a limit.
#[derive(Debug)]
pub struct Deadline {
    work: Arc<Work>,
    thread: Thread,
}

#[derive(Debug, Default)]
struct Work {
    /// Counts beginnings and ends: odd while a piece of work is under way.
    // ORDERING: Relaxed, here and for `is_over`: nothing else is read by them.
    count: AtomicU64,
    is_over: AtomicBool,
}

impl Deadline {
    /// Begins to watch. Before the process is killed, the number 1 is written at `offset` of `file`, as a word.
    ///
    /// # Errors
    /// [`Error::Os`] when no thread can start.
    pub fn new(file: OwnedFd, offset: u64, limit: Duration) -> Result<Self> {
        Self::with(limit, move || {
            // A file that cannot be written leaves the death without its reason.
            _ = rustix::io::pwrite(&file, &1u64.to_ne_bytes(), offset);
            _ = kill_process(getpid(), Signal::KILL);
        })
    }

    fn with(limit: Duration, exceeded: impl FnOnce() + Send + 'static) -> Result<Self> {
        let work = Arc::new(Work::default());
        let watched = Arc::clone(&work);
        let thread = thread::Builder::new()
            .name("ringloader-limit".into())
            .spawn(move || {
                if watched.is_exceeded(limit / TICKS) {
                    exceeded();
                }
            })
            .map_err(|error| Error::io("thread", &error))?;
        Ok(Self { work, thread: thread.thread().clone() })
    }

    /// A piece of work begins.
    pub fn begin(&self) {
        self.work.count.fetch_add(1, Ordering::Relaxed);
    }

    /// The piece of work that began last is done.
    pub fn end(&self) {
        self.work.count.fetch_add(1, Ordering::Relaxed);
    }
}

impl Drop for Deadline {
    fn drop(&mut self) {
        self.work.is_over.store(true, Ordering::Relaxed);
        // In a forked child there is nobody to wake.
        self.thread.unpark();
    }
}

impl Work {
    /// Waits until a piece of work has gone on for all ticks. False: nothing is watched any more.
    fn is_exceeded(&self, tick: Duration) -> bool {
        let (mut seen, mut ticks) = (0, 0);
        while !self.is_over.load(Ordering::Relaxed) {
            let begun = Instant::now();
            thread::park_timeout(tick);
            if begun.elapsed() < tick {
                continue;
            }
            let count = self.count.load(Ordering::Relaxed);
            if count.is_multiple_of(2) || count != seen {
                (seen, ticks) = (count, 0);
                continue;
            }
            ticks += 1;
            if ticks == TICKS {
                return true;
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{RecvTimeoutError, channel};

    use super::*;

    const LIMIT: Duration = Duration::from_millis(160);

    fn watched() -> (Deadline, std::sync::mpsc::Receiver<Instant>) {
        let (told, exceeded) = channel();
        let deadline = Deadline::with(LIMIT, move || told.send(Instant::now()).unwrap()).unwrap();
        (deadline, exceeded)
    }

    #[test]
    fn work_that_takes_too_long_is_told_after_the_limit() {
        let (deadline, exceeded) = watched();
        let begun = Instant::now();
        deadline.begin();
        assert!(exceeded.recv().unwrap() - begun >= LIMIT);
    }

    #[test]
    fn short_pieces_of_work_may_go_on_for_ever() {
        let (deadline, exceeded) = watched();
        for _ in 0..60 {
            deadline.begin();
            thread::sleep(LIMIT / 20);
            deadline.end();
        }
        assert_eq!(exceeded.try_recv(), Err(std::sync::mpsc::TryRecvError::Empty));
        deadline.begin();
        exceeded.recv().unwrap();
    }

    #[test]
    fn no_work_has_no_limit() {
        let (deadline, exceeded) = watched();
        deadline.begin();
        deadline.end();
        assert_eq!(exceeded.recv_timeout(LIMIT * 3), Err(RecvTimeoutError::Timeout));
    }

    #[test]
    fn one_that_was_dropped_tells_nothing() {
        let (deadline, exceeded) = watched();
        deadline.begin();
        drop(deadline);
        assert_eq!(exceeded.recv(), Err(std::sync::mpsc::RecvError));
    }
}
