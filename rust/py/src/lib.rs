//! The extension module `ringloader._native`: converts, detaches from the interpreter, maps errors.
//!
//! | file | about |
//! |---|---|
//! | `engine.rs` | the parent's end, as a Python class |
//! | `port.rs` | a worker's end, as a Python class |
//! | `scheduler.rs` | native control of an iterator, as a Python class |
//! | `stream.rs` | torch's samplers, read natively, as a Python class |
//! | `collate.rs` | torch's `collate`, as a Python class |
//! | `convert.rs` | torch's `default_convert`, as a Python class |
//! | `original.rs` | a function of torch's that ours stands in for |
//! | `encode.rs` | a Python batch to leaves and a skeleton |
//! | `grouping.rs` | which leaves share memory, and where it goes |
//! | `identity.rs` | maps by objects' addresses |
//! | `decode.rs` | back again |
//! | `template.rs` | batches that look like the one before |
//! | `dlpack.rs` | tensors over memory and out of it; unsafe |
//! | `objects.rs` | memory of Python objects, described, copied and read; unsafe |
//! | `forks.rs` | what is said of forks; which process this is |
//! | `torch.rs` | what is asked of torch, numpy and pickle, looked up once |
//! | `enter.rs` | where threads detach from the interpreter, and errors become exceptions |

#[cfg(all(target_os = "linux", not(ringloader_portable)))]
mod linux;

#[pyo3::pymodule]
mod _native {
    #[cfg(all(target_os = "linux", not(ringloader_portable)))]
    #[pymodule_export]
    use super::linux::{
        collate::Collate,
        convert::Convert,
        dlpack::Kept,
        encode::Leaves,
        engine::{Engine, Parked, available_memory},
        enter::note_exit,
        forks::{after_fork_in_child, after_fork_in_parent, before_fork, process_identity},
        port::Port,
        scheduler::Scheduler,
        stream::Stream,
    };

    /// Whether this build has shared-memory rings: on Linux.
    #[pymodule_export]
    const SUPPORTED: bool = cfg!(all(target_os = "linux", not(ringloader_portable)));
}
