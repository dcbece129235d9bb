//! Lost workers: the report of a loss, and the tasks that such a worker leaves.
//!
//! A worker that ends while it owes a result is [lost](super::Poll::Lost). The scheduler reports the loss once nothing that
//! the worker committed is left in its ring.
//!
//! - Out of order, it reports the loss at once, whatever the other workers have ready.
//! - In order, a committed result may have to wait for another, slow worker. The caller waits for [`PATIENCE`] at most.
//!   Then the scheduler takes the result before its turn and keeps it, reports the loss, and hands the result out in
//!   its turn to a caller that continues.
//!
//! A worker that has answered all its tasks is missed only when it is asked again.

use std::time::{Duration, Instant};

use super::Scheduler;
use crate::error::{Error, Result};
use crate::testing::fault::fault;
use crate::transport::Transport;

/// The longest time for which a loss goes unreported because the lost worker's results wait for another worker's.
pub const PATIENCE: Duration = Duration::from_millis(50);

/// Why there is no result.
pub(super) enum Missing {
    /// This worker will never send one.
    Lost(u32),
    /// The result is late; look again after this time.
    Late(Duration),
    /// This worker has ended, and what it had committed before has waited long enough for its turn.
    Behind(u32),
}

impl<T> Scheduler<T> {
    /// Workers that have ended and owe a result, which may still be in their rings.
    fn debtors(&self, transport: &impl Transport) -> impl Iterator<Item = u32> {
        let ended = self.ended.iter().copied();
        ended.filter(|&worker| self.selector.is_active(worker) && self.owes(transport, worker))
    }

    /// One of them that has nothing of this epoch left in its ring.
    pub(super) fn lost(&self, transport: &impl Transport) -> Result<Option<u32>> {
        for worker in self.debtors(transport) {
            let is_drained = self.drop_stale(transport, worker)?;
            if is_drained || fault("lost_before_drained") {
                return Ok(Some(worker));
            }
        }
        Ok(None)
    }

    /// Drops the results at the head of a worker's ring that no epoch waits for. Returns true if nothing
    /// that is awaited of the worker comes after them.
    pub(super) fn drop_stale(&self, transport: &impl Transport, worker: u32) -> Result<bool> {
        loop {
            match transport.peek_of(worker)? {
                Some((seq, kind)) if self.features.is_early(seq, kind) => {
                    return Ok(self.features.is_lost_before_next());
                }
                Some((seq, kind)) if self.is_stale(seq, kind) => match transport.try_next_of(worker) {
                    Ok(_) | Err(Error::Arrival { .. }) => {}
                    Err(error) => return Err(error),
                },
                next => return Ok(next.is_none()),
            }
        }
    }

    /// Called when the result whose turn it is has not come. Returns the reason, which tells the caller what to do.
    pub(super) fn missing(&mut self, transport: &impl Transport, wanted: Option<u32>) -> Result<Missing> {
        if fault("lost_in_turn_only") && wanted.is_some_and(|turn| !self.ended.contains(&turn)) {
            return Ok(Missing::Late(Duration::MAX));
        }
        if let Some(worker) = self.lost(transport)? {
            return Ok(Missing::Lost(worker));
        }
        let Some(worker) = self.debtors(transport).next() else {
            self.behind = None;
            return Ok(Missing::Late(Duration::MAX));
        };
        let waited = self.behind.get_or_insert_with(Instant::now).elapsed();
        let left = PATIENCE.saturating_sub(waited);
        Ok(if left.is_zero() { Missing::Behind(worker) } else { Missing::Late(left) })
    }

    /// Expects nothing more of a worker that was [lost](super::Poll::Lost): said once, the epoch continues without
    /// it, as torch's does.
    pub fn give_up(&mut self, worker: u32) {
        self.selector.deactivate(worker);
    }
}
