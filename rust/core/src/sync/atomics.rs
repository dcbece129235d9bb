//! The atomics that the core imports: std's, or loom's under `--cfg ringloader_loom`.

#[cfg(ringloader_loom)]
pub use crate::testing::crash::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize};
#[cfg(ringloader_loom)]
pub use loom::{
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{Ordering, fence},
    },
    thread,
};
#[cfg(not(ringloader_loom))]
pub use std::{
    sync::{
        Arc, Mutex, MutexGuard, Weak,
        atomic::{AtomicBool, AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence},
    },
    thread,
};

use crate::testing::fault::fault;

/// `Release`, or `Relaxed` where the fault `name` is planted.
#[inline(always)]
pub fn release_unless(name: &str) -> Ordering {
    if fault(name) { Ordering::Relaxed } else { Ordering::Release }
}

/// `Acquire`, or `Relaxed` where the fault `name` is planted.
#[inline(always)]
pub fn acquire_unless(name: &str) -> Ordering {
    if fault(name) { Ordering::Relaxed } else { Ordering::Acquire }
}

/// `AcqRel`, or `Relaxed` where the fault `name` is planted.
#[inline(always)]
pub fn acq_rel_unless(name: &str) -> Ordering {
    if fault(name) { Ordering::Relaxed } else { Ordering::AcqRel }
}
