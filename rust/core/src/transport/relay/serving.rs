//! The thread of the main process that serves the connections of all workers of an iterator.

use std::io::ErrorKind;
use std::net::TcpListener;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use super::handshake::{Caller, Said};
use super::link::Link;
use super::loss::Loss;
use super::shared::{Request, Shared};
use super::window::Window;
use super::{Beats, Token};
use crate::os::sockets;
use crate::sync::Arc;
use crate::transport::{Control, LONGEST_SLEEP};

/// The time that a caller has to say whose it is.
const INTRODUCED_WITHIN: Duration = Duration::from_secs(10);

/// Callers that have not said it, at most.
const MOST_CALLERS: usize = 1024;

/// The time between two looks for what comes without a word: room for a batch, a batch that was taken.
const SOON: Duration = Duration::from_millis(2);

/// The time until callers are accepted again, after there was no descriptor or memory for one.
const AGAIN: Duration = Duration::from_millis(100);

/// The thread's own state.
pub(super) struct Serving {
    pub(super) shared: Arc<Shared>,
    pub(super) control: Arc<Control>,
    pub(super) listener: TcpListener,
    pub(super) token: Token,
    pub(super) beats: Beats,
    pub(super) window: Window,
    pub(super) callers: Vec<Caller>,
    /// True if there may be a caller, or words of one.
    pub(super) is_called: bool,
    /// True if the last caller could not be accepted, though one is there.
    pub(super) is_short: bool,
    pub(super) links: Vec<Option<Link>>,
}

impl Serving {
    pub(super) fn run(mut self) {
        while self.take_requests() {
            if self.is_called || !self.callers.is_empty() {
                self.accept();
            }
            let is_held_back = self.serve();
            self.sleep(is_held_back);
        }
        for link in self.links.into_iter().flatten() {
            link.end();
        }
        self.shared.changed.notify_all();
    }

    /// Does what was asked for. `false`: the relay is closed.
    fn take_requests(&mut self) -> bool {
        let mut state = self.shared.lock();
        if state.is_closed {
            return false;
        }
        let requests = std::mem::take(&mut state.requests);
        drop(state);
        for request in requests {
            match request {
                Request::Expect { worker, link } => {
                    // The one before was lost: nothing else is succeeded.
                    self.links[worker as usize] = Some(*link);
                }
                Request::Lose { worker, number, why } => {
                    if self.links[worker as usize].as_ref().is_some_and(|link| link.number == number) {
                        self.lose(worker as usize, why.into());
                    }
                }
            }
        }
        true
    }

