//! One connection, in the main process: the worker's end of the rings there.

use std::collections::VecDeque;
use std::io::{ErrorKind, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use zerocopy::IntoBytes;

use super::flow_limit::{FlowLimit, Out};
use super::frame::{FrameHeader, FrameKind};
use super::incoming::{Answer, Incoming, Step, TURN, Turn};
use super::loss::Loss;
use super::peer_clock::PeerClock;
use crate::os::clock::monotonic;
use crate::os::eventfd::EventFd;
use crate::sync::Arc;
use crate::transport::message::{ResultKind, Task, TaskKind};
use crate::transport::port::Port;

/// A worker that is expected, or connected.
#[derive(Debug)]
pub(super) struct Link {
    /// The number under which it is expected.
    pub(super) number: u64,
    pub(super) port: Arc<Port>,
    /// Tells the engine of the worker's end.
    ended: EventFd,
    pub(super) socket: Option<TcpStream>,
    incoming: Incoming,
    pub(super) reading: Reading,
    /// Tasks that were taken out of the ring, and not sent.
    tasks: VecDeque<Task>,
    outgoing: Outgoing,
    pub(super) out: Out,
    /// When the worker was last heard, or was last kept from being heard.
    heard: Instant,
    /// When it was last asked for its clock.
    asked: Instant,
    clock: PeerClock,
    /// The counts of the predecessors in this epoch.
    before: [u64; 5],
    is_told_done: bool,
    /// True once the worker answers no other task of the epoch whose tasks are taken.
    is_at_end: bool,
    /// Bytes of batches that were committed since they were last taken.
    pub(super) received: u64,
}

/// The state of what a connection has brought.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Reading {
    /// Nothing.
    Idle,
    /// Something has come.
    Ready,
    /// More than one turn takes.
    More,
    /// A batch for which there is no room.
    Stalled,
}

/// Bytes to send.
#[derive(Debug, Default)]
struct Outgoing {
    bytes: Vec<u8>,
    /// The number of them that have gone.
    gone: usize,
}

impl Outgoing {
    fn put(&mut self, header: &FrameHeader, content: &[u8]) {
        self.bytes.extend_from_slice(header.as_bytes());
        self.bytes.extend_from_slice(content);
    }

    fn is_empty(&self) -> bool {
        self.gone == self.bytes.len()
    }

    /// Sends what goes without waiting.
    fn flush(&mut self, socket: &mut TcpStream) -> Result<(), Loss> {
        while !self.is_empty() {
            match socket.write(&self.bytes[self.gone..]) {
                Ok(sent) => self.gone += sent,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(Loss::theirs(format!("its connection has failed: {error}"))),
            }
        }
        self.bytes.clear();
        self.gone = 0;
        Ok(())
    }
}

impl Link {
    pub(super) fn new(number: u64, port: Arc<Port>, ended: EventFd) -> Self {
        let before = port.counts().all();
        Self {
            number,
            port,
            ended,
            socket: None,
            incoming: Incoming::new(),
            reading: Reading::Idle,
            tasks: VecDeque::new(),
            outgoing: Outgoing::default(),
            out: Out::default(),
            heard: Instant::now(),
            asked: Instant::now(),
            clock: PeerClock::default(),
            before,
            is_told_done: false,
            is_at_end: false,
            received: 0,
        }
    }

    /// The worker has connected.
    pub(super) fn connect(&mut self, socket: TcpStream) {
        self.socket = Some(socket);
        self.heard = Instant::now();
        self.ask();
    }

    /// Ends the connection. A batch that is half there goes. The engine is told.
    pub(super) fn end(self) {
        let Self { port, ended, socket, incoming, .. } = self;
        if let Some(socket) = socket {
            // A child that was forked meanwhile has it too.
            let _ = socket.shutdown(Shutdown::Both);
        }
        // INVARIANT: by the time that the engine is told, nothing writes to the slots of this worker.
        drop((incoming, port));
        ended.notify();
    }

    /// Gives a sign of life, and asks for the other machine's clock, if it is time. A connection that takes nothing gets
    /// none: what it was sent before is not read yet.
    pub(super) fn ask_each(&mut self, interval: Duration) {
        if self.socket.is_some() && self.outgoing.is_empty() && self.asked.elapsed() >= interval {
            self.ask();
        }
    }

    fn ask(&mut self) {
        self.asked = Instant::now();
        self.outgoing.put(&FrameHeader::with_moments(FrameKind::Ping, [monotonic(), 0, 0]), &[]);
    }

