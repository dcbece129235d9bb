//! The errors of the core, one variant for each failure that a caller can act on.

use std::fmt;

/// An error of the core. The text says what happened, with the values, and what to change.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Error {
    /// Shared control words, or a batch, hold values that no correct peer writes.
    Corrupt(String),

    /// A system call was refused.
    Os {
        /// The system call or the request that failed.
        call: &'static str,
        /// The system's words.
        message: String,
        /// The error number.
        errno: i32,
    },

    /// The machine, the control group or the process's own allocator cannot give the memory.
    Memory(String),

    /// A forked child keeps building its parent's list.
    ListInherited {
        /// The process that builds it.
        owner: u32,
    },

    /// A forked child uses its parent's end. The first words are `multiprocessing`'s, which torch's iterator raises
    /// there and for which callers look.
    Inherited {
        /// The process that made it.
        owner: u32,
    },

    /// A result is out of its ring and is lost: its task will have no other. The rings continue.
    Arrival {
        /// The task whose data it was; none of a whole message of torch's protocol.
        task: Option<u64>,
        /// Why.
        error: Box<Error>,
    },

    /// What was passed is impossible.
    Config(String),
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Corrupt(what) => write!(f, "shared memory is corrupt: {what}; please report this bug"),
            Self::Os { call, message, .. } => write!(f, "{call} failed: {message}"),
            Self::ListInherited { owner } => write!(
                f,
                "process {owner} builds this list in shared memory, and this process was forked from it meanwhile; \
                 build the list before the fork, or one in each process"
            ),
            Self::Inherited { owner } => write!(
                f,
                "can only test a child process: this iterator was made by process {owner}, from which this one was \
                 forked; make an iterator in each process"
            ),
            Self::Arrival { error, .. } => error.fmt(f),
            Self::Memory(what) | Self::Config(what) => f.write_str(what),
        }
    }
}

impl std::error::Error for Error {}

impl Error {
    /// The process's own allocator has no `len` bytes left.
    #[must_use]
    pub fn allocation(len: u64) -> Self {
        Self::Memory(format!("no memory for {len} bytes; use a smaller batch_size"))
    }

    /// The `len` bytes of one task's indices are more than the region that carries them has.
    pub(crate) fn task_too_large(len: u64, capacity: u64) -> Self {
        Self::Config(format!(
            "the indices of a batch take {len} bytes, more than {capacity}; use a smaller batch_size"
        ))
    }
}

/// `Result` with the core's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;
