//! Why a worker is lost.

use crate::error::Error;

/// The end of a worker's connection.
#[derive(Debug, Clone)]
pub(super) struct Loss {
    /// The reason, in words.
    pub(super) why: String,
    /// True if this process could not take what the worker has sent: another worker would be lost in the same way.
    pub(super) is_ours: bool,
}

impl Loss {
    /// The worker, or the way to it, is to blame.
    pub(super) fn theirs(why: impl Into<String>) -> Self {
        Self { why: why.into(), is_ours: false }
    }

    /// This process is to blame.
    pub(super) fn ours(error: Error) -> Self {
        Self { why: error.to_string(), is_ours: true }
    }
}
