//! A clock that forks move on. Whether something was lent before a fork and comes back after it is one comparison.
//!
//! The clock is one word: the number of forks that have ended, and how many are under way, for threads may fork at
//! once. Between [`begin`](ForkClock::begin) and [`end`](ForkClock::end) it is not known whether the child exists yet. What
//! is lent or returned in that time counts as if the fork came in between.
//!
//! INVARIANT: what was lent before a fork finds another time on the clock when it comes back after it. The thread that
//! forks begins before the system makes the child. A child has an object only if the object's last reference was
//! there then, so that reference goes later, in memory that the fork has made read-only: the write is a page fault,
//! which the system orders after the fork (`ORDERING fork`).

use crate::sync::{AtomicU64, Ordering};
use crate::testing::fault::fault;

/// One fork that is under way.
const WINDOW: u64 = 1;
/// The bits that count the forks under way.
const WINDOWS: u64 = (1 << 15) - 1;
/// Never set on the clock: marks a moment that has no end.
const UNSURE: u64 = 1 << 15;
/// One fork that has ended.
const TICK: u64 = 1 << 16;

/// The clock of one process. Zero is no time of any process.
#[derive(Debug, Default)]
pub struct ForkClock(AtomicU64);

/// When something was lent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Moment(u64);

impl ForkClock {
    /// Sets a clock that stands at zero. Each process begins at another time, so that a child that goes by its own
    /// clock finds none of its parent's moments on it.
    pub fn start(&self, random: u64) {
        // Half of all numbers are left for the forks to come.
        self.0.store((random >> 1 | 1) / TICK * TICK + TICK, Ordering::Relaxed);
    }

    /// The moment at which something is lent.
    #[inline]
    #[must_use]
    pub fn now(&self) -> Moment {
        let now = self.0.load(Ordering::Relaxed);
        let sure = now & WINDOWS == 0 || fault("lent_in_a_window");
        Moment(if sure { now } else { now | UNSURE })
    }

    /// Returns true if no fork can have come since `then`. Never true in a forked child whose clock was wiped.
    #[inline]
    #[must_use]
    pub fn is_still(&self, then: Moment) -> bool {
        // ORDERING fork: relaxed, for the system orders this load after the fork, as the page above says.
        self.0.load(Ordering::Relaxed) == then.0
    }

    /// A fork is about to happen.
    pub fn begin(&self) {
        // ORDERING fork: before the system call that makes the child.
        self.0.fetch_add(WINDOW, Ordering::SeqCst);
    }

    /// Notes that the fork has happened, or has failed. Returns a moment later than any at which the child may have got
    /// something.
    pub fn end(&self) -> Moment {
        Moment(self.0.fetch_add(TICK - WINDOW, Ordering::SeqCst) + TICK)
    }
}

impl Moment {
    /// This moment, for a process that cannot rely on its clock: it is never [still](ForkClock::is_still) now.
    #[must_use]
    pub fn unsure(self) -> Self {
        Self(self.0 | UNSURE)
    }

    /// Returns true if more forks have ended by `self` than by `other`.
    #[must_use]
    pub fn is_after(self, other: Self) -> bool {
        self.0 / TICK > other.0 / TICK
    }
}

#[cfg(all(test, not(ringloader_loom)))]
mod tests {
    use super::*;

    fn clock(random: u64) -> ForkClock {
        let clock = ForkClock::default();
        clock.start(random);
        clock
    }

    #[test]
    fn a_fork_ends_every_moment_before_it() {
        for random in [0, 1, u64::MAX] {
            let clock = clock(random);
            let before = clock.now();
            assert!(clock.is_still(before));
            clock.begin();
            let within = clock.now();
            assert!(!clock.is_still(before) && !clock.is_still(within));
            let ended = clock.end();
            assert!(!clock.is_still(before) && !clock.is_still(within));
            assert!(ended.is_after(before) && ended.is_after(within));
            assert!(clock.is_still(clock.now()) && !ended.is_after(clock.now()));
        }
    }

    #[test]
    fn forks_of_several_threads_may_overlap() {
        let clock = clock(77);
        let mut moments = vec![clock.now()];
        clock.begin();
        moments.push(clock.now());
        clock.begin();
        moments.push(clock.now());
        let first = clock.end();
        assert!(moments.iter().all(|&then| first.is_after(then)));
        let late = clock.now();
        assert!(!first.is_after(late), "it was lent after the first fork had ended");
        let second = clock.end();
        assert!(second.is_after(late));
        assert!(moments.iter().chain([&late]).all(|&then| !clock.is_still(then)));
    }

    #[test]
    fn an_unsure_moment_is_never_still() {
        let clock = clock(5);
        assert!(!clock.is_still(clock.now().unsure()));
    }

    #[test]
    fn no_time_is_that_of_a_wiped_clock() {
        for random in [0, u64::MAX] {
            let moment = clock(random).now();
            assert!(!ForkClock::default().is_still(moment));
        }
    }
}
