//! The Python classes of the transport and of the scheduler.

pub(crate) mod arrival;
pub(crate) mod engine;
pub(crate) mod index_source;
pub(crate) mod kept;
pub(crate) mod layout;
pub(crate) mod ledger;
pub(crate) mod messages;
pub(crate) mod parent_end;
pub(crate) mod passing;
pub(crate) mod pinned;
pub(crate) mod pinner;
pub(crate) mod port;
pub(crate) mod recorder;
pub(crate) mod scheduler;
pub(crate) mod sent_tasks;
pub(crate) mod slot_memory;
pub(crate) mod stream;
pub(crate) mod thread_queues;
pub(crate) mod turns;
pub(crate) mod worker_clock;
pub(crate) mod worker_fds;
