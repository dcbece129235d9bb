//! Batches on their way from the transport to the caller, as Python classes.
//!
//! | file | about |
//! |---|---|
//! | `arrival.rs` | a batch that was taken and not yet handed out, in any form |
//! | `pinning.rs` | makes the pinned form |

pub(crate) mod arrival;
#[allow(unsafe_code, reason = "vouches for the addresses between which it copies")]
pub(crate) mod pinning;
