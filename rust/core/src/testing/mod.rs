//! What the tests and gates switch on in the code itself. In a build as it ships, all of it is nothing.
//!
//! | module | about |
//! |---|---|
//! | [`failpoint`] | moments at which a test stops or kills the process |
//! | [`fault`] | wrong orderings on purpose, for the gates that must catch them |
//! | `crash` | under loom: atomics whose thread can be killed before any store |

#[cfg(ringloader_loom)]
pub mod crash;
pub mod failpoint;
pub mod fault;
