//! torch's `default_collate` and `default_convert`, native for common types.

pub(crate) mod default_collate;
pub(crate) mod default_convert;
mod fallback;
mod kinds;
#[allow(unsafe_code, reason = "copies from samples' memory by its address")]
mod rows;
