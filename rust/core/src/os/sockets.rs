//! Connections: waiting for any number of them at once, and their buffers.

use std::net::TcpStream;
use std::os::fd::BorrowedFd;
use std::time::Duration;

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::sockopt;

use super::waiting::poll_each;
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
/// Does nothing for a connection with another machine, or where the system refuses.
pub fn fit(socket: &TcpStream) {
    if let (Ok(there), Ok(here)) = (socket.peer_addr(), socket.local_addr())
        && there.ip() == here.ip()
    {
        let _ = sockopt::set_socket_send_buffer_size(socket, WITHIN);
        let _ = sockopt::set_socket_recv_buffer_size(socket, WITHIN);
        let _ = sockopt::set_tcp_congestion(socket, CONTROL);
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
