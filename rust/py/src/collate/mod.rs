//! torch's `default_collate` and `default_convert`, and `ringloader.batchify.Pad`, native for common types.

mod batch_memory;
pub(crate) mod default_collate;
pub(crate) mod default_convert;
mod fallback;
pub(crate) mod first_of;
#[allow(unsafe_code, reason = "copies from an array's memory by its address")]
pub(crate) mod gather;
mod kinds;
pub(crate) mod pad;
#[allow(unsafe_code, reason = "copies from samples' memory by its address, and writes a batch's")]
mod padded;
mod ragged;
#[allow(unsafe_code, reason = "copies from samples' memory by its address")]
mod rows;
mod unchanged;
