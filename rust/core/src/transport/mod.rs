//! Tasks to the workers and results back, over shared memory.
//!
//! | module | about |
//! |---|---|
//! | [`layout`] | what lies where in the segment |
//! | [`message`] | what a descriptor means |
//! | [`engine`] | the parent's side, composed |
//! | [`port`] | a worker's side, likewise |
//! | [`delivery`] | a batch that arrived, and who keeps its bytes |

pub mod delivery;
pub mod engine;
#[allow(unsafe_code, reason = "turns mapped memory into references to the structures in it")]
pub mod layout;
pub mod message;
pub mod port;

pub use layout::{Control, Counters, Geometry, WorkerView};
