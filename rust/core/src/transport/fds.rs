//! The descriptors that pass from the parent to a worker.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

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
    /// The worker's end of the socket pair.
    pub socket: BorrowedFd<'a>,
}

impl WorkerFds<'_> {
    /// Copies of what a port keeps.
    ///
    /// # Errors
    /// The system's, when there are too many open files.
    pub fn for_port(&self) -> io::Result<PortFds> {
        Ok(PortFds {
            eventfd: self.worker_eventfd.try_clone_to_owned()?,
            parent_eventfd: self.parent_eventfd.try_clone_to_owned()?,
            parent_pidfd: self.parent_pidfd.try_clone_to_owned()?,
            socket: self.socket.try_clone_to_owned()?,
        })
    }
}

/// What a worker keeps of them; the segment is mapped.
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
