//! Indices: where they come from, how they travel, and which of them the caller has got.
//!
//! | file | about |
//! |---|---|
//! | `source.rs` | the source of a scheduler's indices in one epoch |
//! | `stream.rs` | batches of torch's samplers; a permutation that is made while it is read |
//! | `codec.rs` | an index as the bytes of a task |
//! | `places.rs` | the places of samples in their epoch, for workers that seed by them |
//! | `ledger.rs` | the position of an epoch |
//! | `fingerprint.rs` | indices as numbers, to compare those of two runs |

pub(crate) mod codec;
pub(crate) mod fingerprint;
pub(crate) mod ledger;
pub(crate) mod places;
pub(crate) mod source;
pub(crate) mod stream;
