//! Sleep and wake between two processes, without the system call while no one sleeps.
//!
//! One side sleeps, the other notifies an eventfd that the caller owns; this file decides
//! only *whether* it has to ring.
//!
//! ```text
//! sleeper                              peer
//! announce: flag = 1; fence(SeqCst)    publish (release store)
//! look again                           take: fence(SeqCst); flag was 1? clear it
//! nothing there: sleep                 taken: ring
//! ```
//!
//! **No wake-up is lost.** Both fences lie in one total order. If the sleeper's comes first, the
//! peer's read of the flag comes after it and finds 1 (or a later value, below), so it rings. If
//! the peer's comes first, what it published before is seen by the sleeper's second look, which
//! therefore does not sleep. One of the two always holds; without either fence, both sides may read
//! the old value, and the sleeper sleeps although there is work.
//!
//! A later value than that 1 has one of three writers: the sleeper itself, which withdrew because
//! it is awake; another take, which rings; or the sleeper's next announcement, which the peer takes
//! and rings for. A take that dies before it rings was in a dying process, whose pidfd wakes the
//! sleeper instead. Notifications may come once too often (a sleeper that found something in its second
//! look may have been notified): a sleeper looks after each one and trusts none.
//!
//! A sleeper that waits for one peer announces on that peer's flag, one that waits for any of several on a flag for all
//! of them; a peer reads both after the same fence, so that the argument holds for either.
//!
//! **The fences publish no data.** Everything that the sleeper reads after waking is ordered by the
//! release store and acquire load of what was published. That keeps the rest of the crate within
//! what ThreadSanitizer, which does not see fences, can judge.

use super::{AtomicU32, CachePadded, Ordering, fence};
use crate::Result;
use crate::testing::fault::fault;

/// 1 while its owner is about to sleep or asleep. Zeroed memory is a flag that was not announced
/// on.
///
/// INVARIANT: every change is a read-modify-write. Plain stores would do by the language's rules (no
/// value comes between what a swap reads and what it writes), but loom does not follow that rule, and
/// would judge executions that cannot happen.
#[repr(C)]
#[derive(Debug, Default)]
pub struct WaitFlag(CachePadded<AtomicU32>);

#[cfg(not(ringloader_loom))]
const _: () = assert!(size_of::<WaitFlag>() == 128 && align_of::<WaitFlag>() == 128);

impl WaitFlag {
    /// Says that the caller is going to sleep. The caller **must look again** at everything that it
    /// would be woken for before it sleeps, and [`withdraw`](Self::withdraw) when it is awake:
    /// [`sleep_unless`] does it all.
    #[inline]
    pub fn announce(&self) {
        self.0.0.swap(1, Ordering::Relaxed);
        sequence_unless("announce_without_fence");
    }

    /// Says that the caller is awake. Needed after a second look that found something and after a
    /// sleep that ended for another reason than a notification; harmless after one.
    #[inline]
    pub fn withdraw(&self) {
        self.0.0.swap(0, Ordering::Relaxed);
    }

    /// Clears the flag, so that one sleep costs one notification, whatever is published meanwhile. Returns true if a
    /// sleeper had announced itself and must be notified. Called by the peer **after** it has published.
    #[inline]
    pub fn take(&self) -> bool {
        take_any([self])
    }

    #[inline]
    fn lower(&self) -> bool {
        // The load spares the exclusive access to the line while no one sleeps. Only the peer that takes the
        // 1 by the swap rings.
        self.0.0.load(Ordering::Relaxed) != 0 && self.0.0.swap(0, Ordering::Relaxed) != 0
    }
}

/// As [`WaitFlag::take`], for a sleeper that may have announced itself on any of `flags`: on one for what this peer
/// publishes, or on one for what any of several peers publishes.
#[inline]
pub fn take_any<const N: usize>(flags: [&WaitFlag; N]) -> bool {
    // ORDERING doorbell: what the caller published is before this fence, the reads of the flags
    // after it.
    sequence_unless("take_without_fence");
    let looked_at = if fault("first_flag_only") { 1 } else { N };
    flags[..looked_at].iter().any(|flag| flag.lower())
}

