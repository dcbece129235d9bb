//! The cost of a sample, and the size of a run that follows from it.

use super::MOST_RUNS;

/// The time that a run is to take: many times what it costs to hand it out.
const RUN_NANOSECONDS: u64 = 1_000_000;
/// A sample is dear to send where that takes more than one part in this many of the time to make it.
const DEAR: u64 = 4;

/// The measured cost of a sample, in nanoseconds; 0: not known.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Cost {
    /// To make it.
    pub making: u64,
    /// To bring it from the worker that makes it to the one that collates.
    pub sending: u64,
}

/// Returns how many samples of a batch make a run: as many as take about a millisecond, at most an even share. A batch
/// that takes no longer is not cut, nor is one whose samples cost more than a little to send.
#[must_use]
pub fn per_run(samples: u64, workers: u32, cost: Cost) -> u64 {
    let least = samples.div_ceil(MOST_RUNS.into());
    let even = samples.div_ceil(workers.max(1).into()).max(least);
    if cost.making == 0 {
        return even;
    }
    let timely = (RUN_NANOSECONDS / cost.making).max(1);
    if timely >= samples || cost.sending > cost.making / DEAR {
        return samples;
    }
    timely.min(even).max(least)
}

/// Returns the mean time of a sample, after one that took `nanoseconds`.
#[must_use]
pub fn mean(before: u64, nanoseconds: u64) -> u64 {
    if before == 0 {
        nanoseconds.max(1)
    } else {
        ((7 * before.min(1 << 56) + nanoseconds.min(1 << 56)) / 8).max(1)
    }
}
