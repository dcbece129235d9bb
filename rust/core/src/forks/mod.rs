//! Memory that was lent out when the process forked, and given back since: a child may still have it.
//!
//! A forked child has the mapping, and every object that lies over it. What the parent lends out again, or gives
//! back to the system, changes under the child; what the child writes lands in the next batch. So a thing that was
//! lent before a fork and is returned after it is *kept*, as if it were lent still, until every child that was
//! forked in between, and all that these have forked, has ended or run another program.
//!
//! | file | about |
//! |---|---|
//! | [`clock`] | when something was lent: before or after which forks |
//! | [`children`] | the forked children that live, and what is kept for them |
//!
//! Nothing here forks or asks the system. That is for [`process`](crate::process), through [`Child`].

pub mod children;
pub mod clock;

pub use children::{Child, Forks};
pub use clock::{Clock, Moment};
