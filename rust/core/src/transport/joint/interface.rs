//! The trait that the scheduler needs of a transport whose workers share all tasks.

/// The part of a [`Transport`](crate::transport::Transport) that is about tasks which all workers share. No call waits.
pub trait Joint {
    /// Only the first `workers` workers make tasks from now on: batches are cut for as many, and
    /// [`has_made`](Self::has_made) is false again for the workers that did not before.
    fn share_among(&self, workers: u32);

    /// Returns true if `worker` has something that is not answered.
    fn has_claim(&self, worker: u32) -> bool;

    /// Returns true if something is left that no worker has, except for the task that was sent last, which workers may
    /// not have seen yet.
    fn is_open(&self) -> bool;

    /// Returns true if `worker` has made some of a batch since it [shares](Self::share_among) tasks.
    fn has_made(&self, worker: u32) -> bool;
}
