//! Clocks, in nanoseconds.

use rustix::time::{ClockId, clock_gettime};

/// Time that all processes of the machine agree on, and that never goes back.
#[must_use]
pub fn monotonic() -> u64 {
    nanoseconds(ClockId::Monotonic)
}

/// Returns the processor time of this thread.
#[must_use]
pub fn thread_cpu() -> u64 {
    nanoseconds(ClockId::ThreadCPUTime)
}

fn nanoseconds(clock: ClockId) -> u64 {
    let now = clock_gettime(clock);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}
