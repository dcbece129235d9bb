//! The thread of the main process that serves the connections of all workers of an iterator.

use std::any::Any;
use std::collections::VecDeque;
use std::io::ErrorKind;
use std::net::TcpListener;
use std::os::fd::{AsFd, BorrowedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use super::flow_limit::FlowLimit;
use super::handshake::{Caller, Said};
use super::link::{Link, Reading};
use super::loss::Loss;
use super::shared::{Command, MainShared};
use super::{Beats, Token};
use crate::os::sockets;
use crate::sync::Arc;
use crate::transport::{Control, LONGEST_SLEEP};

/// The time that a caller has to say whose it is.
const INTRODUCED_WITHIN: Duration = Duration::from_secs(10);

/// Callers that have not said it, at most, beside two for each worker that is expected.
const SPARE_CALLERS: usize = 16;

/// The time between two looks for what comes without a word: room for a batch, a batch that was taken.
const SOON: Duration = Duration::from_millis(2);

/// The time until callers are accepted again, after there was no descriptor or memory for one.
const AGAIN: Duration = Duration::from_millis(100);

/// The thread's own state.
pub(super) struct Serving {
    pub(super) shared: Arc<MainShared>,
    pub(super) control: Arc<Control>,
    pub(super) listener: TcpListener,
    pub(super) token: Token,
    pub(super) beats: Beats,
    pub(super) limit: FlowLimit,
    /// Connections that have not said whose they are, the oldest first.
    callers: VecDeque<Caller>,
    /// True if there may be a caller, or words of one.
    is_called: bool,
    /// True if the last caller could not be accepted, though one waits.
    is_short: bool,
    pub(super) links: Vec<Option<Link>>,
}

/// The owner of a descriptor that the thread waits for.
#[derive(Debug, Clone, Copy)]
enum Owner {
    /// The bell of the main process's end.
    Bell,
    /// The bell of this link's port.
    Port(usize),
    /// This link's connection.
    Link(usize),
    /// The listener, or a caller.
    Caller,
}

impl Serving {
    pub(super) fn new(
        shared: Arc<MainShared>,
        control: Arc<Control>,
        listener: TcpListener,
        token: Token,
        most: Option<u64>,
        beats: Beats,
    ) -> Self {
        let workers = control.geometry().workers as usize;
        Self {
            shared,
            control,
            listener,
            token,
            beats,
            limit: FlowLimit::new(most, workers),
            callers: VecDeque::new(),
            is_called: true,
            is_short: false,
            links: (0..workers).map(|_| None).collect(),
        }
    }

    /// Serves until the relay is closed.
    ///
    /// INVARIANT: each link ends, whatever ends the thread: nothing else tells the engine.
    pub(super) fn run(mut self) {
        let ended = catch_unwind(AssertUnwindSafe(|| self.serve_all()));
        let mut state = self.shared.state.lock();
        state.is_closed = true;
        let commands = std::mem::take(&mut state.commands);
        if let Err(panic) = ended {
            let why = format!("the thread that receives batches has panicked: {}", text_of(&*panic));
            state.panic = Some(why);
        }
        let lost = state.panic.clone().map(|why| Loss { why, is_ours: true });
        for status in &mut state.workers {
            status.lost = status.lost.take().or_else(|| lost.clone());
        }
        drop(state);
        let expected = commands.into_iter().filter_map(|command| match command {
            Command::Expect { link, .. } => Some(*link),
            Command::Lose { .. } => None,
        });
        self.links.into_iter().flatten().chain(expected).for_each(Link::end);
        self.shared.changed.notify_all();
    }

    fn serve_all(&mut self) {
        while self.take_commands() {
            if self.is_called || !self.callers.is_empty() {
                self.hear_callers();
                self.accept();
            }
            let is_held_back = self.serve();
            self.sleep(is_held_back);
        }
    }

    /// Does what was asked for. `false`: the relay is closed.
    fn take_commands(&mut self) -> bool {
        loop {
            // One after another: what is left when this thread panics is ended, too.
            let mut state = self.shared.state.lock();
            if state.is_closed {
                return false;
            }
            let Some(command) = state.commands.pop_front() else { return true };
            drop(state);
            match command {
                Command::Expect { worker, link } => {
                    // The one before was lost: nothing else is succeeded.
                    self.links[worker as usize] = Some(*link);
                }
                Command::Lose { worker, number, why } => {
                    if self.links[worker as usize].as_ref().is_some_and(|link| link.number == number) {
                        self.lose(worker as usize, Loss::theirs(why));
                    }
                }
            }
        }
    }

    /// Returns how many callers may be here at once: none where no worker is expected.
    fn most_callers(&self) -> usize {
        match self.links.iter().flatten().filter(|link| link.socket.is_none()).count() {
            0 => 0,
            expected => 2 * expected + SPARE_CALLERS,
        }
    }

    /// Listens to what callers say.
    fn hear_callers(&mut self) {
        for mut caller in std::mem::take(&mut self.callers) {
            match caller.listen(&self.token) {
                Said::Little if caller.since.elapsed() < INTRODUCED_WITHIN => self.callers.push_back(caller),
                Said::Little | Said::Nonsense => {}
                Said::Worker(worker, number) => self.introduce(caller, worker, number),
            }
        }
    }

    /// Takes callers in. Where there are too many, the oldest go: a worker says at once whose it is.
    fn accept(&mut self) {
        self.is_short = false;
        let most = self.most_callers();
        self.callers.drain(..self.callers.len().saturating_sub(most));
        for _ in 0..most {
            match self.listener.accept() {
                Ok((socket, _)) => {
                    if self.callers.len() == most {
                        self.callers.pop_front();
                    }
                    if socket.set_nonblocking(true).is_ok() && socket.set_nodelay(true).is_ok() {
                        sockets::fit(&socket);
                        self.callers.extend(Caller::challenge(socket));
                    }
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => {
                    self.is_short = error.kind() != ErrorKind::WouldBlock;
                    break;
                }
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
            self.shared.state.lock().workers[worker as usize].is_connected = true;
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
            link.ask_each(self.beats.every);
            let mut lost = link.take_tasks().and_then(|()| link.step(is_done, &mut self.limit));
            let received = std::mem::take(&mut link.received);
            if received > 0 {
                self.shared.state.lock().received += received;
            }
            if let Some(silent) = link.silent_for().filter(|&silent| silent > self.beats.lost_after) {
                lost = lost.and(Err(Loss::theirs(format!("nothing was heard of it for {silent:.1?}"))));
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
            if first.is_some_and(|first| first < seq) && !self.limit.has_room(link.out.batches(), of_all) {
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
        // The lock is not held while the link ends: callers ask under it.
        self.shared.state.lock().workers[at].lost = Some(loss);
        link.end();
        self.shared.changed.notify_all();
    }

    /// Sleeps until something happens, and records where.
    pub(super) fn sleep(&mut self, is_held_back: bool) {
        let links = || self.links.iter().enumerate().filter_map(|(at, link)| Some((at, link.as_ref()?)));
        links().for_each(|(_, link)| link.port.announce());
        let is_any = |reading| links().any(|(_, link)| link.reading == reading);
        let has_task = || links().any(|(_, link)| link.port.has_task().unwrap_or(true));
        let limit = match () {
            () if is_any(Reading::More) || has_task() => Duration::ZERO,
            () if is_held_back || is_any(Reading::Stalled) => SOON,
            () if self.is_short => AGAIN,
            () => LONGEST_SLEEP.min(self.beats.every).min(self.beats.lost_after / 4),
        };
        let mut owners = vec![Owner::Bell];
        let mut fds: Vec<(BorrowedFd<'_>, bool)> = vec![(self.shared.bell.as_fd(), false)];
        for (at, link) in links() {
            owners.push(Owner::Port(at));
            fds.push((link.port.bell(), false));
            // A stalled connection is read again once there is room.
            if let Some(socket) = link.socket.as_ref().filter(|_| link.reading != Reading::Stalled) {
                owners.push(Owner::Link(at));
                fds.push((socket.as_fd(), link.has_outgoing()));
            }
        }
        // Nobody is accepted while nobody is expected: strangers wake no thread then, and take no descriptor.
        if !self.is_short && self.most_callers() > 0 {
            fds.push((self.listener.as_fd(), false));
        }
        fds.extend(self.callers.iter().map(|caller| (caller.socket.as_fd(), false)));
        owners.resize(fds.len(), Owner::Caller);
        let found = sockets::wait(&fds, limit).unwrap_or_else(|_| {
            std::thread::sleep(SOON);
            vec![true; fds.len()]
        });
        self.is_called = self.is_short;
        for (owner, is_ready) in owners.into_iter().zip(found) {
            self.note(owner, is_ready);
        }
    }

    /// Records whether a descriptor was found readable or writable.
    fn note(&mut self, owner: Owner, is_ready: bool) {
        match owner {
            Owner::Bell if is_ready => self.shared.bell.clear(),
            Owner::Bell => {}
            Owner::Port(at) => {
                if let Some(link) = &self.links[at] {
                    link.port.withdraw(is_ready);
                }
            }
            Owner::Link(at) => {
                if let Some(link) = &mut self.links[at]
                    && link.reading == Reading::Idle
                    && is_ready
                {
                    link.reading = Reading::Ready;
                }
            }
            Owner::Caller => self.is_called |= is_ready,
        }
    }
}

fn text_of(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("without a message")
}
