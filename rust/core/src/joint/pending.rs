//! The word that says of which epoch the first task is that has no place yet.

use crate::sync::{AtomicU64, acquire_unless, release_unless};

/// The word, borrowed. Zeroed memory says that each task has a place.
#[derive(Debug, Clone, Copy)]
pub struct Pending<'a>(&'a AtomicU64);

impl<'a> Pending<'a> {
    /// Over this word.
    #[must_use]
    pub fn new(word: &'a AtomicU64) -> Self {
        Self(word)
    }

    /// Says the epoch, in the main process: after it has laid out the tasks that have a place now, and before it tells a
    /// worker of an epoch after that of the last task. `None`: each task has a place.
    pub fn set(&self, epoch: Option<u64>) {
        // ORDERING joint-pending: the tasks are laid out before they are seen to be no longer without a place.
        self.0.store(epoch.map_or(0, |epoch| epoch + 1), release_unless("joint_pending_relaxed"));
    }

    /// The epoch. Look at the places after this.
    #[must_use]
    pub fn first(&self) -> Option<u64> {
        // ORDERING joint-pending: as above.
        self.0.load(acquire_unless("joint_pending_load_relaxed")).checked_sub(1)
    }
}
