//! The trait that the scheduler needs of whatever carries tasks and results.

use super::joint::Joint;
use super::message::ResultKind;
use crate::error::Result;

/// Carries tasks to workers and their results back. No call waits.
///
/// The trait stands here and not with the scheduler, because dependencies point down: implementations must not know
/// the scheduler, nor the scheduler them.
pub trait Transport {
    /// The index that a task asks for.
    type Index;
    /// A result that has arrived.
    type Received;

    /// The task that a received result answers, and its kind.
    fn answered(received: &Self::Received) -> (u64, ResultKind);

    /// Sends task `seq` to `worker`, or keeps it until there is room. Tasks of one worker arrive in order.
    ///
    /// # Errors
    /// [`Error::Config`](crate::Error::Config) when it can never be sent, and any other error of the
    /// transport.
    fn put_task(&self, worker: u32, seq: u64, index: Self::Index) -> Result<()>;

    /// The next result of any worker that has come. Results of one worker come in the order of its commits.
    ///
    /// # Errors
    /// [`Error::Arrival`](crate::Error::Arrival) when this result cannot be read: it is gone, and the ones after it are
    /// still there. Any other error stays: every later call says so again.
    fn try_next(&self) -> Result<Option<Self::Received>>;

    /// As [`try_next`](Self::try_next), of one worker.
    ///
    /// # Errors
    /// As [`try_next`](Self::try_next).
    fn try_next_of(&self, worker: u32) -> Result<Option<Self::Received>>;

    /// Returns what [`try_next_of`](Self::try_next_of) would take: the task that it answers, and the result's kind.
    ///
    /// # Errors
    /// The errors of [`try_next`](Self::try_next), except [`Error::Arrival`](crate::Error::Arrival).
    fn peek_of(&self, worker: u32) -> Result<Option<(u64, ResultKind)>>;

    /// From now on only results of tasks of `epoch` and of later ones are awaited.
    fn begin_epoch(&self, _epoch: u64) {}

    /// Returns how many results of `worker` have come: so often [`try_next_of`](Self::try_next_of) would take one.
    ///
    /// # Errors
    /// As [`peek_of`](Self::peek_of).
    fn there_of(&self, worker: u32) -> Result<u64>;

    /// A worker that has ended since, each once. All that it had committed has come before.
    fn take_ended(&self) -> Option<u32>;

    /// A worker has ended, and all that it had committed was taken: what it had of tasks that all share is for the
    /// others.
    fn lose(&self, _worker: u32) {}

    /// Returns what the transport knows of tasks that all workers share, if they share them.
    #[inline]
    fn joint(&self) -> Option<&dyn Joint> {
        None
    }
}
