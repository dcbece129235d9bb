//! Both ends of each transport, as Python classes.
//!
//! | file | about |
//! |---|---|
//! | `engine.rs`, `event.rs` | shared memory, the parent's end, and what it waits for |
//! | `port.rs`, `port/` | shared memory, a worker's end; how it sends a batch, also one that all workers have made |
//! | `memory.rs` | shared memory: descriptors for a worker, slots for a driver |
//! | `joint_engine.rs`, `joint_port.rs` | shared memory: tasks that all workers share, the parent's and a worker's end |
//! | `claimed.rs` | a worker's claim of such a task, and the index that it asks for |
//! | `queues.rs` | both ends between threads |
//! | `relay.rs` | shared memory of workers on other machines: both relays |

pub(crate) mod claimed;
pub(crate) mod engine;
pub(crate) mod event;
pub(crate) mod joint_engine;
pub(crate) mod joint_port;
pub(crate) mod memory;
pub(crate) mod port;
pub(crate) mod queues;
pub(crate) mod relay;
