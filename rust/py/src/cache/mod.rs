//! Samples that all processes share: a Python object to a record, and back.
//!
//! | file | about |
//! |---|---|
//! | `sample_cache.rs` | the class |
//! | `claim.rs` | the right of one thread to make a sample and keep it |
//! | `record.rs` | a sample's record in private memory: made of an object, or read; and the object of it |

mod claim;
#[allow(unsafe_code, reason = "vouches for the bytes of a record that were written")]
pub(crate) mod record;
pub(crate) mod sample_cache;
