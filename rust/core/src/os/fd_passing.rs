//! Descriptors sent over the socket pair of a worker and the parent: a batch's own segment, and where a call is
//! answered.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType, recvmsg, sendmsg, socketpair,
};
use rustix::process::{Resource, getrlimit};

use super::waiting::poll;
use crate::error::{Error, Result};

/// The two ends of one worker's socket pair: the parent's, the worker's.
///
/// # Errors
/// [`Error::Os`] when there are too many open files.
pub fn pair() -> Result<(OwnedFd, OwnedFd)> {
    socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK, None)
        .map_err(|errno| Error::os("socketpair", errno))
}

/// The outcome of sending a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use]
pub enum SendOutcome {
    /// The other end will find it.
    Yes,
    /// The socket is full: try again when the other end has taken something.
    Full,
    /// All processes of this user together have more descriptors in flight than [`most_in_flight`]: try again when
    /// any of them has taken one.
    TooManyInFlight,
}

/// Returns how many descriptors may be in flight over sockets, for all processes of this user together: this process's
/// limit of open files. `None`: no limit.
#[must_use]
pub fn most_in_flight() -> Option<u64> {
    getrlimit(Resource::Nofile).current
}

/// Sends `fd`, tagged with the batch that it carries.
///
/// # Errors
/// [`Error::Os`] when the other end is gone.
pub fn send(socket: BorrowedFd<'_>, fd: BorrowedFd<'_>, tag: u64) -> Result<SendOutcome> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds = [fd];
    control.push(SendAncillaryMessage::ScmRights(&fds));
    let tag = tag.to_le_bytes();
    match sendmsg(socket, &[IoSlice::new(&tag)], &mut control, SendFlags::NOSIGNAL) {
        Ok(_) => Ok(SendOutcome::Yes),
        Err(Errno::AGAIN | Errno::NOBUFS) => Ok(SendOutcome::Full),
        Err(Errno::TOOMANYREFS) => Ok(SendOutcome::TooManyInFlight),
        Err(errno) => Err(Error::os("sending a batch's memory to the main process", errno)),
    }
}

/// Takes the descriptor that was sent with `tag`. It was sent before its batch was committed. Tags ascend: one
/// before it belongs to a batch that was given up after its descriptor had been sent, and is dropped.
///
/// # Errors
/// [`Error::Corrupt`] when another or none is there, [`Error::Os`] when this process has no room for it.
pub fn receive(socket: BorrowedFd<'_>, tag: u64) -> Result<OwnedFd> {
    loop {
        let message = next(socket).map_err(|errno| match errno {
            Errno::AGAIN => Error::Corrupt(format!("the memory of batch {tag} was not sent")),
            errno => Error::os("receiving a batch's memory", errno),
        });
        match message? {
            (sent, _) if sent < tag => {}
            (sent, Some(fd)) if sent == tag => return Ok(fd),
            // The kernel drops the descriptor, not the message, where the table of open files is full.
            (sent, None) if sent == tag => {
                return Err(Error::os("receiving a batch's memory", Errno::MFILE));
            }
            (sent, _) => {
                return Err(Error::Corrupt(format!(
                    "the memory of batch {tag} was expected, that of {sent} came"
                )));
            }
        }
    }
}

/// Returns true if no process, not even this one, has the other end any more.
///
/// # Errors
/// [`Error::Os`] when the system refuses.
pub fn is_deserted(socket: BorrowedFd<'_>) -> Result<bool> {
    loop {
        match poll([(socket, PollFlags::empty())], Duration::ZERO) {
            Ok([found]) => return Ok(found.contains(PollFlags::HUP)),
            Err(Errno::INTR) => {}
            Err(errno) => return Err(Error::os("poll", errno)),
        }
    }
}

/// The next message: its tag, and the descriptor if there is room for it.
fn next(socket: BorrowedFd<'_>) -> rustix::io::Result<(u64, Option<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let mut bytes = [0; 8];
    let read = recvmsg(socket, &mut [IoSliceMut::new(&mut bytes)], &mut control, RecvFlags::CMSG_CLOEXEC)?;
    if read.bytes == 0 {
        return Err(Errno::PIPE);
    }
    let fd = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut fds) => fds.next(),
        _ => None,
    });
    Ok((u64::from_le_bytes(bytes), fd))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::os::Segment;

    #[test]
    fn a_segment_arrives_with_its_bytes() {
        let (parent, worker) = pair().unwrap();
        let (segment, fd) = Segment::create("test", 4096).unwrap();
        segment.copy_in(0, b"oversize").unwrap();
        assert_eq!(send(worker.as_fd(), fd.as_fd(), 7).unwrap(), SendOutcome::Yes);
        drop((segment, fd));
        let segment = Segment::attach(receive(parent.as_fd(), 7).unwrap().as_fd()).unwrap();
        let mut read = Vec::new();
        segment.copy_out(0, 8, &mut read).unwrap();
        assert_eq!(read, b"oversize");
    }

    #[test]
    fn another_batch_than_expected_is_an_error() {
        let (parent, worker) = pair().unwrap();
        assert!(matches!(receive(parent.as_fd(), 1), Err(Error::Corrupt(_))));
        let (_segment, fd) = Segment::create("test", 4096).unwrap();
        assert_eq!(send(worker.as_fd(), fd.as_fd(), 2).unwrap(), SendOutcome::Yes);
        assert!(matches!(receive(parent.as_fd(), 1), Err(Error::Corrupt(_))));
    }

    #[test]
    fn what_was_sent_for_a_batch_that_was_given_up_is_dropped() {
        let (parent, worker) = pair().unwrap();
        for (tag, content) in [(4, b"given up"), (5, b"this one")] {
            let (segment, fd) = Segment::create("test", 4096).unwrap();
            segment.copy_in(0, content).unwrap();
            assert_eq!(send(worker.as_fd(), fd.as_fd(), tag).unwrap(), SendOutcome::Yes);
        }
        let segment = Segment::attach(receive(parent.as_fd(), 5).unwrap().as_fd()).unwrap();
        let mut read = Vec::new();
        segment.copy_out(0, 8, &mut read).unwrap();
        assert_eq!(read, b"this one");
    }

    #[test]
    fn a_full_socket_is_no_error() {
        let (_parent, worker) = pair().unwrap();
        let (_segment, fd) = Segment::create("test", 4096).unwrap();
        let sent = (0..100_000)
            .take_while(|&tag| send(worker.as_fd(), fd.as_fd(), tag).unwrap() == SendOutcome::Yes)
            .count();
        assert!(sent > 0 && sent < 100_000);
    }
}
