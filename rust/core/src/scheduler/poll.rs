//! The next step towards the next batch.

use std::time::Duration;

use crate::error::{Error, Result};

/// The next step towards the next batch.
#[derive(Debug)]
pub enum Poll<T, D> {
    /// The epoch is over.
    End,
    /// A result that [`Scheduler::accept`](super::Scheduler::accept) kept; it is its turn.
    Ready {
        /// The task that the result answers.
        seq: u64,
        /// The worker that made it.
        worker: u32,
        /// The result.
        data: T,
    },
    /// A result has come: look at it, then [`Scheduler::accept`](super::Scheduler::accept) it or say that it was the worker's
    /// [end](super::Scheduler::end_worker).
    Arrived {
        /// The task that the result answers.
        seq: u64,
        /// The result.
        received: D,
    },
    /// A result has come and cannot be read. Give [`Scheduler::accept`](super::Scheduler::accept) a stand-in, so that the caller does not wait for
    /// it.
    Failed {
        /// The task that the result answers.
        seq: u64,
        /// Why.
        error: Error,
    },
    /// A result of the next epoch, whose tasks are [out already](super::Scheduler::follow), has come:
    /// [`buffer`](super::Scheduler::buffer) it there.
    Early {
        /// The task that the result answers.
        seq: u64,
        /// The result, or the reason why it is lost.
        found: Result<D>,
    },
    /// Nothing has come: wait for this worker, or for any.
    Wait {
        /// The worker whose result is next; `None` when any will do.
        worker: Option<u32>,
        /// No longer than this.
        limit: Duration,
    },
    /// This worker's process has ended, and a result of its will never come.
    Lost {
        /// The worker.
        worker: u32,
    },
}