    /// Takes the tasks that are in the ring.
    ///
    /// # Errors
    /// Why the worker is lost.
    pub(super) fn take_tasks(&mut self) -> Result<(), Loss> {
        while let Some(task) = self.port.try_task().map_err(Loss::ours)? {
            self.is_at_end &= task.kind != TaskKind::Object;
            if !(self.is_at_end && asks(task.kind)) {
                self.tasks.push_back(task);
            }
        }
        Ok(())
    }

    /// The first batch that is asked for and was not sent. Sends what stands before it. `None` too before the worker
    /// has connected.
    pub(super) fn next_batch(&mut self) -> Option<u64> {
        self.socket.as_ref()?;
        loop {
            let task = self.tasks.front()?;
            if asks(task.kind) {
                return Some(task.seq);
            }
            self.send_next();
        }
    }

    /// Sends the next task.
    pub(super) fn send_next(&mut self) {
        let Some(Task { seq, kind, bytes }) = self.tasks.pop_front() else { return };
        match kind {
            TaskKind::End | TaskKind::Call => {}
            TaskKind::Object => self.out.send(None),
            _ => self.out.send(Some(seq)),
        }
        let (seq, len) = (seq.into(), (bytes.len() as u64).into());
        self.outgoing
            .put(&FrameHeader { of: kind as u8, seq, len, ..FrameHeader::new(FrameKind::Task) }, &bytes);
    }

    /// Tells the worker, once, that nothing more is wanted: only its end is still sent.
    pub(super) fn tell_done(&mut self) {
        if !std::mem::replace(&mut self.is_told_done, true) {
            self.outgoing.put(&FrameHeader::new(FrameKind::Done), &[]);
        }
        self.tasks.retain(|task| !asks(task.kind));
    }

    /// Returns true if there is something to be sent.
    pub(super) fn has_outgoing(&self) -> bool {
        !self.outgoing.is_empty()
    }

    /// Reads what it can in one turn without waiting.
    ///
    /// # Errors
    /// Why the worker is lost.
    pub(super) fn step(&mut self, is_done: bool, limit: &mut FlowLimit) -> Result<(), Loss> {
        if self.reading == Reading::Idle {
            return Ok(());
        }
        self.reading = Reading::More;
        let mut left = TURN;
        while let Some(socket) = self.socket.as_mut().filter(|_| left > 0) {
            let Self { port, clock, before, .. } = self;
            let mut turn = Turn { port, clock, before, is_wanted: !is_done, left };
            let step = self.incoming.step(socket, &mut turn)?;
            left = turn.left;
            if let Step::Dry = step {
                self.reading = Reading::Idle;
                break;
            }
            // Where there is no room nothing is read, so nothing can be heard.
            self.heard = Instant::now();
            match step {
                Step::On | Step::Dry => {}
                Step::NoRoom => {
                    self.reading = Reading::Stalled;
                    break;
                }
                Step::Beat([0, ..]) => {}
                Step::Beat([asked, heard, answered]) => self.clock.take(asked, heard, answered, monotonic()),
                Step::Committed(answer) => self.record(&answer, limit),
            }
        }
        Ok(())
    }

    /// Counts a result that was committed.
    fn record(&mut self, answer: &Answer, limit: &mut FlowLimit) {
        self.received += answer.len;
        self.out.answer();
        if answer.ends_part {
            self.end_part();
        }
        match answer.kind {
            ResultKind::Batch => limit.record(answer.len),
            ResultKind::Object => self.before = [0; 5],
        }
    }

    /// The worker answers no other task of this epoch: the ones that were not sent are not.
    fn end_part(&mut self) {
        if !self.out.end_part() {
            // The bytes that are left belong to the next epoch.
            return;
        }
        let next = self.tasks.iter().position(|task| task.kind == TaskKind::Object);
        self.is_at_end = next.is_none();
        let of_epoch = next.unwrap_or(self.tasks.len());
        let mut at = 0..;
        self.tasks.retain(|task| at.next().is_some_and(|at| at >= of_epoch) || !asks(task.kind));
    }

    /// Sends what it can without waiting.
    ///
    /// # Errors
    /// Why the worker is lost.
    pub(super) fn flush(&mut self) -> Result<(), Loss> {
        self.socket.as_mut().map_or(Ok(()), |socket| self.outgoing.flush(socket))
    }

    /// Returns for how long nothing was heard of a worker that has connected and may speak.
    pub(super) fn silent_for(&self) -> Option<Duration> {
        (self.socket.is_some() && self.reading != Reading::Stalled).then(|| self.heard.elapsed())
    }

    /// Returns true if a frame has begun and is not all there.
    pub(super) fn is_inside(&self) -> bool {
        self.incoming.is_inside()
    }
}

/// Returns true if a task of this kind asks for a batch.
fn asks(kind: TaskKind) -> bool {
    !matches!(kind, TaskKind::End | TaskKind::Object | TaskKind::Call)
}
