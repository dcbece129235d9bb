//! Adaptive spinning: after a short wait, the next one polls for a moment before it sleeps.
//!
//! A sleep and the wake-up that ends it cost both sides a system call or two and a change of context: more than the
//! smallest batches. So a side whose last wait was short polls for up to 30 us first, and yields its core to any
//! process that is ready to run before each look (`sched_yield`): with more processes than cores it takes turns, and
//! does not spin. After a longer wait it sleeps at once, and pays nothing for this.

use std::time::{Duration, Instant};

use super::{AtomicBool, Ordering};
use crate::Result;

/// The time for which a side polls at most.
const LONGEST: Duration = Duration::from_micros(30);
/// A wait that was over so soon, asleep or not, lets the next one begin by polling: a sleep for which polling would
/// have sufficed takes about twice [`LONGEST`].
const BRIEF: Duration = Duration::from_micros(60);

/// One side's memory of its last wait.
#[derive(Debug, Default)]
pub struct AdaptiveSpin {
    /// Publishes nothing: a stale answer costs one look or one sleep.
    was_brief: AtomicBool,
}

impl AdaptiveSpin {
    /// Waits: polls `found` for a moment if the last wait was short and `limit` allows it, then calls `sleep`. `None`:
    /// it was found before the sleep.
    ///
    /// # Errors
    /// The errors of `found` and `sleep`.
    pub fn before<T>(
        &self,
        limit: Duration,
        found: impl Fn() -> Result<bool>,
        sleep: impl FnOnce() -> Result<T>,
    ) -> Result<Option<T>> {
        let begin = Instant::now();
        let looks = self.was_brief.load(Ordering::Relaxed);
        let slept =
            if looks && found_within(begin, limit.min(LONGEST), found)? { None } else { Some(sleep()?) };
        self.was_brief.store(begin.elapsed() < BRIEF, Ordering::Relaxed);
        Ok(slept)
    }
}

fn found_within(begin: Instant, limit: Duration, found: impl Fn() -> Result<bool>) -> Result<bool> {
    while begin.elapsed() < limit {
        std::thread::yield_now();
        if found()? {
            return Ok(true);
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    /// Waits once, with a sleep of `sleep` and nothing to be found; returns how often it looked.
    fn looks(spin: &AdaptiveSpin, limit: Duration, sleep: Duration) -> u32 {
        let looks = Cell::new(0);
        let look = || {
            looks.set(looks.get() + 1);
            Ok(false)
        };
        let slept = spin.before(limit, look, || {
            std::thread::sleep(sleep);
            Ok(())
        });
        assert_eq!(slept, Ok(Some(())));
        looks.get()
    }

    fn after_a_brief_wait() -> AdaptiveSpin {
        AdaptiveSpin { was_brief: AtomicBool::new(true) }
    }

    #[test]
    fn looks_only_after_a_brief_wait() {
        let spin = AdaptiveSpin::default();
        assert_eq!(looks(&spin, Duration::MAX, 2 * BRIEF), 0, "nothing is known yet");
        assert_eq!(looks(&spin, Duration::MAX, Duration::ZERO), 0, "the last wait was long");
        // Unless this thread loses its core in the midst of it, every wait from here on is brief.
        assert!((0..1000).any(|_| looks(&spin, Duration::MAX, Duration::ZERO) > 0));
        assert_eq!(looks(&after_a_brief_wait(), Duration::ZERO, Duration::ZERO), 0, "there is no time");
    }

    #[test]
    fn does_not_sleep_beside_what_it_found() {
        let sleep = || -> Result<()> { panic!("it slept") };
        assert_eq!(after_a_brief_wait().before(Duration::MAX, || Ok(true), sleep), Ok(None));
        let error = || Err(crate::Error::Corrupt("a ring".into()));
        assert!(after_a_brief_wait().before(Duration::MAX, error, || Ok(())).is_err());
        assert_eq!(AdaptiveSpin::default().before(Duration::MAX, || Ok(true), || Ok(())), Ok(Some(())));
    }
}
