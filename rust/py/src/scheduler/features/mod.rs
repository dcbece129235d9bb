//! The features of scheduling, and what the scheduler has for them. One that is off has nothing.
//!
//! | file | about |
//! |---|---|
//! | `assigning.rs` | which workers get tasks |
//! | `following.rs` | the epoch that follows |
//! | `late.rs` | tasks that are late, and those of lost workers |
//! | `timed.rs` | what the recorder is told |

mod assigning;
mod following;
mod late;
mod timed;

use pyo3::{PyTraverseError, PyVisit};

use self::following::Following;
use self::late::{LateEnd, SentTasks};
use self::timed::{Made, TimedEnd};
use super::parent_end::TransportEnd;

pub(super) use self::late::Watched;
pub(super) use self::timed::Recording;

/// The parent's end of a transport, with what features need of it.
pub(crate) trait ParentEnd: TransportEnd + LateEnd + TimedEnd {}

impl<E: TransportEnd + LateEnd + TimedEnd> ParentEnd for E {}

/// What features have of an epoch.
pub(super) struct Features<I> {
    /// The epoch that follows, once its first tasks may go out.
    following: Option<Following<I>>,
    /// The moments of results that came before this epoch began, for the recorder.
    early: Vec<(u64, Made)>,
    /// The indices of tasks.
    pub(super) sent: SentTasks<I>,
}

impl<I> Features<I> {
    /// `keeps_sent`: the indices of tasks are kept until their results have come.
    pub(super) fn new(keeps_sent: bool) -> Self {
        Self { following: None, early: Vec::new(), sent: SentTasks::new(keeps_sent) }
    }

    /// Forgets what is of this epoch alone. Returns objects, for the caller to drop after the lock is released.
    pub(super) fn forget(&mut self) -> impl Sized + use<I> {
        self.early.clear();
        self.following.take()
    }

    pub(super) fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(self.following.as_ref().map(Following::source))
    }
}
