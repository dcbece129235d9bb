//! Two processes over the real memfd: batches of all sizes, checked byte for byte, while workers are
//! killed and the user keeps what he likes.
//!
//! The binary runs itself again as a worker. Without arguments every run takes a second or two;
//! `RINGLOADER_TEST_SECONDS` gives the storm of kills more, `RINGLOADER_TEST_SEED` other numbers. With
//! `--cfg ringloader_failpoints` each named moment between two stores is a place to die as well.
#[cfg(all(target_os = "linux", not(ringloader_portable), not(ringloader_loom)))]
#[path = "."]
mod linux {
    mod content;
    mod forks;
    mod joint;
    mod keeper;
    mod parent;
    #[cfg(ringloader_failpoints)]
    mod points;
    mod registered;
    pub(crate) mod runs;
    mod samples;
    mod scheduling;
    mod storms;
    mod worker;
}

fn main() {
    #[cfg(all(target_os = "linux", not(ringloader_portable), not(ringloader_loom)))]
    linux::runs::main();
}
