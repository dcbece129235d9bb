//! The features of scheduling, and their hooks: what the scheduler asks at each step. Without a feature, a hook gives
//! torch's answer.
//!
//! | file | about |
//! |---|---|
//! | `balance.rs` | tasks for the worker with the fewest |
//! | `varying.rs` | a number of workers that changes |
//! | `joint.rs` | tasks that all workers share |
//! | `following.rs` | an epoch that begins before the end of the one before |
//! | `successors.rs` | a successor in place of a lost worker |

mod balance;
mod following;
mod joint;
mod successors;
mod varying;

use self::balance::Balance;
use self::varying::Varying;
use super::Scheduler;
use crate::plan::{ReorderBuffer, ResultOrder};
use crate::transport::Transport;
use crate::transport::message::ResultKind;
use crate::transport::task_number::epoch_of;

/// The features that are on.
#[derive(Debug, Default)]
pub(super) struct Features {
    balance: Option<Balance>,
    varying: Option<Varying>,
    /// True if all workers share all tasks. Then a task's worker is only the one that its result is counted for.
    shares: bool,
    /// The epoch that follows, once its tasks may be out, after all tasks of this one.
    follower: Option<u64>,
}

impl Features {
    /// A new epoch begins.
    pub(super) fn reset(&mut self) {
        self.follower = None;
        if let Some(varying) = &mut self.varying {
            varying.reset();
        }
    }

    /// Returns how many tasks count for torch's limit. Where the limit may fall, results that wait for their turn count
    /// too: as many would always be kept.
    pub(super) fn counted<T>(&self, order: ResultOrder, tasks: &ReorderBuffer<T>) -> u64 {
        if self.varying.is_some() && order == ResultOrder::InOrder {
            tasks.send_idx() - tasks.rcvd_idx()
        } else {
            tasks.outstanding()
        }
    }

    /// Returns true if a result is of the next epoch, whose tasks are out already.
    #[inline]
    pub(super) fn is_early(&self, seq: u64, kind: ResultKind) -> bool {
        kind != ResultKind::Object && self.follower == Some(epoch_of(seq))
    }

    /// Returns true if a worker is lost although its ring has results of the next epoch. If workers share tasks, the next
    /// epoch is not lost with it.
    pub(super) fn is_lost_before_next(&self) -> bool {
        !self.shares
    }
}

impl<T> Scheduler<T> {
    /// Returns the worker for the next task.
    #[inline]
    pub(super) fn choose(&mut self, transport: &impl Transport) -> Option<u32> {
        if self.features.balance.is_none() { self.selector.choose() } else { self.choose_least(transport) }
    }

    /// Returns true if `worker`, which has ended, owes a result.
    pub(super) fn owes(&self, transport: &impl Transport, worker: u32) -> bool {
        match transport.joint() {
            Some(joint) => self.owes_jointly(joint, worker),
            None => self.tasks.awaits(worker),
        }
    }
}
