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

impl From<String> for Loss {
    fn from(why: String) -> Self {
        Self { why, is_ours: false }
    }
}

impl From<&str> for Loss {
    fn from(why: &str) -> Self {
        why.to_owned().into()
    }
}

impl From<Error> for Loss {
    fn from(error: Error) -> Self {
        // Only the worker writes what is corrupt.
        let is_ours = !matches!(error, Error::Corrupt(_));
        Self { why: error.to_string(), is_ours }
    }
}
