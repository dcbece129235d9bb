//! Facts about one process alone, on a page that the system wipes at a fork.

use crate::forks::Clock;
use crate::os::segment::page_wiped_at_fork;
use crate::sync::AtomicU64;

/// Facts about one process alone. All zero at first.
#[repr(C)]
#[derive(Debug, Default)]
pub(super) struct OwnPage {
    /// The number that tells this process from others.
    pub(super) identity: AtomicU64,
    /// The clock of the process's forks.
    pub(super) clock: Clock,
}

/// A page of this process, zero again in a child that is forked. `None` where the system has no such memory.
pub(super) fn own_page() -> Option<&'static OwnPage> {
    let page = page_wiped_at_fork()?;
    // SAFETY: a page is aligned for the atomics and large enough, stays mapped for good, and is used for nothing
    // else; zero is valid.
    Some(unsafe { page.cast::<OwnPage>().as_ref() })
}
