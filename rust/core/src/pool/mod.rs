//! Slots: the places in shared memory that batches are written to, and which side holds each of them.
//!
//! A worker owns K slots, each a fixed window of address space of which the first `touched` bytes
//! are backed by memory. Only the worker hands slots out, from private state ([`WorkerSlots`]); the
//! parent holds, leases and returns them ([`Leases`]). The two meet in the shared words
//! ([`SlotWords`]) and nowhere else. Nothing here waits, locks or calls the system; that is for the
//! caller, through [`Pages`].
//!
//! ```text
//!            begin                commit              drain: hold             release
//!   FREE ------------> FILLING ------------> COMMITTED ------------> HELD ------------> RETURNED
//!    ^                    |                                                                |
//!    |                    | abandon                                                        | sweep
//!    +--------------------+<------------- no own lease is left ---- OWN-LEASED <-----------+
//! ```
//!
//! | transition | by | what is stored |
//! |---|---|---|
//! | FREE -> FILLING | worker, [`WorkerSlots::begin`] | nothing shared |
//! | FILLING grows | worker, [`WorkerSlots::grow`] | `resident`, `touched[slot]`, before the pages are used |
//! | FILLING -> FREE | worker, [`WorkerSlots::abandon`] | nothing shared |
//! | FILLING -> COMMITTED | worker, [`WorkerSlots::commit`] | nothing here; the ring's `tail` publishes it |
//! | COMMITTED -> HELD | parent at drain, [`Leases::hold`] | `holds[slot] += 1` |
//! | HELD -> RETURNED | any thread of the parent, [`Leases::release`] | the slot's `free` bit, **then** `holds[slot] -= 1` |
//! | RETURNED -> FREE | worker, when it sweeps | the `free` word is swapped to 0 |
//! | RETURNED -> OWN-LEASED -> FREE | worker, when it sweeps | nothing shared: an [`OwnLease`] of the worker kept the slot |
//! | FREE loses pages | worker, making room in `grow`, or in `shrink` | `touched[slot]`, `resident`, after the pages are gone |
//! | HELD is registered | parent, [`Leases::set_registered`] | `registered[slot]`, before the driver has the pages |
//!
//! The worker cannot tell COMMITTED from HELD, and does not have to. A slot may be FILLING again, even
//! COMMITTED and HELD again, while the thread that released it is still between its two stores:
//! hence `holds` counts, and hence the order. With the counter lowered first, a take-over in
//! between would see a slot that is not held, hand it out, and then receive its `free` bit a
//! second time.
//!
//! The segment of an oversize batch has a word instead, which says on which side it is ([`Custody`]).
//!
//! # When a worker dies
//!
//! The parent drains the dead worker's ring, reads [`Leases::busy`], and only **then** does the
//! successor swap the
//! `free` words, in [`WorkerSlots::take_over`]: a slot is in use if it was busy and its bit was not there.
//!
//! | the worker died | left behind | repaired by |
//! |---|---|---|
//! | after it swapped a `free` word | the bits are lost | `holds`: not busy is free |
//! | while filling | garbage in a slot | not busy: free |
//! | between `resident`, `touched` and the first use | an over-count | the sum over `touched` |
//! | between the punch and its stores | an over-count | the sum; punching again does no harm |
//! | before the ring's `tail` was stored | a batch that is not seen | not busy: free; the task is done again |
//! | after it | a committed batch | drained, so held, so busy |
//! | with own leases | nothing | they are private memory of the worker |
//!
//! | a release was | then the successor finds | and the slot is |
//! |---|---|---|
//! | before its first store | busy, no bit | in use until the bit comes |
//! | between its stores | busy, the bit | free |
//! | between its stores, the bit lost with the dead worker | busy, no bit | unused until the next take-over |
//! | done | not busy | free |
//!
//! # When the transport closes
//!
//! The workers have ended. Every slot that is not held is retired ([`retire`]), and every other one by
//! the thread that ends its last hold ([`Closing`]): its pages are given back once, when it is not held. A slot of
//! which a driver has memory ([`registered`]) is held in this sense until it is unregistered.

mod budget;
mod chunks;
mod closing;
mod custody;
mod lease;
pub mod registered;
mod words;
mod worker;

#[cfg(test)]
#[path = "../../tests/support/heap_words.rs"]
mod heap_words;
#[cfg(test)]
use crate::sync::{AtomicU32, AtomicU64};

pub use budget::{Growth, Limits, Pages};
pub use chunks::Fill;
pub use closing::{Closing, retire};
pub use custody::Custody;
pub use lease::Leases;
pub use words::{SlotId, SlotWords};
pub use worker::{OwnLease, WorkerSlots};
