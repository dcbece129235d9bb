//! When a wait for a batch is said.

use std::time::{Duration, Instant};

/// A wait for a batch that is said when it is due.
pub(super) struct Watched {
    since: Instant,
    /// The length that the wait has when it is said next.
    next: Duration,
}

impl Watched {
    pub(super) fn new(after: Duration) -> Self {
        Self { since: Instant::now(), next: after }
    }

    /// Returns the length of the wait, if it must be said now.
    pub(super) fn is_due(&mut self) -> Option<Duration> {
        let waited = self.since.elapsed();
        let is_due = waited >= self.next;
        while waited >= self.next {
            // More than nothing, or it would never be more.
            self.next = self.next.max(Duration::from_millis(1)).saturating_mul(2);
        }
        is_due.then_some(waited)
    }

    /// Returns the time until it is due.
    pub(super) fn left(&self) -> Duration {
        self.next.saturating_sub(self.since.elapsed())
    }
}
