//! Memory that was lent out when the process forked, and given back since: a child may still have it.
//!
//! A forked child has the mapping, and every object that lies over it. What the parent lends out again, or gives back
//! to the system, changes under the child; what the child writes lands in the next batch. So a thing that was lent
//! before a fork and is returned after it is *kept*, as if it were lent still, until every child that was forked in
//! between, and all that these have forked, has ended or run another program. While a slot is kept, no worker fills it,
//! its memory is not punched, a stored engine counts it as held, and it counts against what the user may hold. The same
//! holds for the segment of an oversize batch and, in a worker, for what collation has put into a slot: the dataset may
//! fork too.
//!
//! | file | about |
//! |---|---|
//! | [`clock`] | when something was lent: before or after which forks |
//! | [`children`] | the forked children that live, and what is kept for them |
//!
//! Nothing here forks or asks the system. That is for [`process`](crate::process), through [`Child`]. The package
//! reports forks to it by `os.register_at_fork`, in workers too.
//!
//! The process looks for children that have gone when such a lease is released or refused, every 10 ms while the parent
//! waits for a batch, when an engine is made, stored, taken or closed, and at the next fork. While no loader works and
//! nothing forks, it does not look.
//!
//! `tests/loom_forks.rs` has the models, `tests/two_process/forks.rs` the storm.

pub mod children;
pub mod clock;

pub use children::{Child, Forks};
pub use clock::{ForkClock, Moment};
