//! Shared by the tests that judge orderings: under loom, and with real threads under ThreadSanitizer.

#[cfg(ringloader_loom)]
pub(crate) mod model;
pub(crate) mod payload;
