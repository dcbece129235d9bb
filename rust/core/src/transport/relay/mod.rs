//! The rings of workers on other machines, over TCP.
//!
//! The main process and the worker's process each have the rings and slots of a local worker, and a relay.
//! The relay of the main process is the worker there: it takes tasks out of the ring and commits results. The relay of
//! the worker's process is the parent there. A batch's bytes go from the worker's slot over the connection straight
//! into a slot of the main process; table and offsets stay as they are.
//!
//! ```text
//! main process                                              worker's process
//! Engine --- task ring ---> Port  MainRelay ==== TCP ==== WorkerRelay  Engine --- task ring ---> Port
//!        <-- result ring --                                                   <-- result ring --
//! ```
//!
//! | file | about |
//! |---|---|
//! | `frame.rs` | what travels over a connection |
//! | `handshake.rs` | who may begin one |
//! | `main_end.rs` | the main process's end: what callers see, and the thread that lets workers in |
//! | `shared.rs` | what its threads share |
//! | `link.rs` | one connection, in the main process, on a thread of its own |
//! | `flow_limit.rs` | how many batches may be on their way |
//! | `worker_end.rs` | the two threads of a worker's process |
//! | `peer_clock.rs` | the other machine's clock |
//!
//! # When a worker is lost
//!
//! A worker is lost when its connection ends, when it sends what no worker sends, when nothing is heard of it for
//! [`Beats::lost_after`], or when the caller [says so](main_end::MainRelay::lose). Then its link goes, with a batch that is half there, and the engine is told as
//! of a process that has ended. All that was committed is in the ring by then. A successor connects under the next
//! number; a connection under another number, or without a proof that it knows the token, is closed.
//!
//! A batch for which the main process has no memory ends its connection too, but its worker is
//! [not to blame](main_end::MainRelay::failure). A panic of a connection's thread ends the connection, likewise.
//!
//! A worker ends when nothing is heard of the main process for as long: its thread gives signs of life while it reads
//! nothing, too. TCP's own limit, `TCP_USER_TIMEOUT`, would end connections to a main process that has no room.
//!
//! # Room
//!
//! A batch waits in the connection until there is a slot for it: TCP stops the worker, whose own slots fill up, and
//! that stops its loop. What a worker sends after the engine is done is read and dropped, so that it can end.

#![warn(clippy::cast_possible_truncation)]

mod flow_limit;
mod frame;
mod handshake;
mod link;
pub mod main_end;
mod peer_clock;
mod shared;
pub mod worker_end;

#[cfg(test)]
#[allow(clippy::cast_possible_truncation, reason = "small numbers")]
mod tests;

use std::time::Duration;

/// When a worker is heard, and for how long it may be silent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Beats {
    /// The time between two signs of life.
    pub every: Duration,
    /// A worker that was silent for this long is lost.
    pub lost_after: Duration,
}

impl Default for Beats {
    fn default() -> Self {
        Self { every: Duration::from_secs(3), lost_after: Duration::from_secs(15) }
    }
}

/// The secret of an iterator, which whoever begins a connection must know.
pub type Token = [u8; 32];

/// The worker that a connection belongs to.
#[derive(Debug, Clone, Copy)]
pub struct Identity {
    /// The secret of the iterator.
    pub token: Token,
    /// The number of the worker.
    pub worker: u32,
    /// The number under which it is expected.
    pub number: u64,
}

/// Returns a length as an index. No system that this is for has smaller ones.
const fn usize_from(len: u64) -> usize {
    const { assert!(size_of::<usize>() == size_of::<u64>()) };
    #[allow(clippy::cast_possible_truncation, reason = "they have the same size")]
    {
        len as usize
    }
}
