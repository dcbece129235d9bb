//! Shared memory: the segment, the structures that lie in it, and what the machine has left.

pub mod available;
pub mod handover;
#[allow(unsafe_code, reason = "turns mapped memory into references to the structures in it")]
pub mod layout;
#[allow(unsafe_code, reason = "maps and unmaps memory, copies bytes in and out")]
pub mod segment;

pub(crate) use layout::GRANULE;
pub use layout::{Control, Counters, Geometry, WorkerView};
pub use segment::Segment;
pub(crate) use segment::page_size;
