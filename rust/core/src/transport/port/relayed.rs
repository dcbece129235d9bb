//! A worker's end as a relay serves it: in the main process, for a worker that is elsewhere.

use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use super::Port;
use super::commit::Commit;
use crate::error::{Error, Result};
use crate::os::Segment;
use crate::os::eventfd::sleep;
use crate::sync::doorbell::sleep_unless;

impl Port {
    /// As [`begin_commit`](Self::begin_commit), for a batch that another process has numbered.
    #[must_use]
    pub fn begin_relayed(&self, generation: u64) -> Commit<'_> {
        let mut state = self.state.lock();
        state.open = false;
        state.fillings = generation;
        Commit { port: self, fill: state.filling.take(), generation, own: None, keeps: false }
    }

    /// As [`wait`](Self::wait), also until `fd` is readable. Returns true if it is.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    pub fn wait_for_task_or(&self, fd: BorrowedFd<'_>, limit: Duration) -> Result<bool> {
        let view = self.control.worker(self.worker);
        let found = || Ok(self.state.lock().tasks.peek(view.tasks)?.is_some());
        let slept = sleep_unless(view.worker_sleeps, found, || sleep(&self.eventfd, fd, limit))?;
        Ok(slept == Some(true))
    }
}

impl Commit<'_> {
    /// Reads the bytes `range` of the batch from a socket, or some of them. Returns how many came: none at the end of the
    /// stream.
    ///
    /// # Errors
    /// As [`Segment::receive`]; [`Error::Config`] when the batch has no memory.
    pub fn receive(&self, socket: BorrowedFd<'_>, range: Range<u64>) -> Result<std::io::Result<usize>> {
        let (segment, start) = self.place()?;
        segment.receive(socket, start + range.start, range.end - range.start)
    }

    /// Replaces `into` by a copy of the bytes `range` of the batch.
    ///
    /// # Errors
    /// As [`receive`](Self::receive).
    pub fn copy_out(&self, range: Range<u64>, into: &mut Vec<u8>) -> Result<()> {
        let (segment, start) = self.place()?;
        segment.copy_out(start + range.start, range.end - range.start, into)
    }

    /// Copies `bytes` to `offset` of the batch.
    ///
    /// # Errors
    /// As [`receive`](Self::receive).
    pub fn copy_in(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        let (segment, start) = self.place()?;
        segment.copy_in(start + offset, bytes)
    }

    /// In which segment the batch lies, and where it begins.
    fn place(&self) -> Result<(&Segment, u64)> {
        if let Some(segment) = self.own() {
            return Ok((segment, 0));
        }
        let Some(fill) = &self.fill else {
            return Err(Error::Config("no slot is being filled".into()));
        };
        Ok((self.port.control.segment(), self.port.control.window(self.port.worker, fill.slot).start))
    }
}
