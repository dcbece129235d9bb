//! Plans which worker does which task, and in which order the results are handed out: torch's rules, without processes
//! or memory.
//!
//! | module | is about |
//! |---|---|
//! | [`sampler`] | batches of a sampler's indices, over what torch draws |
//! | [`shuffle`] | a permutation that is made while it is read |
//! | [`ordinals`] | sets of an epoch's samples, as ranges |
//! | [`ledger`] | which samples were handed to the caller, and its position in the epoch |
//! | [`fingerprint`] | whether the samples that were passed over are those of a state |
//! | [`places`] | the place of each sample in its epoch |
//! | [`worker_selector`] | which worker gets the next task |
//! | [`worker_progress`] | which worker's batches were handed to the caller, and which worker's batch is next |
//! | [`reorder`] | tasks that were sent, results that arrived, and whose turn it is |
//!
//! Nothing here draws, waits or sends: a stream says when it needs indices, and the caller fetches them at that moment.
//!
//! ```
//! use ringloader_core::plan::{BatchRule, Chunk, Next, ReorderBuffer, ResultOrder, Step, Stream, WorkerSelector};
//!
//! let mut stream = Stream::new(Some(BatchRule { size: 2, drop_last: false }))?;
//! assert_eq!(stream.next(), Step::Need);
//! stream.supply(Some(Chunk::Range { start: 0, step: 1, len: 5 }));
//! let mut selector = WorkerSelector::new(2, 1, ResultOrder::InOrder);
//! let mut tasks = ReorderBuffer::new();
//! while let Step::Batch(_indices) = stream.next() {
//!     let worker = selector.choose().expect("all workers are active");
//!     selector.record_sent(worker);
//!     tasks.send(worker);
//! }
//!
//! tasks.arrive(1, "second")?;
//! assert_eq!(tasks.next(|worker| selector.is_active(worker)), Next::Wait { seq: 0, worker: 0 });
//! tasks.arrive(0, "first")?;
//! let next = tasks.next(|worker| selector.is_active(worker));
//! assert_eq!(next, Next::Ready { seq: 0, worker: 0, data: "first" });
//! # Ok::<(), ringloader_core::Error>(())
//! ```

pub mod fingerprint;
pub mod ledger;
pub mod ordinals;
pub mod places;
pub mod reorder;
pub mod sampler;
pub mod shuffle;
pub mod worker_progress;
pub mod worker_selector;

pub use fingerprint::fingerprint_of;
pub use ledger::{Ledger, Position};
pub use ordinals::OrdinalSet;
pub use places::{Places, TaskPlaces};
pub use reorder::{Next, ReorderBuffer};
pub use sampler::{BatchRule, Chunk, Indices, Step, Stream};
pub use shuffle::Shuffle;
pub use worker_progress::WorkerProgress;
pub use worker_selector::{ResultOrder, WorkerSelector};
