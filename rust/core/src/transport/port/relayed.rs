//! A worker's end as a relay serves it: in the main process, for a worker that is elsewhere.

use std::ops::{Deref, Range};
use std::os::fd::{AsFd, BorrowedFd};

use super::Port;
use super::commit::Commit;
use crate::error::{Error, Result};
use crate::os::Segment;
use crate::sync::Arc;
use crate::transport::layout::Counts;

impl Port {
    /// As [`begin_commit`](Self::begin_commit), for a batch that another process has numbered.
    #[must_use]
    pub fn begin_relayed(self: &Arc<Self>, generation: u64) -> Commit<Arc<Self>> {
        let mut state = self.state.lock();
        state.open = false;
        state.fillings = generation;
        Commit { port: self.clone(), fill: state.filling.take(), generation, own: None, keeps: false }
    }

    /// Says that the caller is going to sleep until [`bell`](Self::bell) rings. It must look for a task again before it
    /// does, and [`withdraw`](Self::withdraw) when it is awake.
    pub fn announce(&self) {
        self.control.worker(self.worker).worker_sleeps.announce();
    }

    /// Says that the caller is awake. `has_rung`: the [`bell`](Self::bell) was found readable.
    pub fn withdraw(&self, has_rung: bool) {
        self.control.worker(self.worker).worker_sleeps.withdraw();
        if has_rung {
            self.eventfd.clear();
        }
    }

    /// Readable once the parent has sent something, or given room, since the caller announced its sleep.
    #[must_use]
    pub fn bell(&self) -> BorrowedFd<'_> {
        self.eventfd.as_fd()
    }

    /// Returns true if a task has come.
    ///
    /// # Errors
    /// [`Error::Corrupt`] from the ring.
    pub fn has_task(&self) -> Result<bool> {
        Ok(self.state.lock().tasks.peek(self.control.worker(self.worker).tasks)?.is_some())
    }

    /// Returns how many results the parent has not taken.
    ///
    /// # Errors
    /// [`Error::Corrupt`] from the ring.
    pub fn untaken(&self) -> Result<u64> {
        let results = self.control.worker(self.worker).results;
        let mut state = self.state.lock();
        Ok(state.results.tail().wrapping_sub(state.results.head(results)?))
    }

    /// The counts of the epoch that the worker is in.
    #[must_use]
    pub fn counts(&self) -> &Counts {
        self.counters().now()
    }
}

impl<P: Deref<Target = Port>> Commit<P> {
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
