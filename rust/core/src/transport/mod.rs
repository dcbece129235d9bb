//! Tasks to the workers and results back, over shared memory.
//!
//! | module | about |
//! |---|---|
//! | [`Transport`] | what the scheduler asks of it |
//! | [`layout`] | what lies where in the segment |
//! | [`message`] | what a descriptor means |
//! | [`task_number`] | the number of a task, and the epoch in it |
//! | [`fds`] | the descriptors that pass from the parent to a worker |
//! | [`engine`] | the parent's side, composed |
//! | `worker_handle` | what the parent keeps of one worker, for its engine and for all leases |
//! | [`port`] | a worker's side, likewise |
//! | [`received`] | a batch that arrived, and what keeps its bytes |
//! | [`joint`] | tasks that all workers share, and the parts of their batches |
//! | [`run_times`] | when their parts were made |
//! | [`queues`] | the same between threads of one process, without memory of its own |
//! | [`relay`] | the rings of workers on other machines, over TCP |
//! | [`copier`] | copies a batch's bytes elsewhere, on a thread |
//! | [`slot_memory`] | the slots as plain memory, for a driver to register |
//!
//! # Room, and why every wait ends
//!
//! A worker's share of `max_shared_bytes` is its own. It has two slots for each task that it may have, or fewer if
//! windows would become too small for ordinary batches (`Geometry::new`): a worker without a free slot waits as one
//! without memory does.
//!
//! - The user's leases on a worker's slots stay within half the bytes and half the slots. Beyond that, the parent
//!   copies a batch out, and its slot is free at once.
//! - A batch larger than half a share travels in a segment of its own. Until the parent has taken it, the segment
//!   counts against the share like a slot: the worker knows its size, and sees by the ring's `head` that it was taken.
//!   The worker keeps two of them for later batches. A word in the segment says that the parent has dropped its last view;
//!   from then on it counts again, until the worker uses it, or gives it back because it is idle or slots take the room.
//! - A worker without room waits only while results of its own are in the ring, and those come before the one that it
//!   is filling. With none left, it sends its batch in a segment of its own, however large.
//!
//! # When a worker dies
//!
//! [`pool`](crate::pool) has the table for its slots, and [`samples`](crate::samples) for its samples. The rest:
//!
//! | killed | left behind | repaired by |
//! |---|---|---|
//! | words of a descriptor stored, no `tail` | nothing visible | with a successor, the task is done again |
//! | `tail` stored, no ready bit or no wake-up | a whole batch | the pidfd wakes the parent, which looks at that ring and drains it first |
//! | task taken, `head` not stored | the task is still in the ring | with a successor, undelivered tasks are done again |
//! | task handed back, no result | nothing: no process has the task | with a successor, undelivered tasks are done again |
//! | memory of an oversize batch sent, no `tail` | a descriptor in the socket | it goes with the socket pair: a successor gets another |
//! | a segment that it kept, the batch in it held or dropped | nothing: only the parent has the memory | it goes with the batch |
//!
//! Each row, and some moments between other stores, has a name in the code ([`failpoint`](crate::testing::failpoint));
//! `ci/storm.sh` kills a worker at each of them.
//!
//! A dead worker is reported, and the iteration ends, as with torch. With `restart_workers` it gets a successor:
//! [`Engine::succeed`](engine::Engine::succeed) drops the tasks that are still in its ring, a new process attaches to
//! its slots, and the scheduler sends all unanswered tasks again, in order. Positions in the rings go on and are never
//! reset. The error for a lost worker names the samples of its task, which it reads out of the arena as long as the
//! bytes are there.

#[allow(unsafe_code, reason = "copies between addresses that its callers vouch for")]
pub mod copier;
pub mod engine;
pub mod fds;
mod interface;
pub mod joint;
pub mod layout;
pub mod message;
pub mod port;
pub mod queues;
pub mod received;
pub mod relay;
pub mod run_times;
pub mod slot_memory;
pub mod task_number;
mod worker_handle;

use std::time::Duration;

pub use fds::{PortFds, WorkerFds};
pub use interface::Transport;
pub use layout::{Control, Counters, Geometry, WorkerView};

/// The longest sleep of either side: insurance against signal handlers that restart system calls.
pub const LONGEST_SLEEP: Duration = Duration::from_millis(100);
