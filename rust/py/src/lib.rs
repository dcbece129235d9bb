//! The extension module `ringloader._native`: converts, detaches from the interpreter, maps errors.
//!
//! | room | about |
//! |---|---|
//! | `objects.rs` | new objects of Python's own types |
//! | `caught.rs` | panics, as errors |
//! | `gil.rs` | threads that detach from the interpreter; errors of the core as exceptions |
//! | `lock.rs` | a lock that threads wait for without the interpreter |
//! | `identity.rs` | maps by objects' addresses |
//! | `strings.rs` | names of attributes and arguments, made at import |
//! | `process.rs` | this process: forks, identity, memory, descriptors |
//! | `python.rs` | the calls of ringloader's Python, by name |
//! | `timing.rs` | the times of batches |
//! | `torch/` | objects of torch and numpy: their names, their memory, tensors over memory |
//! | `sampling/` | indices: where they come from, how they travel, which of them the caller has got |
//! | `batch/` | a Python batch to leaves and a skeleton, and back; its way to a device |
//! | `transport/` | both ends of each transport |
//! | `placement/` | batches that were taken and not yet handed out; pinning |
//! | `scheduler/` | the scheduler: one call for each batch |
//! | `collate/` | torch's `default_collate` and `default_convert`, padding, and a gather of rows |
//! | `cache/` | samples that all processes share |
//! | `items/` | Python objects as items of a list in shared memory |
//!
//! `tests/unit/test_layers.py` says which may use which.
// Tests count in small numbers.
#![cfg_attr(not(test), warn(clippy::cast_possible_truncation))]

/// All of it: the transport needs Linux with `memfd`.
#[cfg(all(target_os = "linux", not(ringloader_portable)))]
#[path = "."]
mod native {
    pub(crate) mod batch;
    pub(crate) mod cache;
    pub(crate) mod caught;
    pub(crate) mod collate;
    pub(crate) mod gil;
    pub(crate) mod identity;
    pub(crate) mod items;
    pub(crate) mod lock;
    #[allow(
        unsafe_code,
        reason = "makes lists and tuples of items that may be errors; turns the interpreter's collector off"
    )]
    pub(crate) mod objects;
    pub(crate) mod placement;
    #[allow(unsafe_code, reason = "takes numbers for descriptors")]
    pub(crate) mod process;
    pub(crate) mod python;
    pub(crate) mod sampling;
    pub(crate) mod scheduler;
    pub(crate) mod strings;
    pub(crate) mod timing;
    pub(crate) mod torch;
    pub(crate) mod transport;
}
#[cfg(all(target_os = "linux", not(ringloader_portable)))]
use native::*;

// Free-threaded: not until somebody has run it so. Each assumption of a lock that is known was mended by argument.
#[pyo3::pymodule(gil_used = true)]
mod _native {
    #[cfg(all(target_os = "linux", not(ringloader_portable)))]
    #[pymodule_export]
    use super::{
        batch::encode::Leaves,
        batch::layout::Layout,
        cache::SampleCache,
        collate::default_collate::Collate,
        collate::default_convert::Convert,
        collate::fallback::FirstOf,
        collate::gather::Gather,
        collate::pad::Pad,
        collate::sample_rows::SampleRows,
        gil::note_exit,
        items::shared_items::SharedItems,
        placement::arrival::{Arrival, Pinned},
        placement::pinning::Pinner,
        process::{
            Deadline, OwnFd, after_fork_in_child, after_fork_in_parent, available_memory, before_fork,
            end_with_parent, process_identity, takes_shared_memory_back,
        },
        sampling::fingerprint::Passing,
        sampling::ledger::{Ledger, Position, WorkerProgress},
        sampling::places::{Placed, Places},
        sampling::source::IndexSource,
        sampling::stream::{BatchRule, Shuffle, Stream},
        scheduler::{JointScheduler, Order, Positions, Scheduler, ThreadScheduler},
        timing::{Recorder, TimedCollate, TimedFetch, TimedNext, Trace, WorkerClock},
        torch::header::Kept,
        transport::claimed::Claimed,
        transport::engine::{CachedSegment, Engine},
        transport::joint_engine::JointEngine,
        transport::joint_port::JointPort,
        transport::memory::SlotMemory,
        transport::port::Port,
        transport::queues::ThreadQueues,
        transport::relay::{MainRelay, WorkerRelay},
    };

    // The attribute takes no condition.
    #[pymodule_init]
    fn init(module: &pyo3::Bound<'_, pyo3::types::PyModule>) -> pyo3::PyResult<()> {
        #[cfg(all(target_os = "linux", not(ringloader_portable)))]
        {
            super::strings::make_all(module.py());
            super::python::names::make_all(module.py());
            super::torch::names::private::make_all(module.py());
        }
        let _ = module;
        Ok(())
    }

    /// True if this build has shared-memory rings: on Linux.
    #[pymodule_export]
    const SUPPORTED: bool = cfg!(all(target_os = "linux", not(ringloader_portable)));
}
