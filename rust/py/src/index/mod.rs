//! Indices: where they come from, and how they travel.

pub(crate) mod codec;
pub(crate) mod places;
#[allow(unsafe_code, reason = "reads a tensor's elements by their address")]
pub(crate) mod tensor;
pub(crate) mod values;
