//! Facts about one process alone, on a page that the system wipes at a fork; and places of what stays for good.

use crate::forks::ForkClock;
use crate::os::segment::page_wiped_at_fork;
use crate::sync::{AtomicPtr, AtomicU32, AtomicU64, Ordering};

/// Facts about one process alone. All zero at first.
#[repr(C)]
#[derive(Debug, Default)]
pub(super) struct OwnPage {
    /// The number that tells this process from others.
    pub(super) identity: AtomicU64,
    /// The clock of the process's forks.
    pub(super) clock: ForkClock,
    /// The id of the process of which a thread makes, or has made, the [`Process`](super::Process).
    pub(super) maker: AtomicU32,
}

/// A page of this process, zero again in a child that is forked. `None` where the system has no such memory.
pub(super) fn own_page() -> Option<&'static OwnPage> {
    let page = page_wiped_at_fork()?;
    // SAFETY: a page is aligned for the atomics and large enough, stays mapped for good, and is used for nothing
    // else; zero is valid.
    Some(unsafe { page.cast::<OwnPage>().as_ref() })
}

/// The address of a thing that stays for good, if there is one. It is set by one store and has no lock: a child that is
/// forked meanwhile finds the thing before or the thing after.
///
/// INVARIANT: an address that is not null is that of a leaked box.
#[derive(Debug)]
pub(crate) struct Leaked<T: 'static>(AtomicPtr<T>);

impl<T> Leaked<T> {
    pub(crate) const fn none() -> Self {
        Self(AtomicPtr::new(std::ptr::null_mut()))
    }

    #[inline]
    pub(crate) fn get(&self) -> Option<&'static T> {
        // ORDERING leaked: the thing is whole.
        let at = self.0.load(Ordering::Acquire);
        // SAFETY: null, or the address of a leaked box (the invariant).
        unsafe { at.as_ref() }
    }

    /// Puts `thing` in the place of what was seen. Returns what is in place then: another thread may have been first.
    pub(crate) fn replace(&self, seen: Option<&'static T>, thing: T) -> &'static T {
        let seen = seen.map_or(std::ptr::null_mut(), |seen| std::ptr::from_ref(seen).cast_mut());
        let new = Box::into_raw(Box::new(thing));
        // ORDERING leaked: the thing is whole before its address is published.
        match self.0.compare_exchange(seen, new, Ordering::AcqRel, Ordering::Acquire) {
            // SAFETY: the box made above, leaked.
            Ok(_) => unsafe { &*new },
            Err(theirs) => {
                // SAFETY: the box made above, of which nobody knows; and a leaked box, as things are never taken away.
                unsafe {
                    drop(Box::from_raw(new));
                    &*theirs
                }
            }
        }
    }
}
