//! Faults planted on purpose: a gate that never saw a wrong ordering fail proves nothing.
//!
//! Every commit point asks here for its ordering by the name of the fault that weakens it. Outside
//! a build with `--cfg ringloader_faults` the answer is a constant, and the right one. In such a
//! build the variable `RINGLOADER_FAULT` selects one fault by its name; `ci/loom.sh` and
//! `ci/tsan.sh` list them and require that each is caught.

#[cfg(ringloader_faults)]
use std::sync::atomic::{AtomicU64, Ordering};

/// Returns true if the fault `name` is planted in this run.
#[cfg(not(ringloader_faults))]
#[inline(always)]
pub const fn fault(name: &str) -> bool {
    let _ = name;
    false
}

/// Returns true if the fault `name` is planted in this run.
#[cfg(ringloader_faults)]
pub fn fault(name: &str) -> bool {
    const UNREAD: u64 = 0;
    // An atomic hash, not a string in a `OnceLock`: the standard library is not instrumented, so that
    // ThreadSanitizer would report the string. No loom atomic either: the choice is not of the model.
    static SELECTED: AtomicU64 = AtomicU64::new(UNREAD);
    let mut selected = SELECTED.load(Ordering::Relaxed);
    if selected == UNREAD {
        selected = hash(&std::env::var("RINGLOADER_FAULT").unwrap_or_default());
        SELECTED.store(selected, Ordering::Relaxed);
    }
    selected == hash(name)
}

/// FNV-1a, which is not 0 for any name in use.
#[cfg(ringloader_faults)]
const fn hash(name: &str) -> u64 {
    let (bytes, mut hash, mut at) = (name.as_bytes(), 0xcbf2_9ce4_8422_2325_u64, 0);
    while at < bytes.len() {
        hash = (hash ^ bytes[at] as u64).wrapping_mul(0x0100_0000_01b3);
        at += 1;
    }
    hash
}
