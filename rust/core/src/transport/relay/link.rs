//! One connection, in the main process: the worker's end of the rings there.

use std::collections::VecDeque;
use std::io::{ErrorKind, Write};
use std::net::{Shutdown, TcpStream};
use std::time::{Duration, Instant};

use super::clocks::Clock;
use super::frame::{FrameKind, Header};
use super::incoming::{Incoming, Step, turn};
use super::loss::Loss;
use super::window::{Out, Window};
use crate::error::Result;
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
    /// Tasks that were taken out of the ring, and not sent.
    tasks: VecDeque<Task>,
    /// Bytes to send, and the number of bytes that have gone.
    outgoing: Vec<u8>,
    gone: usize,
    pub(super) out: Out,
    /// When the worker was last heard, or was last kept from being heard.
    heard: Instant,
    asked: Instant,
    clock: Clock,
    /// The counts of the predecessors in this epoch.
    before: [u64; 5],
    is_told_done: bool,
    /// True once the worker answers no other task of the epoch whose tasks are taken.
    is_at_end: bool,
    /// True if a batch has come for which there is no room.
    pub(super) is_stalled: bool,
    /// True if there may be something to be read.
    pub(super) is_ready: bool,
    /// True if there is more to be read than one turn takes.
    pub(super) has_more: bool,
    /// Bytes of batches that were committed since they were last taken.
    pub(super) received: u64,
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
            tasks: VecDeque::new(),
            outgoing: Vec::new(),
            gone: 0,
            out: Out::default(),
            heard: Instant::now(),
            asked: Instant::now(),
            clock: Clock::default(),
            before,
            is_told_done: false,
            is_at_end: false,
            is_stalled: false,
            is_ready: false,
            has_more: false,
            received: 0,
        }
    }

    /// The worker has connected.
    pub(super) fn connect(&mut self, socket: TcpStream) {
        self.socket = Some(socket);
        self.heard = Instant::now();
        self.ask();
    }

    /// Ends the connection. A batch that is half there goes. The engine is told, unless `is_silent`.
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

    /// Asks for the other machine's clock.
    fn ask(&mut self) {
        self.asked = Instant::now();
        self.put(&Header { at: [monotonic(), 0, 0], ..Header::of(FrameKind::Ping) }, &[]);
    }

    /// Takes the tasks that are in the ring.
    pub(super) fn take_tasks(&mut self) -> Result<()> {
        while let Some(task) = self.port.try_task()? {
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
        let len = bytes.len() as u64;
        self.put(&Header { of: kind as u64, seq, len, ..Header::of(FrameKind::Task) }, &bytes);
    }

    fn put(&mut self, header: &Header, bytes: &[u8]) {
        self.outgoing.extend_from_slice(&header.to_bytes());
        self.outgoing.extend_from_slice(bytes);
    }

    /// Tells the worker, once, that nothing more is wanted: only its end is still sent.
    pub(super) fn tell_done(&mut self) {
        if !std::mem::replace(&mut self.is_told_done, true) {
            self.put(&Header::of(FrameKind::Done), &[]);
        }
        self.tasks.retain(|task| !asks(task.kind));
    }

    /// Returns true if there is something to be sent.
    pub(super) fn has_outgoing(&self) -> bool {
        self.gone < self.outgoing.len()
    }

    /// Reads what it can without waiting.
    ///
    /// # Errors
    /// Why the worker is lost.
    pub(super) fn step(&mut self, is_done: bool, window: &mut Window) -> std::result::Result<(), Loss> {
        if !self.is_ready {
            return Ok(());
        }
        self.has_more = false;
        self.is_stalled = false;
        let mut left = turn();
        while let Some(socket) = &mut self.socket {
            let clock = &self.clock;
            let stamps = |there| clock.translate(there, monotonic());
            match self.incoming.step(socket, &self.port, &mut left, !is_done, &self.before, stamps)? {
                Step::On if left > 0 => self.heard = Instant::now(),
                Step::On => {
                    self.heard = Instant::now();
                    self.has_more = true;
                    return Ok(());
                }
                Step::Dry => return Ok(()),
                Step::NoRoom => {
                    // Nothing is read, so nothing can be heard.
                    self.heard = Instant::now();
                    self.is_stalled = true;
                    return Ok(());
                }
                Step::Header(header) => self.take(header)?,
                Step::Committed(header, kind) => self.record(header, kind, window),
            }
        }
        Ok(())
    }

    /// Takes a frame that is no result.
    fn take(&mut self, header: Header) -> std::result::Result<(), Loss> {
        self.heard = Instant::now();
        match header.kind {
            FrameKind::Beat => {
                let [asked, heard, answered] = header.at;
                if asked > 0 {
                    self.clock.take(asked, heard, answered, monotonic());
                } else {
                    self.ask();
                }
                Ok(())
            }
            kind => Err(format!("it has sent a {kind:?}").into()),
        }
    }

    /// Counts a result that was committed.
    fn record(&mut self, header: Header, kind: ResultKind, window: &mut Window) {
        self.heard = Instant::now();
        self.received += header.len;
        self.out.answer();
        if header.ends_part {
            self.end_part();
        }
        match kind {
            ResultKind::Batch => window.record(header.len),
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
    pub(super) fn flush(&mut self) -> std::result::Result<(), Loss> {
        let Some(socket) = &mut self.socket else { return Ok(()) };
        while self.gone < self.outgoing.len() {
            match socket.write(&self.outgoing[self.gone..]) {
                Ok(sent) => self.gone += sent,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(format!("its connection has failed: {error}").into()),
            }
        }
        self.outgoing.clear();
        self.gone = 0;
        Ok(())
    }

    /// Returns for how long nothing was heard of a worker that has connected and may speak.
    pub(super) fn silent_for(&self) -> Option<Duration> {
        (self.socket.is_some() && !self.is_stalled).then(|| self.heard.elapsed())
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
