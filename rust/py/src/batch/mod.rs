//! A batch: Python objects to leaves and a skeleton, and back; its way to a device.
//!
//! | file | about |
//! |---|---|
//! | `encode.rs` | a Python batch to leaves and a skeleton |
//! | `leaves.rs` | the leaves, and where their bytes are |
//! | `groups.rs` | the storages in which leaves lie |
//! | `write.rs` | the bytes, copied to the batch's memory |
//! | `decode.rs` | leaves and a skeleton to a Python batch |
//! | `template.rs` | the same for a batch that looks like the one before |
//! | `rows.rs` | rows of a batch that all workers make, to the batch or to its samples |
//! | `layout.rs` | the tensors' way to a device |

pub(crate) mod decode;
pub(crate) mod encode;
pub(crate) mod groups;
pub(crate) mod layout;
pub(crate) mod leaves;
pub(crate) mod rows;
pub(crate) mod template;
#[allow(unsafe_code, reason = "copies from objects' memory by its address")]
pub(crate) mod write;

/// Storages up to this size are copied out: a kept label must not keep a batch of images.
pub(crate) const SMALL: u64 = 8192;

/// Deeper than any tree that a worker writes.
pub(crate) const MOST_DEPTH_READ: u32 = 200;

/// The longest table whose memory is kept for the next batch, and which is compared with the next one's.
pub(crate) const LONGEST_TABLE_KEPT: usize = 256 << 10;
