//! Limits the memory that a worker's slots may keep, and sets the steps in which they grow.

use std::ops::Range;

use super::SlotId;
use crate::Result;

const FINE: u64 = 4 << 10;
const COARSE: u64 = 64 << 10;

/// The limits on the slots of one worker.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Limits {
    /// Bytes of memory that all slots of the worker may keep together.
    pub share: u64,
    /// Bytes of address space of one slot's window.
    pub window: u64,
    /// Bytes of the machine's page, a power of two: memory is taken and given back in whole ones.
    pub page: u64,
}

impl Limits {
    /// The largest batch that a slot takes, and the most bytes that the user may lease: half the
    /// share, in whole granules, and no more than a window. A larger batch is *oversize*.
    ///
    /// INVARIANT: leases up to half and one batch up to half, rounded up to its granule, always fit
    /// into the share, so that a worker with nothing undelivered, no lease of its own and nothing
    /// [registered](super::registered) that is not leased has room for its batch.
    pub fn half(&self) -> u64 {
        let half = (self.share / 2).min(self.window);
        half - half % self.granule(half)
    }

    /// `bytes` rounded up to whole granules: pages for a small batch, so that 64 of them are not 4 MiB; larger steps
    /// for a large one, so that it does not grow page by page.
    pub(super) fn round_up(&self, bytes: u64) -> u64 {
        bytes.next_multiple_of(self.granule(bytes))
    }

    /// INVARIANT: a multiple of the machine's page, so that what is counted is never less than what exists.
    fn granule(&self, bytes: u64) -> u64 {
        if bytes < COARSE { FINE.max(self.page) } else { COARSE.max(self.page) }
    }
}

/// The outcome of a request for more bytes in a slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum Growth {
    /// The bytes may be used.
    Ready,
    /// The bytes do not fit while other slots keep what they have. They may fit once slots have come back.
    NoRoom,
    /// The bytes are more than [`Limits::half`] and never fit.
    Oversize,
}

/// The operations on the windows' memory that the allocator needs.
pub trait Pages {
    /// Gives the memory of `bytes` of a slot's window back to the system. It is not used.
    ///
    /// # Errors
    ///
    /// The system's refusal; the bytes stay counted, and are no room.
    fn punch(&mut self, slot: SlotId, bytes: Range<u64>) -> Result<()>;

    /// Says whether the machine and the control group have `need` more bytes.
    ///
    /// # Errors
    ///
    /// The shortage, for the user to read; it ends the request.
    fn available(&mut self, need: u64) -> Result<()>;
}

#[cfg(all(test, not(ringloader_loom)))]
mod tests {
    use super::*;

    const SIZES: [u64; 3] = [4 << 10, 16 << 10, 64 << 10];

    #[test]
    fn granules() {
        let limits = |page| Limits { share: 1 << 40, window: 1 << 40, page };
        for (bytes, rounded) in [
            (0, 0),
            (1, FINE),
            (FINE, FINE),
            (FINE + 1, 2 * FINE),
            (COARSE - 1, COARSE),
            (COARSE, COARSE),
            (COARSE + 1, 2 * COARSE),
        ] {
            assert_eq!(limits(FINE).round_up(bytes), rounded, "{bytes}");
            for page in SIZES {
                let larger = limits(page).round_up(bytes);
                assert!(larger >= rounded && larger - bytes < page.max(COARSE), "{bytes} in pages of {page}");
                assert!(larger.is_multiple_of(page), "{bytes} in pages of {page}");
            }
        }
        assert_eq!(limits(16 << 10).round_up(1), 16 << 10);
        assert_eq!(limits(64 << 10).round_up(1), 64 << 10);
    }

    #[test]
    fn whatever_fits_into_half_fits_when_rounded() {
        for page in SIZES {
            for share in [0, 5000, 8192, 100_000, 131_071, 131_072, 1 << 20, (1 << 20) + 70_000, 1 << 40] {
                let limits = Limits { share, window: 1 << 40, page };
                let half = limits.half();
                assert!(2 * half <= share);
                assert_eq!(limits.round_up(half), half, "share {share}");
            }
        }
        assert_eq!(Limits { share: 1 << 30, window: 1 << 20, page: FINE }.half(), 1 << 20);
    }
}
