//! The number of a task: torch's `send_idx`, and above it the task's epoch.
//!
//! Epochs are counted by the scheduler, from the first of its iterator, modulo [`EPOCHS`].

/// The lowest bit of the epoch in a task's number, above torch's `send_idx`. By the epoch, a result of an abandoned
/// epoch is told from the others.
pub const EPOCH_SHIFT: u32 = 40;

/// Epochs are counted modulo this many.
pub const EPOCHS: u64 = 1 << (u64::BITS - EPOCH_SHIFT);

/// The epoch of a task.
#[must_use]
pub const fn epoch_of(seq: u64) -> u64 {
    seq >> EPOCH_SHIFT
}

/// Returns true if an epoch comes before another one. Of two epochs, one comes at most `EPOCHS / 2` after the other.
#[must_use]
pub const fn is_before(epoch: u64, other: u64) -> bool {
    let ahead = other.wrapping_sub(epoch) % EPOCHS;
    ahead != 0 && ahead < EPOCHS / 2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn epochs_go_round() {
        assert!(is_before(3, 4) && !is_before(4, 4) && !is_before(5, 4));
        assert!(is_before(EPOCHS - 1, 0) && !is_before(0, EPOCHS - 1));
        assert_eq!(epoch_of(7 << EPOCH_SHIFT | 9), 7);
    }
}
