//! A successor in place of a lost worker: the tasks that it does again.

use crate::error::{Error, Result};
use crate::scheduler::{EPOCH_SHIFT, Scheduler};
use crate::transport::Transport;

impl<T> Scheduler<T> {
    /// A successor runs in place of a worker that was [lost](crate::scheduler::Poll::Lost): sends the tasks again whose results have not
    /// come, in their order, with the indices that `index` knows.
    ///
    /// # Errors
    /// As [`Transport::put_task`]; [`Error::Config`] for a task whose index is not known.
    pub fn resume<C: Transport>(
        &mut self,
        transport: &C,
        worker: u32,
        index: impl Fn(u64) -> Option<C::Index>,
    ) -> Result<()> {
        self.ended.retain(|&ended| ended != worker);
        self.behind = None;
        if transport.joint().is_some() {
            transport.lose(worker);
            return Ok(());
        }
        let of_worker = self.tasks.awaited_tasks().filter(|&(_, of)| of == worker);
        for (seq, _) in of_worker {
            let index =
                index(seq).ok_or_else(|| Error::Config(format!("the index of task {seq} was not kept")))?;
            transport.put_task(worker, (self.epoch << EPOCH_SHIFT) | seq, index)?;
        }
        Ok(())
    }
}
