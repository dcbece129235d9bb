//! torch's `default_collate` and `default_convert`, native for common types.

mod batch_memory;
pub(crate) mod default_collate;
pub(crate) mod default_convert;
mod fallback;
pub(crate) mod first_of;
#[allow(unsafe_code, reason = "copies from an array's memory by its address")]
pub(crate) mod gather;
mod kinds;
#[allow(unsafe_code, reason = "copies from samples' memory by its address")]
mod rows;
mod unchanged;
