//! The errors of the core, one variant for each failure that a caller can act on.

/// An error of the core. The text says what happened, with the values, and what to change.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Shared control words, or a batch, hold values that no correct peer writes.
    #[error("shared memory is corrupt: {0}")]
    Corrupt(String),

    /// A system call was refused.
    #[error("{call} failed: {message}")]
    Os {
        /// The system call or the request that failed.
        call: &'static str,
        /// The system's words.
        message: String,
        /// The error number.
        errno: i32,
    },

    /// The machine or the control group cannot give the memory that a batch needs.
    #[error(
        "a batch needs {needed} more bytes of memory, but only {available} are available \
         ({limit}); use fewer workers, a smaller batch_size or prefetch_factor, or raise the limit"
    )]
    OutOfMemory {
        /// Bytes that were to be taken.
        needed: u64,
        /// Bytes that can still be taken.
        available: u64,
        /// The source of the limit: the machine or a control group.
        limit: String,
    },

    /// The machine or the control group cannot give the memory that a list needs.
    #[error(
        "a list in shared memory has {built} bytes and needs {needed} more, and {spare} to spare, but only {available} \
         are available ({limit}); use a shorter list or smaller items, or raise the limit"
    )]
    ListMemory {
        /// Bytes that it has by then.
        built: u64,
        /// Bytes that were to be added.
        needed: u64,
        /// Bytes that have to be left.
        spare: u64,
        /// Bytes that can still be taken.
        available: u64,
        /// The source of the limit: the machine or a control group.
        limit: String,
    },

    /// A forked child goes on building its parent's list.
    #[error(
        "process {owner} builds this list in shared memory, and this process was forked from it meanwhile; build the \
         list before the fork, or one in each process"
    )]
    ListInherited {
        /// The process that builds it.
        owner: u32,
    },

    /// A forked child uses its parent's end. The first words are `multiprocessing`'s, which torch's iterator raises
    /// there and for which callers look.
    #[error(
        "can only test a child process: this iterator was made by process {owner}, from which this one was forked; \
         make an iterator in each process"
    )]
    Inherited {
        /// The process that made it.
        owner: u32,
    },

    /// The process's own allocator has no memory left.
    #[error("{len} bytes of private memory could not be allocated")]
    Allocation {
        /// Bytes that were asked for.
        len: u64,
    },

    /// One task's indices are larger than the region that carries them.
    #[error("the indices of one batch take {len} bytes, more than the {capacity} that can travel at once")]
    TaskTooLarge {
        /// Bytes of the task.
        len: u64,
        /// Bytes of the region.
        capacity: u64,
    },

    /// The indices supplied to a stream are not the ones it asked for.
    #[error("the random numbers of a sampler cannot be used: {0}")]
    Indices(String),

    /// A `RandomSampler` without replacement stands over nothing: torch divides by the length.
    #[error(
        "integer division or modulo by zero: a RandomSampler without replacement has a data_source of length 0"
    )]
    EmptySource,

    /// A result is out of its ring and cannot be had: its task will have no other. The rings go on.
    #[error("{error}")]
    Arrival {
        /// The task whose data it was; none of a whole message of torch's protocol.
        task: Option<u64>,
        /// Why.
        error: Box<Error>,
    },

    /// The configuration of the transport is impossible.
    #[error("{0}")]
    Config(String),
}

/// `Result` with the core's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;
