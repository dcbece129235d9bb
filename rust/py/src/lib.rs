//! The extension module `ringloader._native`: converts, detaches from the interpreter, maps errors.
//!
//! | room | about |
//! |---|---|
//! | `class/` | the Python classes of the transport and of the scheduler |
//! | `collate/` | torch's `default_collate` and `default_convert`, padding, and a gather of rows, as Python classes |
//! | `batch/` | a Python batch to leaves and a skeleton, and back |
//! | `cache/` | samples that all processes share, as a Python class |
//! | `index/` | indices: where they come from, and how they travel |
//! | `items/` | Python objects as items of a list in shared memory |
//! | `torch/` | torch's and numpy's objects: their names, what lies behind them, tensors over memory |
//! | `objects.rs` | new objects of Python's own types, or `MemoryError` |
//! | `caught.rs` | panics, as errors |
//! | `collector.rs` | Python's collector, off for a moment |
//! | `gil.rs` | where threads detach from the interpreter, and errors become exceptions |
//! | `lock.rs` | a lock that threads wait for without the interpreter |
//! | `python.rs` | all that is called of ringloader's Python, by name |
//! | `process.rs` | what is said of forks; which process this is, and its memory |
//! | `fds.rs` | descriptors that Python names by number |
//! | `identity.rs` | maps by objects' addresses |
//!
//! `tests/unit/test_layers.py` says which may use which.

/// All of it: the transport needs Linux with `memfd`.
#[cfg(all(target_os = "linux", not(ringloader_portable)))]
#[path = "."]
mod native {
    pub(crate) mod batch;
    pub(crate) mod cache;
    pub(crate) mod caught;
    pub(crate) mod class;
    pub(crate) mod collate;
    #[allow(unsafe_code, reason = "turns the interpreter's collector off and on")]
    pub(crate) mod collector;
    #[allow(unsafe_code, reason = "takes numbers for descriptors")]
    pub(crate) mod fds;
    pub(crate) mod gil;
    pub(crate) mod identity;
    pub(crate) mod index;
    pub(crate) mod items;
    pub(crate) mod lock;
    #[allow(unsafe_code, reason = "asks the interpreter for objects, where PyO3 would panic")]
    pub(crate) mod objects;
    pub(crate) mod process;
    pub(crate) mod python;
    pub(crate) mod torch;
}
#[cfg(all(target_os = "linux", not(ringloader_portable)))]
use native::*;

#[pyo3::pymodule]
mod _native {
    #[cfg(all(target_os = "linux", not(ringloader_portable)))]
    #[pymodule_export]
    use super::{
        batch::pickling::Leaves,
        cache::sample_cache::SampleCache,
        class::arrival::Arrival,
        class::engine::{CachedSegment, Engine},
        class::index_source::IndexSource,
        class::kept::Kept,
        class::layout::Layout,
        class::ledger::{Ledger, Position},
        class::messages::WorkerEnded,
        class::passing::Passing,
        class::pinned::Pinned,
        class::pinner::Pinner,
        class::port::Port,
        class::recorder::{Recorder, TimedFetch, TimedNext, Trace},
        class::scheduler::{Order, Positions, Scheduler, ThreadScheduler},
        class::slot_memory::SlotMemory,
        class::stream::{BatchRule, Stream},
        class::thread_queues::ThreadQueues,
        class::turns::Turns,
        class::worker_clock::{TimedCollate, WorkerClock},
        class::worker_fds::WorkerFds,
        collate::default_collate::Collate,
        collate::default_convert::Convert,
        collate::first_of::FirstOf,
        collate::gather::Gather,
        collate::pad::Pad,
        gil::note_exit,
        index::places::{Placed, Places},
        items::shared_items::SharedItems,
        process::{
            after_fork_in_child, after_fork_in_parent, available_memory, before_fork, end_with_parent,
            process_identity,
        },
    };

    // The attribute takes no condition.
    #[pymodule_init]
    fn init(module: &pyo3::Bound<'_, pyo3::types::PyModule>) -> pyo3::PyResult<()> {
        #[cfg(all(target_os = "linux", not(ringloader_portable)))]
        pyo3::types::PyModuleMethods::add(module, "SharedSequence", super::items::look::class(module.py())?)?;
        let _ = module;
        Ok(())
    }

    /// True if this build has shared-memory rings: on Linux.
    #[pymodule_export]
    const SUPPORTED: bool = cfg!(all(target_os = "linux", not(ringloader_portable)));
}
