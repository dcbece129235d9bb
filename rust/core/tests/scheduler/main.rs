//! The scheduler over ports in the same process.
#![cfg(all(target_os = "linux", not(ringloader_portable), not(ringloader_loom), not(ringloader_tsan)))]

mod arrivals;
#[path = "../plan/cases.rs"]
mod cases;
mod deaths;
mod fleet;
mod torch;
#[path = "../plan/torch_iterator.rs"]
mod torch_iterator;
