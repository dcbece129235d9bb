//! Connections: waiting for any number of them at once, and their buffers.

use std::net::TcpStream;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::sockopt;

use super::waiting::poll_each;
use crate::error::{Error, Result};

/// Bytes of each buffer of a connection within this machine. Together they fit into a core's cache.
const WITHIN: usize = 256 << 10;

/// Keeps the buffers of a connection within this machine small. The system would let them grow to tens of megabytes, as
/// a long way needs it; then bytes leave the caches before they are read.
///
/// Does nothing for a connection with another machine, or where the system refuses.
pub fn fit_buffers(socket: &TcpStream) {
    if let (Ok(there), Ok(here)) = (socket.peer_addr(), socket.local_addr())
        && there.ip() == here.ip()
    {
        let _ = sockopt::set_socket_send_buffer_size(socket, WITHIN);
        let _ = sockopt::set_socket_recv_buffer_size(socket, WITHIN);
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
    fn buffers_are_small_within_this_machine_only() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        // Its other end has another address, as one elsewhere has.
        let other = TcpListener::bind("127.0.0.2:0").unwrap().local_addr().unwrap();
        let far =
            rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::STREAM, None)
                .unwrap();
        rustix::net::bind(&far, &SocketAddr::new(other.ip(), 0)).unwrap();
        rustix::net::connect(&far, &listener.local_addr().unwrap()).unwrap();
        let far = TcpStream::from(far);
        let sizes = |socket: &TcpStream| {
            let [sent, received] =
                [sockopt::socket_send_buffer_size(socket), sockopt::socket_recv_buffer_size(socket)];
            (sent.unwrap(), received.unwrap())
        };
        let before = sizes(&far);
        fit_buffers(&near);
        fit_buffers(&far);
        // The system counts its own share, too.
        assert_eq!(sizes(&near), (2 * WITHIN, 2 * WITHIN));
        assert_eq!(sizes(&far), before);
    }
}
