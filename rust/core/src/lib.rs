//! The Python-free core of ringloader: batches travel from worker processes to the main process
//! through shared memory.
//!
//! ```text
//!   main process                    one sealed memfd                    worker w
//!   Engine  --- tasks -->  [ ring of descriptors | task arena ]  --->   Port
//!           <-- results -  [ ring of descriptors ]               <---   fills a slot, commits
//!   Received  -- lease -->  [ slot windows ]      <-- free bit, when the last tensor is dropped
//! ```
//!
//! | module | what it knows |
//! |---|---|
//! | [`scheduler`] | torch's rules for which worker does what, and whose turn it is, over any transport |
//! | [`transport`] | tasks and results over shared memory: layout, engine, port, received results |
//! | [`process`] | this process, and the children that it forks |
//! | [`os`] | system calls: segments, eventfds, descriptors over sockets, what memory is left |
//! | [`items`] | a list of byte strings that all processes read |
//! | [`samples`] | byte strings that processes add, one for each index, and read: a file, or memory |
//! | [`batch`] | a batch as bytes; nothing of rings or memory |
//! | [`pool`] | which side has which slot; nothing of rings |
//! | [`joint`] | batches that all workers make together: claims of samples, and who collates |
//! | [`ring`] | rings of descriptors; nothing of slots |
//! | [`cache`] | which samples exist, and where; nothing of files |
//! | [`plan`] | samplers, the selection of workers, the reorder buffer: torch's rules; nothing of processes or memory |
//! | [`forks`] | what a forked child may still have |
//! | [`timing`] | where the time of each batch goes; reads no clock |
//! | [`sync`] | atomics, the doorbell, adaptive spinning |
//! | `bits` | sets of small numbers |
//! | [`number`] | conversions between integers |
//! | [`error`] | what can go wrong |
//!
//! Guarantees: push, pop, begin, commit and release are wait-free and allocate nothing (but for the release of what was
//! leased before a fork); a worker may die at any instruction and leaves nothing half-visible; whatever another process
//! wrote is validated before it is used as an offset or a length.
// Tests count in small numbers.
#![cfg_attr(not(test), warn(clippy::cast_possible_truncation))]

pub mod batch;
mod bits;
pub mod cache;
pub mod error;
pub mod forks;
pub mod joint;
pub mod number;
pub mod plan;
pub mod pool;
pub mod ring;
pub mod sync;
pub mod timing;

/// Deaths, delays and faults that tests switch on.
pub use ringloader_testing as testing;

/// Linux with memfd, and not under loom, whose atomics cannot lie in a mapping.
#[cfg(all(target_os = "linux", not(ringloader_portable), not(ringloader_loom)))]
#[path = "."]
mod linux {
    pub mod items;
    pub mod os;
    pub mod process;
    pub mod samples;
    pub mod scheduler;
    pub mod transport;
}
#[cfg(all(target_os = "linux", not(ringloader_portable), not(ringloader_loom)))]
pub use linux::*;

pub use error::{Error, Result};
