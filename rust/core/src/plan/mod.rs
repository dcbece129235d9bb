//! Plans which worker does which task, and in which order the results are handed out: torch's rules, without processes
//! or memory.
//!
//! | module | is about |
//! |---|---|
//! | [`sampler`] | torch's samplers as streams of indices, over random numbers that torch drew |
//! | [`delivered`] | which samples of an epoch were delivered |
//! | [`ledger`] | what of an epoch was handed to the caller, and where it therefore is |
//! | [`fingerprint`] | whether the samples that were passed over are those of a state |
//! | [`places`] | the place of each sample in its epoch |
//! | [`dispatch`] | which worker gets the next task |
//! | [`turns`] | which worker's batches were handed to the caller, and whose turn it is then |
//! | [`reorder`] | tasks that were sent, results that arrived, and whose turn it is |
//!
//! Nothing here draws, waits or sends: a stream says what it needs, and the caller fetches it at that moment.
//!
//! ```
//! use ringloader_core::plan::{BatchRule, Dispatch, Next, Order, ReorderBuffer, Source, Step, Stream};
//!
//! let mut stream = Stream::new(Source::Sequential { len: 5 }, Some(BatchRule { size: 2, drop_last: false }))?;
//! let mut dispatch = Dispatch::new(2, 1, Order::InOrder);
//! let mut tasks = ReorderBuffer::new();
//! while let Step::Batch(_indices) = stream.next()? {
//!     let worker = dispatch.choose().expect("all workers are active");
//!     dispatch.sent(worker);
//!     tasks.send(worker);
//! }
//!
//! tasks.arrive(1, "second")?;
//! assert_eq!(tasks.next(|worker| dispatch.is_active(worker)), Next::Wait { seq: 0, worker: 0 });
//! tasks.arrive(0, "first")?;
//! let next = tasks.next(|worker| dispatch.is_active(worker));
//! assert_eq!(next, Next::Ready { seq: 0, worker: 0, data: "first" });
//! # Ok::<(), ringloader_core::Error>(())
//! ```

pub mod delivered;
pub mod dispatch;
pub mod fingerprint;
pub mod ledger;
pub mod places;
pub mod reorder;
pub mod sampler;
pub mod turns;

pub use delivered::Delivered;
pub use dispatch::{Dispatch, Order};
pub use fingerprint::{fingerprint_of, hash_of_words, sample_hash};
pub use ledger::{Ledger, Position};
pub use places::{Places, Run, TaskPlaces};
pub use reorder::{Next, ReorderBuffer};
pub use sampler::{BatchRule, Draw, Indices, Source, Step, Stream, Supply};
pub use turns::Turns;
