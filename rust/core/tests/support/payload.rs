//! Plain memory beside the atomics: what a missing ordering is a race on.
//!
//! Descriptors are atomics, so without a plain cell a missing Release would only show as an old
//! value, which neither loom nor ThreadSanitizer calls wrong.
#![allow(unsafe_code, reason = "the tools that judge this test look for races on plain memory")]

#[cfg(ringloader_loom)]
use loom::cell::UnsafeCell;
#[cfg(not(ringloader_loom))]
use std::cell::UnsafeCell;

/// A plain `u64` that the code under test keeps from being used by two threads at once.
#[derive(Debug)]
pub(crate) struct Payload(UnsafeCell<u64>);

// SAFETY: this is the claim under test. Each user orders its accesses by the ring that it tests; where
// that fails, loom or ThreadSanitizer reports the access.
unsafe impl Sync for Payload {}

impl Payload {
    pub(crate) fn new() -> Self {
        Self(UnsafeCell::new(0))
    }

    pub(crate) fn cells(count: usize) -> Vec<Self> {
        (0..count).map(|_| Self::new()).collect()
    }

    #[cfg(ringloader_loom)]
    #[track_caller]
    pub(crate) fn write(&self, value: u64) {
        // SAFETY: the pointer is that of a live cell; loom fails the model if another access overlaps.
        self.0.with_mut(|cell| unsafe { *cell = value });
    }

    #[cfg(ringloader_loom)]
    #[track_caller]
    pub(crate) fn read(&self) -> u64 {
        // SAFETY: the pointer is that of a live cell; loom fails the model if a write overlaps.
        self.0.with(|cell| unsafe { *cell })
    }

    #[cfg(not(ringloader_loom))]
    pub(crate) fn write(&self, value: u64) {
        // SAFETY: the pointer is that of a live cell; that no other access overlaps is under test.
        unsafe { *self.0.get() = value };
    }

    #[cfg(not(ringloader_loom))]
    pub(crate) fn read(&self) -> u64 {
        // SAFETY: the pointer is that of a live cell; that no write overlaps is under test.
        unsafe { *self.0.get() }
    }
}
