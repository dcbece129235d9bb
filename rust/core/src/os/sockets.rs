//! The buffers of connections.

use std::net::TcpStream;

use rustix::net::sockopt;

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
