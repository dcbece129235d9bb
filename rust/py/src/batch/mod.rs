//! A batch: Python objects to leaves and a skeleton, and back.

pub(crate) mod decode;
pub(crate) mod encode;
pub(crate) mod groups;
pub(crate) mod layout;
pub(crate) mod leaves;
pub(crate) mod template;
#[allow(unsafe_code, reason = "copies from objects' memory by its address")]
pub(crate) mod write;

/// Storages up to this size are copied out: a kept label must not keep a batch of images.
pub(crate) const SMALL: u64 = 8192;

/// Deeper than any tree that a worker writes.
pub(crate) const MOST_DEPTH_READ: u32 = 200;

/// The longest table whose memory is kept for the next batch, and which is compared with the next one's.
pub(crate) const LONGEST_TABLE_KEPT: usize = 256 << 10;
