//! Counts the threads that an end waits for.
//!
//! A thread counts itself, and then looks whether the end has begun. The end begins, and then looks at the count. One of
//! the two sees the other, whether or not a lock keeps them apart: free-threaded Python has none.
//!
//! ```text
//! thread                              the end
//! enter: count + 1                    has begun
//!        has the end begun?           count > 0: look again later
//! leave: count - 1                    count = 0: what the threads use may go
//! ```
//!
//! INVARIANT: the end looks at the count by a read-modify-write too, so all changes and looks have one order. If the
//! thread's change comes before the first look, the thread is in the count. If it comes after, the thread sees that the
//! end has begun, and leaves without having used anything (`ORDERING awaited`).
//!
//! A forked child has none of the threads: the count is of one process, whose id is the word's other half.

use super::{AtomicU64, Ordering, acq_rel_unless, acquire_unless, release_unless};
use crate::testing::planted;

/// The number of threads in the low half, the id of their process in the high half.
#[derive(Debug)]
pub struct Awaited(AtomicU64);

const LOW: u64 = u32::MAX as u64;

impl Awaited {
    /// Counts in `word`, which is zero.
    pub const fn over(word: AtomicU64) -> Self {
        Self(word)
    }

    /// Counts this thread of the process `pid`. Returns false, and does not count it, once `has_begun` returns true.
    #[inline]
    #[must_use]
    pub fn enter(&self, pid: u32, has_begun: impl Fn() -> bool) -> bool {
        planted!("looked_before_counted" => return !has_begun() && { self.add(pid); true });
        self.add(pid);
        let enters = !has_begun();
        if !enters {
            self.leave(pid);
        }
        enters
    }

    fn add(&self, pid: u32) {
        let mine = u64::from(pid) << 32;
        let one_more = |count| Some(if count & !LOW == mine { count + 1 } else { mine | 1 });
        // ORDERING awaited: if the end has looked before this, what it did before is seen by the look that follows.
        let _ = self.0.fetch_update(acquire_unless("entered_relaxed"), Ordering::Relaxed, one_more);
    }

    /// Counts this thread no longer. It was counted by [`enter`](Self::enter), perhaps before a fork.
    #[inline]
    pub fn leave(&self, pid: u32) {
        let mine = u64::from(pid) << 32;
        let one_less = |count| (count & !LOW == mine && count & LOW > 0).then(|| count - 1);
        // ORDERING awaited: what the thread has used is used before the end finds it gone.
        let _ = self.0.fetch_update(release_unless("left_relaxed"), Ordering::Relaxed, one_less);
    }

    /// Returns the number of threads of the process `pid` that are counted. Called after the end has begun.
    pub fn count(&self, pid: u32) -> u64 {
        // ORDERING awaited: both: a change, so that it comes before or after a thread's.
        let count = self.0.fetch_add(0, acq_rel_unless("count_relaxed"));
        if count & !LOW == u64::from(pid) << 32 { count & LOW } else { 0 }
    }
}

#[cfg(all(test, not(ringloader_loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_forked_child_has_none_of_the_threads() {
        let awaited = Awaited::over(AtomicU64::new(0));
        assert!(awaited.enter(7, || false) && awaited.enter(7, || false));
        assert_eq!((awaited.count(7), awaited.count(8)), (2, 0));
        assert!(awaited.enter(8, || false));
        assert_eq!((awaited.count(7), awaited.count(8)), (0, 1));
        // A thread's guard that was copied with the parent's memory.
        awaited.leave(7);
        awaited.leave(8);
        awaited.leave(8);
        assert_eq!(awaited.count(8), 0);
    }

    #[test]
    fn once_the_end_has_begun_nobody_is_counted() {
        let awaited = Awaited::over(AtomicU64::new(0));
        assert!(!awaited.enter(7, || true));
        assert_eq!(awaited.count(7), 0);
    }
}
