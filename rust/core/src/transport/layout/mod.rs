//! The layout of a segment.
//!
//! | module | about |
//! |---|---|
//! | `geometry` | sizes and offsets |
//! | `structures` | headers, counters, one worker's view |
//! | `control` | a segment with structures in it |
//! | `open` | it is made, and attached |
//! | `views` | pointers into the mapping become references |
//!
//! ```text
//! [header, ready bits | worker 0: control | worker 1: control | .. ]  dense: a few pages
//! [worker 0: task arena | worker 1: task arena | .. ]                 sparse
//! [worker 0: window of slot 0, 1, .. | worker 1: .. ]                 sparse, nearly all of the address space
//! ```
//!
//! INVARIANT L1: a [`Control`]'s geometry fits its segment: every range it names ends inside the mapping.
//! INVARIANT L2: every structure lies at a multiple of its alignment; the mapping starts at a page. Control blocks,
//! arenas and windows begin and end at multiples of `GRANULE`, so at pages, whatever the size of the machine's.
//! INVARIANT L3: a fresh memfd reads as zero, and zero is a valid value of every structure here:
//! they consist of atomics and padding.
//! INVARIANT L4: the ranges of different structures and of different workers do not overlap.

mod control;
mod geometry;
mod open;
mod structures;
#[allow(unsafe_code, reason = "turns mapped memory into references to the structures in it")]
mod views;

#[cfg(test)]
mod tests;

pub use control::Control;
pub(crate) use geometry::GRANULE;
pub use geometry::Geometry;
pub use structures::{Counters, Counts, WorkerView};
