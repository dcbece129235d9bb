//! Waiting for connections: any number of them at once.

use std::os::fd::BorrowedFd;
use std::time::Duration;

use rustix::event::PollFlags;
use rustix::io::Errno;

use super::waiting::poll_each;
use crate::error::{Error, Result};

/// Waits until one of the descriptors can be read, or those with `true` written to, a signal comes or the time is over.
/// An end of a stream, or an error of it, counts as something to be read.
///
/// # Errors
/// [`Error::Os`] when a descriptor is not valid.
pub fn wait(fds: &[(BorrowedFd<'_>, bool)], limit: Duration) -> Result<()> {
    let flags = |writes| if writes { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
    let mut asked: Vec<_> = fds.iter().map(|&(fd, writes)| (fd, flags(writes))).collect();
    match poll_each(&mut asked, limit) {
        Ok(()) | Err(Errno::INTR) => Ok(()),
        Err(errno) => Err(Error::os("poll", errno)),
    }
}
