//! Both ends of each transport, as Python classes.
//!
//! | file | about |
//! |---|---|
//! | `engine.rs` | shared memory, the parent's end |
//! | `port.rs` | shared memory, a worker's end |
//! | `memory.rs` | shared memory: descriptors for a worker, slots for a driver |
//! | `shared_tasks.rs` | shared memory: tasks that all workers share, both ends |
//! | `joint_batch.rs` | shared memory: a batch of theirs, as it is sent |
//! | `queues.rs` | both ends between threads |
//! | `relay.rs` | shared memory of workers on other machines: both relays |

pub(crate) mod engine;
mod joint_batch;
pub(crate) mod memory;
pub(crate) mod port;
pub(crate) mod queues;
pub(crate) mod relay;
pub(crate) mod shared_tasks;