/// Lowers the flags of up to `most` sleepers, as [`WaitFlag::take`] does for one. Yields the sleepers to notify.
pub fn take_some<'a, S>(
    sleepers: impl Iterator<Item = (&'a WaitFlag, S)>,
    most: usize,
) -> impl Iterator<Item = S> {
    // ORDERING doorbell: as in `take_any`.
    sequence_unless("take_without_fence");
    let looked_at = if fault("first_sleepers_only") { most } else { usize::MAX };
    sleepers.take(looked_at).filter(|(flag, _)| flag.lower()).map(|(_, sleeper)| sleeper).take(most)
}

/// The sleeper's side: announces, looks again with `found`, and sleeps only if that finds nothing. `None`: it did not
/// sleep.
///
/// # Errors
/// The errors of `found` and `sleep`. The flag is withdrawn in any case.
pub fn sleep_unless<T>(
    flag: &WaitFlag,
    found: impl FnOnce() -> Result<bool>,
    sleep: impl FnOnce() -> Result<T>,
) -> Result<Option<T>> {
    // ORDERING doorbell: after the fence in this either the second look sees what was published, or the
    // peer's take, whose fence is then the later one, sees the 1.
    flag.announce();
    let looked = if fault("sleep_without_second_look") { Ok(false) } else { found() };
    let slept = looked.and_then(|found| if found { Ok(None) } else { sleep().map(Some) });
    flag.withdraw();
    slept
}

#[inline]
#[allow(
    clippy::disallowed_methods,
    reason = "the only fence(SeqCst): it orders the flag, and publishes no data"
)]
fn sequence_unless(name: &str) {
    if !fault(name) {
        fence(Ordering::SeqCst);
    }
}

#[cfg(all(test, not(ringloader_loom)))]
mod tests {
    use super::*;

    #[test]
    fn takes_an_announcement_once() {
        let flag = WaitFlag::default();
        assert!(!flag.take(), "nothing was announced");
        flag.announce();
        assert!(flag.take());
        assert!(!flag.take(), "one notification for one sleep");
    }

    #[test]
    fn the_flag_is_up_during_a_sleep_and_down_after_it() {
        let flag = WaitFlag::default();
        let taken = || Ok(flag.take());
        assert_eq!(sleep_unless(&flag, || Ok(false), taken), Ok(Some(true)));
        assert_eq!(sleep_unless(&flag, || Ok(true), taken), Ok(None));
        assert!(!flag.take());
        let error = || Err(crate::Error::Corrupt("a ring".into()));
        assert!(sleep_unless(&flag, error, taken).is_err());
        assert!(!flag.take(), "withdrawn after an error too");
    }

    #[test]
    fn either_flag_is_taken() {
        let flags = [WaitFlag::default(), WaitFlag::default()];
        let take = || take_any([&flags[0], &flags[1]]);
        assert!(!take(), "nothing was announced");
        for flag in &flags {
            flag.announce();
            assert!(take());
            assert!(!take(), "one notification for one sleep");
        }
    }

    #[test]
    fn as_many_sleepers_are_taken_as_are_enough() {
        let flags = [const { WaitFlag(CachePadded(AtomicU32::new(0))) }; 4];
        flags[1..].iter().for_each(WaitFlag::announce);
        let take = |most| take_some(flags.iter().zip(0..), most).collect::<Vec<_>>();
        assert_eq!(take(2), [1, 2]);
        assert_eq!(take(2), [3], "one was left");
        assert_eq!(take(2), [0; 0]);
    }

    #[test]
    fn takes_nothing_after_a_withdrawal() {
        let flag = WaitFlag::default();
        flag.announce();
        flag.withdraw();
        assert!(!flag.take());
        flag.announce();
        assert!(flag.take(), "the next sleep is announced anew");
    }
}
