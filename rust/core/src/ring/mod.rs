//! Rings of descriptors between two processes, and the bytes of their tasks.
//!
//! | module | about |
//! |---|---|
//! | [`cursor`] | positions: index, distance, order; pure |
//! | [`spsc`] | one producer, one consumer, 64-byte descriptors; atomics, no unsafe |
//! | [`arena`] | where the bytes of a task lie, freed in the order of the ring; pure |

pub mod arena;
pub mod cursor;
pub mod spsc;

pub use arena::ByteFifo;
pub use spsc::{Consumer, Descriptor, Producer, Ring, RingHeader, WORDS, Words};
