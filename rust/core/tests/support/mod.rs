//! Shared by the tests that judge orderings: under loom, and with real threads under ThreadSanitizer.

pub(crate) mod heap_words;
#[cfg(ringloader_loom)]
pub(crate) mod model;
pub(crate) mod payload;

use ringloader_core::pool::SlotWords;
use ringloader_core::sync::{AtomicU32, AtomicU64};
