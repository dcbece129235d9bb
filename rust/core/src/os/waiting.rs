//! Waiting for descriptors, by the calls that Python makes.
//!
//! rustix waits by `ppoll` and `epoll_pwait`: sandboxes may refuse these, in which torch's loader runs.

use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

use rustix::event::PollFlags;
use rustix::io::{Errno, Result};

/// Waits until one of `fds` has an event, a signal comes or the time is over. Returns the events of each.
///
/// Safe in a signal's handler, but for errno.
///
/// # Errors
/// The system's error; `INTR` for a signal.
pub(super) fn poll<const N: usize>(
    fds: [(BorrowedFd<'_>, PollFlags); N],
    limit: Duration,
) -> Result<[PollFlags; N]> {
    let mut asked = fds.map(|(fd, flags)| libc::pollfd {
        fd: fd.as_raw_fd(),
        events: flags.bits().cast_signed(),
        revents: 0,
    });
    // SAFETY: reads and writes these structures.
    let found = unsafe { libc::poll(asked.as_mut_ptr(), N as libc::nfds_t, milliseconds(limit)) };
    if found < 0 {
        return Err(last_errno());
    }
    Ok(asked.map(|asked| PollFlags::from_bits_retain(asked.revents.cast_unsigned())))
}

/// Waits for events of an epoll set. Returns how many there are, from the first on.
///
/// # Errors
/// As [`poll`].
pub(super) fn epoll_wait(
    epoll: BorrowedFd<'_>,
    events: &mut [libc::epoll_event],
    limit: Duration,
) -> Result<usize> {
    let room = events.len().try_into().unwrap_or(i32::MAX);
    // SAFETY: writes no more than `room` structures, which exist.
    let found =
        unsafe { libc::epoll_wait(epoll.as_raw_fd(), events.as_mut_ptr(), room, milliseconds(limit)) };
    usize::try_from(found).map_err(|_| last_errno())
}

/// No less than `limit`: a wait of no time would be asked again at once.
fn milliseconds(limit: Duration) -> i32 {
    limit.as_nanos().div_ceil(1_000_000).try_into().unwrap_or(i32::MAX)
}

fn last_errno() -> Errno {
    Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_rounded_up() {
        for (limit, expected) in [
            (Duration::ZERO, 0),
            (Duration::from_nanos(1), 1),
            (Duration::from_millis(7), 7),
            (Duration::from_micros(7001), 8),
            (Duration::MAX, i32::MAX),
        ] {
            assert_eq!(milliseconds(limit), expected);
        }
    }
}
