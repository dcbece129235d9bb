//! Looking again for a moment before a sleep, where the last wait says that this will do.
//!
//! A sleep and the bell that ends it cost both sides a system call or two and a change of context:
//! more than the smallest batches. Whoever waited only briefly the last time therefore looks again
//! for a while, and gives its core to anyone who is ready to run before each look (`sched_yield`): with
//! more processes than cores it is a turn, not a spin. Who waits for longer sleeps at once, and so
//! does not notice that there is such a thing.

use std::time::{Duration, Instant};

use super::{AtomicBool, Ordering};
use crate::Result;

/// How long it looks.
const LONGEST: Duration = Duration::from_micros(30);
/// A wait, asleep or not, that was over so soon lets the next one begin by looking: a sleep of the time that
/// looking would have been enough for takes about twice that.
const BRIEF: Duration = Duration::from_micros(60);

/// One side's memory of its last wait.
#[derive(Debug, Default)]
pub struct Linger {
    /// Publishes nothing: a stale answer costs one look or one sleep.
    was_brief: AtomicBool,
}

impl Linger {
    /// Waits: looks for what is awaited with `found` for a moment, if that is worthwhile and `limit` allows it, and
    /// then calls `sleep`. `None`: it was found before.
    ///
    /// # Errors
    /// What `found` or `sleep` returns.
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
    fn looks(linger: &Linger, limit: Duration, sleep: Duration) -> u32 {
        let looks = Cell::new(0);
        let look = || {
            looks.set(looks.get() + 1);
            Ok(false)
        };
        let slept = linger.before(limit, look, || {
            std::thread::sleep(sleep);
            Ok(())
        });
        assert_eq!(slept, Ok(Some(())));
        looks.get()
    }

    fn after_a_brief_wait() -> Linger {
        Linger { was_brief: AtomicBool::new(true) }
    }

    #[test]
    fn looks_only_after_a_brief_wait() {
        let linger = Linger::default();
        assert_eq!(looks(&linger, Duration::MAX, 2 * BRIEF), 0, "nothing is known yet");
        assert_eq!(looks(&linger, Duration::MAX, Duration::ZERO), 0, "the last wait was long");
        // Unless this thread loses its core in the midst of it, every wait from here on is brief.
        assert!((0..1000).any(|_| looks(&linger, Duration::MAX, Duration::ZERO) > 0));
        assert_eq!(looks(&after_a_brief_wait(), Duration::ZERO, Duration::ZERO), 0, "there is no time");
    }

    #[test]
    fn does_not_sleep_beside_what_it_found() {
        let sleep = || -> Result<()> { panic!("it slept") };
        assert_eq!(after_a_brief_wait().before(Duration::MAX, || Ok(true), sleep), Ok(None));
        let error = || Err(crate::Error::Corrupt("a ring".into()));
        assert!(after_a_brief_wait().before(Duration::MAX, error, || Ok(())).is_err());
        assert_eq!(Linger::default().before(Duration::MAX, || Ok(true), || Ok(())), Ok(Some(())));
    }
}
