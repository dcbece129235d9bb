//! Everything: the transport needs Linux.

pub(crate) mod collate;
pub(crate) mod convert;
pub(crate) mod decode;
#[allow(unsafe_code, reason = "hands memory to torch and takes it back")]
pub(crate) mod dlpack;
pub(crate) mod encode;
pub(crate) mod engine;
pub(crate) mod enter;
pub(crate) mod forks;
pub(crate) mod grouping;
pub(crate) mod identity;
#[allow(unsafe_code, reason = "reads memory of Python objects by its address")]
pub(crate) mod objects;
pub(crate) mod original;
pub(crate) mod port;
pub(crate) mod scheduler;
pub(crate) mod stream;
pub(crate) mod template;
pub(crate) mod torch;
