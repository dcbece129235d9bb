//! Connections: sending, waiting for any number of them at once, and their buffers.

use std::net::TcpStream;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;
use std::time::Duration;

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::sockopt;

use super::waiting::{poll, poll_each};
use crate::error::{Error, Result};

/// Bytes of each buffer of a connection within this machine. Smaller ones cost more changes between threads, larger ones
/// outgrow a core's cache.
const WITHIN: usize = 256 << 10;

/// The congestion control of a connection within this machine. There is no congestion, so the simplest will do; every Linux
/// has it, and lets every process take it. BBR, which may be the system's, paces the sender by timers: with it both ends take
/// a fifth more processor time.
const CONTROL: &str = "reno";

/// Makes a connection within this machine fit for one: small buffers, and no pace. The system would let buffers grow to
/// tens of megabytes, as a long way needs it; then bytes leave the caches before they are read.
///
/// Does nothing for a connection with another machine, or where the system refuses. Returns true if both ends are on this
/// one.
pub fn fit(socket: &TcpStream) -> bool {
    let (Ok(there), Ok(here)) = (socket.peer_addr(), socket.local_addr()) else { return false };
    let is_within = there.ip() == here.ip();
    if is_within {
        let _ = sockopt::set_socket_send_buffer_size(socket, WITHIN);
        let _ = sockopt::set_socket_recv_buffer_size(socket, WITHIN);
        let _ = sockopt::set_tcp_congestion(socket, CONTROL);
    }
    is_within
}

/// Writes to a socket `before` and then `len` bytes at `from`, as many as it takes, and waits for it if `waits`. Returns how
/// many went, those of `before` among them.
///
/// # Safety
/// The bytes can be read until the return. Others may write to them.
///
/// # Errors
/// The system's error.
pub(super) unsafe fn send(
    socket: BorrowedFd<'_>,
    before: &[u8],
    from: NonNull<u8>,
    len: u64,
    waits: bool,
) -> std::io::Result<usize> {
    let mut parts = [
        libc::iovec { iov_base: before.as_ptr().cast_mut().cast(), iov_len: before.len() },
        libc::iovec { iov_base: from.as_ptr().cast(), iov_len: len as usize },
    ];
    // SAFETY: a structure of integers and pointers, for which zeros say that there is nothing.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = parts.as_mut_ptr();
    message.msg_iovlen = parts.len() as _;
    let flags = libc::MSG_NOSIGNAL | if waits { 0 } else { libc::MSG_DONTWAIT };
    // SAFETY: the parts live; the kernel reads them, by the caller's promise; no reference to them is made.
    let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, flags) };
    usize::try_from(sent).map_err(|_| std::io::Error::last_os_error())
}

/// As [`send`], without waiting.
///
/// # Safety
/// As [`send`].
///
/// # Errors
/// As [`send`].
pub(crate) unsafe fn send_now(
    socket: BorrowedFd<'_>,
    before: &[u8],
    from: NonNull<u8>,
    len: u64,
) -> std::io::Result<usize> {
    // SAFETY: the caller's.
    unsafe { send(socket, before, from, len, false) }
}

/// Waits until a socket takes bytes, or has failed, or the time is over.
///
/// # Errors
/// [`Error::Os`] when the system refuses.
pub(crate) fn wait_to_send(socket: BorrowedFd<'_>, limit: Duration) -> Result<()> {
    match poll([(socket, PollFlags::OUT)], limit) {
        Ok(_) | Err(Errno::INTR) => Ok(()),
        Err(errno) => Err(Error::os("poll", errno)),
    }
}

/// Waits until one of the descriptors can be read, or those with `true` written to, a signal comes or the time is over.
/// An end of a stream, or an error of it, counts as something to be read. Returns of each whether it can.
///
/// # Errors
/// [`Error::Os`] when a descriptor is not valid.
pub fn wait(fds: &[(BorrowedFd<'_>, bool)], limit: Duration) -> Result<Vec<bool>> {
    let flags = |writes| if writes { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
    let mut asked: Vec<_> = fds.iter().map(|&(fd, writes)| (fd, flags(writes))).collect();
    match poll_each(&mut asked, limit) {
        Ok(()) => Ok(asked.iter().map(|(_, found)| !found.is_empty()).collect()),
        Err(Errno::INTR) => Ok(vec![false; fds.len()]),
        Err(errno) => Err(Error::os("poll", errno)),
    }
}

#[cfg(test)]
mod tests {
    use std::net::{SocketAddr, TcpListener};

    use super::*;

    #[test]
    fn a_connection_is_fit_within_this_machine_only() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        // The other end has another address, as one on another machine has.
        let other = TcpListener::bind("127.0.0.2:0").unwrap().local_addr().unwrap();
        let far =
            rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::STREAM, None)
                .unwrap();
        rustix::net::bind(&far, &SocketAddr::new(other.ip(), 0)).unwrap();
        rustix::net::connect(&far, &listener.local_addr().unwrap()).unwrap();
        let far = TcpStream::from(far);
        let found = |socket: &TcpStream| {
            let [sent, received] =
                [sockopt::socket_send_buffer_size(socket), sockopt::socket_recv_buffer_size(socket)];
            (sent.unwrap(), received.unwrap(), sockopt::tcp_congestion(socket).unwrap())
        };
        let before = found(&far);
        fit(&near);
        fit(&far);
        // The system counts its own share, too.
        assert_eq!(found(&near), (2 * WITHIN, 2 * WITHIN, CONTROL.into()));
        assert_eq!(found(&far), before);
    }
}
