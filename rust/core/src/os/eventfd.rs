//! Eventfds: one process wakes another. The protocol is in [`doorbell`](crate::sync::doorbell).

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFlags, eventfd};
use rustix::io::Errno;

use super::waiting::poll;
use crate::error::{Error, Result};

/// An eventfd: any process that has it may notify, one sleeps for it.
#[derive(Debug)]
pub struct EventFd(OwnedFd);

impl EventFd {
    /// A new one, without a notification.
    ///
    /// # Errors
    /// [`Error::Os`] when there are too many open files.
    pub fn new() -> Result<Self> {
        eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map(Self)
            .map_err(|errno| Error::os("eventfd", errno))
    }

    /// One that another process made.
    #[must_use]
    pub fn attach(fd: OwnedFd) -> Self {
        Self(fd)
    }

    /// Wakes the sleeper, or lets its next sleep end at once. Never blocks: a full counter wakes as well.
    pub fn notify(&self) {
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    /// Takes all notifications that have come.
    pub fn clear(&self) {
        let _ = rustix::io::read(&self.0, &mut [0u8; 8]);
    }
}

impl AsFd for EventFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Sleeps until a notification comes, the watched process ends, a signal comes or the time is over.
///
/// Returns whether the watched process has ended.
///
/// # Errors
/// [`Error::Os`] when a descriptor is not valid.
pub fn sleep(eventfd: &EventFd, process: BorrowedFd<'_>, limit: Duration) -> Result<bool> {
    let [notified, ended] = match poll([(eventfd.as_fd(), PollFlags::IN), (process, PollFlags::IN)], limit) {
        Ok(found) => found,
        Err(Errno::INTR) => return Ok(false),
        Err(errno) => return Err(Error::os("poll", errno)),
    };
    if notified.contains(PollFlags::IN) {
        eventfd.clear();
    }
    Ok(ended.contains(PollFlags::IN))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::os::process::pidfd;

    #[test]
    fn a_notification_before_the_sleep_ends_it() {
        let eventfd = EventFd::new().unwrap();
        let own = pidfd(0).unwrap();
        eventfd.notify();
        eventfd.notify();
        assert!(!sleep(&eventfd, own.as_fd(), Duration::from_secs(60)).unwrap());
        assert!(!sleep(&eventfd, own.as_fd(), Duration::ZERO).unwrap());
    }
}
