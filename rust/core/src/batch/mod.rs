//! A batch as bytes.
//!
//! A batch is sent as *leaves*, which are bytes in memory (tensors, arrays, storages, `bytes` objects), and a
//! *skeleton*, the tree of containers, numbers and strings around them. The [`wire`] module holds the block that
//! describes both; the bytes of the leaves themselves lie elsewhere and are never read here.
//!
//! | module | is about |
//! |---|---|
//! | [`alias`] | which leaves share memory, and where it goes |
//! | [`dtype`] | element types and their DLPack codes |
//! | [`rows`] | samples that are the rows of their batch |
//! | [`wire`] | the table of storages and leaves: written, checked, read |
//! | [`skeleton`] | the tree as a flat stream of tokens |
//! | `varint` | numbers in as few bytes as they need |
//!
//! The sender may have died at any instruction, so reading never panics, never trusts a length, and allocates at
//! most in proportion to the block. What [`Meta::parse`] accepts satisfies every bound that an unsafe caller needs.
//!
//! ```
//! use ringloader_core::batch::{Dtype, Meta, MetaWriter, StorageRecord, Token};
//!
//! let mut writer = MetaWriter::default();
//! let storage = writer.add_storage(StorageRecord { offset: 64, nbytes: 24 });
//! let leaf = writer.add_tensor(storage, 0, Dtype::F32, &[2, 3], &[3, 1]);
//! writer.skeleton().list(1);
//! writer.skeleton().leaf(leaf);
//! let block = writer.finish(7);
//!
//! let meta = Meta::parse(block, 7, 128)?;
//! assert!(meta.leaf(0).unwrap().shape().iter().eq([2, 3]));
//! let tokens = meta.skeleton().collect::<Result<Vec<_>, _>>()?;
//! assert_eq!(tokens, [Token::List(1), Token::Leaf(0)]);
//! # Ok::<(), ringloader_core::Error>(())
//! ```

pub mod alias;
pub mod dtype;
pub mod rows;
pub mod skeleton;
mod varint;
pub mod wire;

pub use dtype::Dtype;
pub use skeleton::{SkeletonReader, SkeletonWriter, Token, integers};
pub use wire::{ArrayFlags, Dims, Leaf, LeafKind, Meta, MetaWriter, StorageRecord};
