//! The number of bytes that samples may take.
//!
//! The bound is looked up every 16 MiB, or sooner where little is left. Words of a table do not count. Without a bound of
//! the user's, a cache takes no more than it leaves free, so two that grow side by side take a third each. Memory above
//! the limit of the control group is not taken with a bound either.

use crate::os::memory::MemoryProbe;
use crate::os::shared_file::SharedFile;
use crate::sync::{AtomicU64, Ordering};

/// The most bytes between two looks at what the system has left, and which part of that they are at most.
const LOOK: u64 = 16 << 20;
const LOOK_PART: u64 = 16;
/// Samples that have no room between two such looks.
const TURNED_AWAY: u64 = 64;

/// The bound of one process. All that share samples count what all have taken.
#[derive(Debug)]
pub struct Bound {
    /// The bytes that the user allows.
    given: Option<u64>,
    /// Processes on this machine that have samples of their own, as this one.
    ranks: u64,
    probe: MemoryProbe,
    /// The bound by the last look, what was used then, and bytes until the next.
    limit: AtomicU64,
    looked_at: AtomicU64,
    step: AtomicU64,
    turned_away: AtomicU64,
}

impl Bound {
    /// Bounds samples by `given` bytes. Without it, by as many as the machine and the control group, or the file system of
    /// a file with a name, have left in addition to them; of these, `ranks` take an equal part.
    #[must_use]
    pub fn new(given: Option<u64>, ranks: u64) -> Self {
        let [limit, looked_at, step, turned_away] = [0; 4].map(AtomicU64::new);
        let ranks = ranks.max(1);
        Self { given, ranks, probe: MemoryProbe::new(), limit, looked_at, step, turned_away }
    }

    /// True if the user allows fewer bytes.
    pub(super) fn is_below(&self, len: u64) -> bool {
        self.given.is_some_and(|given| given < len)
    }

    /// The bytes that may be used, when `used` are and `len` are asked for; of a file with a name, or of memory.
    pub(super) fn allowed(&self, used: u64, len: u64, named: Option<&SharedFile>) -> u64 {
        let limit = self.limit.load(Ordering::Relaxed);
        let has_room = used.saturating_add(len) <= limit;
        let is_due = if has_room {
            used.abs_diff(self.looked_at.load(Ordering::Relaxed)) >= self.step.load(Ordering::Relaxed)
        } else {
            self.turned_away.fetch_add(1, Ordering::Relaxed).is_multiple_of(TURNED_AWAY)
        };
        if is_due { self.look(used, named) } else { limit }
    }

    /// Looks what the system has left. Returns the bytes that may be used.
    pub(super) fn look(&self, used: u64, named: Option<&SharedFile>) -> u64 {
        let disk = named.map_or((u64::MAX, true), |file| file.disk_left().unwrap_or((0, false)));
        let left = match disk {
            (left, true) => left.min(self.probe.available().bytes),
            (left, false) => left,
        };
        let limit = limit(self.given, self.ranks, used, left, disk.1);
        self.limit.store(limit, Ordering::Relaxed);
        self.looked_at.store(used, Ordering::Relaxed);
        self.step.store(step(left), Ordering::Relaxed);
        limit
    }
}

/// The bytes that are taken before the next look, where `left` are left.
fn step(left: u64) -> u64 {
    LOOK.min(left.div_ceil(LOOK_PART))
}

/// The bytes that may be used, if `used` are and the system has `left` more. At the limit of a control group's memory a
/// process is killed, so some of that are spared.
fn limit(given: Option<u64>, ranks: u64, used: u64, left: u64, is_memory: bool) -> u64 {
    match given {
        Some(given) if is_memory => given.min(used.saturating_add(left - step(left))),
        Some(given) => given,
        None => (used.saturating_mul(ranks).saturating_add(left)) / 2 / ranks,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    #[test]
    fn as_much_is_left_as_is_taken_whoever_takes_it() {
        let taken =
            |ranks| (0..1000).fold(0, |used, _| limit(None, ranks, used, 8 * GIB - ranks * used, true));
        assert!(taken(1).abs_diff(4 * GIB) < 1000 && taken(4).abs_diff(GIB) < 1000);
        // Two that grow side by side.
        let (mut one, mut other) = (0, 0);
        for _ in 0..10_000 {
            one += LOOK * u64::from(one + LOOK <= limit(None, 1, one, 8 * GIB - one - other, true));
            other += LOOK * u64::from(other + LOOK <= limit(None, 1, other, 8 * GIB - one - other, true));
        }
        assert!((one + other).abs_diff(16 * GIB / 3) <= 4 * LOOK, "{one} {other}");
    }

    #[test]
    fn memory_that_is_not_there_is_not_taken_either() {
        assert_eq!(limit(Some(10 * GIB), 1, GIB, 2 * GIB, true), 3 * GIB - LOOK);
        assert_eq!(limit(Some(10 * GIB), 1, GIB, 2 * GIB, false), 10 * GIB);
        assert_eq!(limit(Some(GIB), 1, 0, 1, true), 0);
        assert_eq!(limit(Some(GIB), 1, 0, 0, true), 0);
    }

    #[test]
    fn a_step_is_a_part_of_what_is_left() {
        const MIB: u64 = 1 << 20;
        assert_eq!(limit(Some(GIB), 1, MIB, 3 * MIB, true), 4 * MIB - 3 * MIB / 16);
        assert_eq!((step(GIB), step(3 * MIB), step(0)), (LOOK, 3 * MIB / 16, 0));
    }
}
