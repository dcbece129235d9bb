//! Two processes over the real memfd: batches of all sizes, checked byte for byte, while workers are
//! killed and the user keeps what he likes.
//!
//! The binary runs itself again as a worker. Without arguments every run takes a second or two;
//! `RINGLOADER_TEST_SECONDS` gives the storm of kills more, `RINGLOADER_TEST_SEED` other numbers. With
//! `--cfg ringloader_pauses` each named moment between two stores is a place to die as well.
#[cfg(all(target_os = "linux", not(ringloader_portable), not(ringloader_loom)))]
mod content;
#[cfg(all(target_os = "linux", not(ringloader_portable), not(ringloader_loom)))]
mod control;
#[cfg(all(target_os = "linux", not(ringloader_portable), not(ringloader_loom)))]
mod forks;
#[cfg(all(target_os = "linux", not(ringloader_portable), not(ringloader_loom)))]
mod keeper;
#[cfg(all(target_os = "linux", not(ringloader_portable), not(ringloader_loom)))]
mod parent;
#[cfg(all(all(target_os = "linux", not(ringloader_portable), not(ringloader_loom)), ringloader_pauses))]
mod points;
#[cfg(all(target_os = "linux", not(ringloader_portable), not(ringloader_loom)))]
mod runs;
#[cfg(all(target_os = "linux", not(ringloader_portable), not(ringloader_loom)))]
mod storms;
#[cfg(all(target_os = "linux", not(ringloader_portable), not(ringloader_loom)))]
mod worker;

#[cfg(all(target_os = "linux", not(ringloader_portable), not(ringloader_loom)))]
fn main() {
    runs::main();
}

#[cfg(not(all(target_os = "linux", not(ringloader_portable), not(ringloader_loom))))]
fn main() {}
