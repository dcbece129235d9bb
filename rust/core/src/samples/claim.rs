//! Claims of samples: one thread of one process makes a sample.

use std::cell::Cell;
use std::collections::HashSet;
use std::sync::MutexGuard;

use super::Samples;
use crate::process::{self, Leaked, Process};
use crate::sync::Lock;

/// A file of samples, and an index.
type Key = ((u64, u64), usize);

/// The samples that threads of a process are making, and which thread adds to a file. Processes exclude each other by
/// locks, which all threads of a process have.
///
/// INVARIANT: a thread of another process is never waited for. A forked child finds its parent's set, which a thread may
/// have locked at the fork, and moves to one of its own.
#[derive(Debug)]
pub(super) struct Making {
    process: &'static Process,
    keys: Lock<HashSet<Key>>,
    adding: Lock<()>,
}

impl Making {
    /// This process's.
    pub(super) fn current() -> &'static Self {
        static LAST: Leaked<Making> = Leaked::none();
        loop {
            let seen = LAST.get();
            match seen.filter(|making| making.process.is_current()) {
                Some(making) => return making,
                None => LAST.replace(seen, Self::new()),
            };
        }
    }

    fn new() -> Self {
        Self { process: process::current(), keys: Lock::default(), adding: Lock::default() }
    }

    /// Waits until no other thread of the process adds to a file.
    pub(super) fn adding(&self) -> MutexGuard<'_, ()> {
        self.adding.lock()
    }
}

/// The right to make a sample: no other thread of this process has it while this lives.
#[derive(Debug)]
pub struct Claim<'a> {
    samples: &'a Samples,
    making: &'static Making,
    key: Key,
    is_locked: Cell<bool>,
}

impl Samples {
    /// Tries to become the thread of this process that makes the sample of an index. `None`: another one is.
    #[must_use]
    pub fn begin(&self, index: usize) -> Option<Claim<'_>> {
        let (making, key) = (Making::current(), (self.file().inode(), index));
        let is_new = making.keys.lock().insert(key);
        is_new.then(|| Claim { samples: self, making, key, is_locked: Cell::new(false) })
    }
}

impl Claim<'_> {
    /// Returns true if no other process makes the sample either, until this goes. `None`: it cannot be kept.
    #[must_use]
    pub fn is_mine(&self) -> Option<bool> {
        let is_mine = self.samples.claim(self.key.1);
        self.is_locked.set(is_mine == Some(true));
        is_mine
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        // A child that was forked meanwhile has neither lock nor entry.
        if !self.making.process.is_current() {
            return;
        }
        if self.is_locked.get() {
            self.samples.release(self.key.1);
        }
        self.making.keys.lock().remove(&self.key);
    }
}
