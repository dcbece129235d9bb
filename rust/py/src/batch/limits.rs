//! Sizes and depths at which a batch is treated in another way.

/// Storages up to this size are copied out: a kept label must not keep a batch of images.
pub(crate) const SMALL: u64 = 8192;

/// Tensors up to this size go to a device with others, in one copy.
pub(crate) const PACKED: u64 = 64 << 10;

/// The most bytes that cross to a device together. As long as they are taken apart, they are there twice.
pub(crate) const LARGEST_BLOCK: u64 = 1 << 20;

/// The alignment of tensors in a block: four words, which a device's thread reads at once.
pub(crate) const BLOCK_ALIGNMENT: u64 = 32;

/// Trees that are deeper are pickled, which has a limit and an error of its own.
pub(crate) const MOST_DEPTH_WRITTEN: u32 = 100;

/// Deeper than any tree that a worker writes.
pub(crate) const MOST_DEPTH_READ: u32 = 200;

/// The longest table whose memory is kept for the next batch, and which is compared with the next one's.
pub(crate) const LONGEST_TABLE_KEPT: usize = 256 << 10;

/// Longer `bytes` are leaves, shorter ones lie in the skeleton.
pub(crate) const INLINE_BYTES: usize = 4096;

/// The fewest integers of a list that are written as one token.
pub(super) const FEWEST_INTEGERS: usize = 4;
