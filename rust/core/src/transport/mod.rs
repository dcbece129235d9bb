//! Tasks to the workers and results back, over shared memory.
//!
//! | module | about |
//! |---|---|
//! | [`Transport`] | what the scheduler asks of it |
//! | [`layout`] | what lies where in the segment |
//! | [`message`] | what a descriptor means |
//! | [`fds`] | the descriptors that pass from the parent to a worker |
//! | [`engine`] | the parent's side, composed |
//! | `worker_handle` | what the parent keeps of one worker, for its engine and for all leases |
//! | [`port`] | a worker's side, likewise |
//! | [`delivery`] | a batch that arrived, and what keeps its bytes |
//! | [`queues`] | the same between threads of one process, without memory of its own |
//! | [`copier`] | copies a batch's bytes elsewhere, on a thread |
//! | [`slot_memory`] | the slots as plain memory, for a driver to register |

#[allow(unsafe_code, reason = "copies between addresses that its callers vouch for")]
pub mod copier;
pub mod delivery;
pub mod engine;
pub mod fds;
mod interface;
pub mod layout;
pub mod message;
pub mod port;
pub mod queues;
pub mod slot_memory;
mod worker_handle;

use std::time::Duration;

pub use fds::{PortFds, WorkerFds};
pub use interface::Transport;
pub use layout::{Control, Counters, Geometry, WorkerView};

/// The longest sleep of either side: insurance against signal handlers that restart system calls.
pub const LONGEST_SLEEP: Duration = Duration::from_millis(100);