    /// Takes callers in, and listens to what they say.
    fn accept(&mut self) {
        self.is_short = false;
        while self.callers.len() < MOST_CALLERS {
            match self.listener.accept() {
                Ok((socket, _)) => {
                    if socket.set_nonblocking(true).is_ok() && socket.set_nodelay(true).is_ok() {
                        sockets::fit(&socket);
                        self.callers.push(Caller::new(socket));
                    }
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => {
                    self.is_short = error.kind() != ErrorKind::WouldBlock;
                    break;
                }
            }
        }
        for mut caller in std::mem::take(&mut self.callers) {
            match caller.listen(&self.token) {
                Said::Little if caller.since.elapsed() < INTRODUCED_WITHIN => self.callers.push(caller),
                Said::Little | Said::Nonsense => {}
                Said::Worker(worker, number) => self.introduce(caller, worker, number),
            }
        }
    }

    fn introduce(&mut self, caller: Caller, worker: u32, number: u64) {
        // Any other one is closed: an earlier worker, whose tasks another does now.
        if let Some(Some(link)) = self.links.get_mut(worker as usize)
            && link.number == number
            && link.socket.is_none()
        {
            link.connect(caller.socket);
            self.shared.lock().workers[worker as usize].is_connected = true;
            self.shared.changed.notify_all();
        }
    }

    /// Serves each connection once. Returns true if a batch that is asked for was not sent.
    fn serve(&mut self) -> bool {
        let is_done = self.control.is_done();
        for at in 0..self.links.len() {
            let Some(link) = &mut self.links[at] else { continue };
            if is_done {
                link.tell_done();
            }
            let mut lost = link.take_tasks().map_err(Loss::from);
            lost = lost.and_then(|()| link.step(is_done, &mut self.window));
            let received = std::mem::take(&mut link.received);
            if received > 0 {
                self.shared.lock().received += received;
            }
            if let Some(silent) = link.silent_for().filter(|&silent| silent > self.beats.lost_after) {
                lost = lost.and(Err(format!("nothing was heard of it for {silent:.1?}").into()));
            }
            if let Err(mut loss) = lost {
                if link.is_inside() && !loss.is_ours {
                    loss.why.push_str(", in the middle of a batch");
                }
                self.lose(at, loss);
            }
        }
        self.send()
    }

    /// Sends tasks, the first of all workers first, as far as there is room. Returns true if some are left.
    fn send(&mut self) -> bool {
        for link in self.links.iter_mut().flatten() {
            link.out.take(link.port.untaken().unwrap_or(0));
        }
        loop {
            let of_all: usize = self.links.iter().flatten().map(|link| link.out.batches()).sum();
            let first = self.links.iter().flatten().filter_map(|link| link.out.first()).min();
            let links = self.links.iter_mut().flatten();
            let next = links.filter_map(|link| Some((link.next_batch()?, link))).min_by_key(|(seq, _)| *seq);
            let Some((seq, link)) = next else { break };
            // INVARIANT: the first batch that is awaited can always be made, whatever was made before its turn.
            if first.is_some_and(|first| first < seq) && !self.window.has_room(link.out.batches(), of_all) {
                self.flush();
                return true;
            }
            link.send_next();
        }
        self.flush();
        false
    }

    fn flush(&mut self) {
        for at in 0..self.links.len() {
            let flushed = self.links[at].as_mut().map_or(Ok(()), Link::flush);
            if let Err(loss) = flushed {
                self.lose(at, loss);
            }
        }
    }

    fn lose(&mut self, at: usize, loss: Loss) {
        let Some(link) = self.links[at].take() else { return };
        let status = &mut self.shared.lock().workers[at];
        status.lost = Some(loss);
        link.end();
        self.shared.changed.notify_all();
    }

    /// Sleeps until something happens, and records where.
    fn sleep(&mut self, is_held_back: bool) {
        let links = || self.links.iter().flatten();
        links().for_each(|link| link.port.announce());
        let has_news = links().any(|link| link.has_more || link.port.has_task().unwrap_or(true));
        let is_stalled = links().any(|link| link.is_stalled);
        let limit = match () {
            () if has_news => Duration::ZERO,
            () if is_held_back || is_stalled => SOON,
            () if self.is_short => AGAIN,
            () => LONGEST_SLEEP.min(self.beats.lost_after / 4),
        };
        let mut fds: Vec<(BorrowedFd<'_>, bool)> = vec![(self.shared.bell.as_fd(), false)];
        fds.extend(links().map(|link| (link.port.bell(), false)));
        // A stalled connection is read again once there is room.
        let speaking = links().filter(|link| !link.is_stalled);
        fds.extend(speaking.filter_map(|link| Some((link.socket.as_ref()?.as_fd(), link.has_outgoing()))));
        // While all places are taken, nobody is accepted.
        if !self.is_short && self.callers.len() < MOST_CALLERS {
            fds.push((self.listener.as_fd(), false));
        }
        fds.extend(self.callers.iter().map(|caller| (caller.socket.as_fd(), false)));
        let found = sockets::wait(&fds, limit).unwrap_or_else(|_| {
            std::thread::sleep(SOON);
            vec![true; fds.len()]
        });
        let mut found = found.into_iter();
        if found.next() == Some(true) {
            self.shared.bell.clear();
        }
        for link in self.links.iter_mut().flatten() {
            link.port.withdraw(found.next() == Some(true));
        }
        for link in self.links.iter_mut().flatten() {
            let is_asked = link.socket.is_some() && !link.is_stalled;
            link.is_ready = link.is_stalled || link.has_more || is_asked && found.next() == Some(true);
        }
        self.is_called = self.is_short || found.any(|is_ready| is_ready);
    }
}
