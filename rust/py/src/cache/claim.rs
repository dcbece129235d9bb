//! The right of one thread to make a sample and keep it.

use std::cell::Cell;
use std::collections::HashSet;
use std::sync::{LazyLock, Mutex};

use ringloader_core::samples::Samples;

/// A process, a file of samples, and an index.
type Key = (u32, (u64, u64), usize);

/// Samples that threads of this process are making. Processes exclude each other by locks, which all threads of a process
/// have. The process is part of the key, because a forked child inherits the set, not the threads.
///
/// It is locked by threads that have the interpreter, and for no longer than they have it, so a child that one of these
/// forks finds it free. Other code may fork at any moment: nobody waits for the lock.
static MAKING: LazyLock<Mutex<HashSet<Key>>> = LazyLock::new(Mutex::default);

/// An index that no other thread of this process makes a sample of, while this lives.
pub(super) struct Claim<'a> {
    samples: &'a Samples,
    key: Key,
    is_locked: Cell<bool>,
}

impl<'a> Claim<'a> {
    /// `None`: another thread has it.
    pub(super) fn of(samples: &'a Samples, index: usize) -> Option<Self> {
        let key = (std::process::id(), samples.inode(), index);
        let is_new = MAKING.try_lock().is_ok_and(|mut making| making.insert(key));
        is_new.then(|| Self { samples, key, is_locked: Cell::new(false) })
    }

    /// True if no other process makes the sample either, until this goes. `None`: it cannot be kept.
    pub(super) fn is_mine(&self) -> Option<bool> {
        let is_mine = self.samples.claim(self.key.2);
        self.is_locked.set(is_mine == Some(true));
        is_mine
    }
}

impl Drop for Claim<'_> {
    fn drop(&mut self) {
        // A child that was forked meanwhile has no lock.
        if self.is_locked.get() && self.key.0 == std::process::id() {
            self.samples.release(self.key.2);
        }
        if let Ok(mut making) = MAKING.try_lock() {
            making.remove(&self.key);
        }
    }
}
