//! The descriptors that pass from the parent to a worker.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use crate::sync::Arc;

/// The descriptors that a worker inherits or is sent.
#[derive(Debug)]
pub struct WorkerFds<'a> {
    /// The segment.
    pub segment: BorrowedFd<'a>,
    /// Wakes the worker.
    pub worker_eventfd: BorrowedFd<'a>,
    /// Wakes the parent.
    pub parent_eventfd: BorrowedFd<'a>,
    /// Readable once the parent has ended.
    pub parent_pidfd: BorrowedFd<'a>,
    /// The worker's end of the socket pair; `None` once the worker alone has it.
    pub socket: Option<Arc<OwnedFd>>,
}

impl WorkerFds<'_> {
    /// Copies of what a port keeps; the socket itself, if nothing else has it.
    ///
    /// # Errors
    /// The system's, when there are too many open files; `NotFound` once the worker has them.
    pub fn for_port(self) -> io::Result<PortFds> {
        let socket = self.socket.ok_or(io::ErrorKind::NotFound)?;
        Ok(PortFds {
            eventfd: self.worker_eventfd.try_clone_to_owned()?,
            parent_eventfd: self.parent_eventfd.try_clone_to_owned()?,
            parent_pidfd: self.parent_pidfd.try_clone_to_owned()?,
            socket: Arc::try_unwrap(socket).or_else(|shared| shared.try_clone())?,
        })
    }
}

/// The descriptors of these that a worker keeps; it needs no descriptor for the segment, which is mapped.
#[derive(Debug)]
pub struct PortFds {
    /// Wakes this worker.
    pub eventfd: OwnedFd,
    /// Wakes the parent.
    pub parent_eventfd: OwnedFd,
    /// Readable once the parent has ended.
    pub parent_pidfd: OwnedFd,
    /// The worker's end of the socket pair.
    pub socket: OwnedFd,
}
