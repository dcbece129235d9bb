//! One connection, in the main process: the worker's end of the rings there, on a thread of its own.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::io::{self, BufRead, BufReader, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::ops::Range;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use zerocopy::IntoBytes;
use zerocopy::little_endian::U64;

use super::frame::{FrameHeader, FrameKind, HEADER};
use super::peer_clock::PeerClock;
use super::shared::{Loss, MainShared};
use super::usize_from;
use crate::error;
use crate::os::clock::monotonic;
use crate::os::fd_passing::SendOutcome;
use crate::sync::Ordering;
use crate::timing::Stamps;
use crate::transport::message::{ResultKind, Task, TaskKind};
use crate::transport::port::{Commit, Port, Room};

/// Bytes that may be read ahead of their use, so that one call reads many small frames.
pub(super) const AHEAD: usize = 16 << 10;

/// The longest batch that is taken for one: no machine makes longer ones, so a longer length is garbled.
pub(super) const LONGEST_BATCH: u64 = 1 << 40;

/// The time until a task that may not be sent yet is looked at again.
const SOON: Duration = Duration::from_millis(2);

/// A worker that has connected.
#[derive(Debug)]
pub(super) struct Link<'a> {
    shared: &'a MainShared,
    port: &'a Port,
    socket: &'a TcpStream,
    input: BufReader<&'a TcpStream>,
    /// True if a frame has begun and is not all there.
    is_inside: bool,
    /// When the worker was last heard, or was last kept from being heard.
    heard: Instant,
    /// When it was last asked for its clock.
    asked: Instant,
    clock: PeerClock,
    /// The counts of the predecessors in this epoch.
    before: [u64; 5],
    is_told_done: bool,
    /// Tasks that were taken out of the ring, and may not be sent yet.
    tasks: VecDeque<Task>,
    /// True once the worker answers no other task of the epoch whose tasks are sent.
    is_at_end: bool,
}

/// The header of a result, checked.
#[derive(Debug)]
struct Answer {
    kind: ResultKind,
    seq: u64,
    /// Bytes of the result, its table among them.
    len: u64,
    /// True if its worker answers no other task of this epoch.
    ends_part: bool,
    /// INVARIANT: within `len`.
    table: Range<u64>,
    /// The number of its filling.
    generation: u64,
    counts: [u64; 5],
}

impl Answer {
    /// Checks the header of a result.
    ///
    /// # Errors
    /// [`Loss`], blamed on the worker, if no worker sends such a header.
    fn check(header: &FrameHeader) -> Result<Self, Loss> {
        let FrameHeader { of, len, at: [table, table_len, generation], counts, .. } = *header;
        let len = len.get();
        let kind = ResultKind::from_number(of.into());
        let kind = kind.ok_or_else(|| Loss::theirs(format!("it has sent a result of kind {of}")))?;
        if !(1..LONGEST_BATCH).contains(&len) {
            return Err(Loss::theirs(format!("it has sent a result of {len} bytes")));
        }
        let table_end = table.get().checked_add(table_len.get()).filter(|&end| end <= len);
        let table_end = table_end.ok_or_else(|| Loss::theirs("it has sent a table outside of its batch"))?;
        Ok(Self {
            kind,
            seq: header.seq.get(),
            len,
            ends_part: header.ends_part,
            table: table.get()..table_end,
            generation: generation.get(),
            counts: counts.map(U64::get),
        })
    }
}

impl<'a> Link<'a> {
    pub(super) fn new(shared: &'a MainShared, port: &'a Port, socket: &'a TcpStream) -> Self {
        Self {
            shared,
            port,
            socket,
            input: BufReader::with_capacity(AHEAD, socket),
            is_inside: false,
            heard: Instant::now(),
            asked: Instant::now(),
            clock: PeerClock::default(),
            before: port.counters().now().all(),
            is_told_done: false,
            tasks: VecDeque::new(),
            is_at_end: false,
        }
    }

    /// Serves the worker until it is lost.
    pub(super) fn serve(&mut self) -> Result<Infallible, Loss> {
        let beats = self.shared.beats;
        let limits = self.socket.set_read_timeout(Some(beats.every));
        let limits = limits.and_then(|()| self.socket.set_write_timeout(Some(beats.lost_after)));
        limits.map_err(|error| self.failed(&error))?;
        self.ask()?;
        loop {
            self.tend()?;
            let is_called = !self.input.buffer().is_empty() || {
                let limit = if self.tasks.is_empty() { beats.every.min(beats.lost_after / 4) } else { SOON };
                self.port.wait_for_task_or(self.socket.as_fd(), limit).map_err(Loss::ours)?
            };
            if is_called {
                self.take_frame()?;
            } else {
                self.check_silence()?;
            }
        }
    }

    /// Sends what there is to send: tasks, and a sign of life if it is time.
    fn tend(&mut self) -> Result<(), Loss> {
        let is_done = self.port.is_done();
        if is_done && !std::mem::replace(&mut self.is_told_done, true) {
            self.send(&FrameHeader::new(FrameKind::Done), &[])?;
        }
        if self.asked.elapsed() >= self.shared.beats.every {
            self.ask()?;
        }
        while let Some(task) = self.port.try_task().map_err(Loss::ours)? {
            self.tasks.push_back(task);
        }
        while let Some(task) = self.tasks.pop_front() {
            // Nothing more is wanted: only the worker's end is still sent.
            if is_done && asks(task.kind) {
                continue;
            }
            if !self.may_send(&task) {
                self.tasks.push_front(task);
                break;
            }
            let (seq, len) = (task.seq.into(), (task.bytes.len() as u64).into());
            let header = FrameHeader { of: task.kind as u8, seq, len, ..FrameHeader::new(FrameKind::Task) };
            self.send(&header, &task.bytes)?;
        }
        Ok(())
    }

    /// Counts a task. Returns false if it may not be sent yet.
    fn may_send(&mut self, task: &Task) -> bool {
        let Some(limit) = &self.shared.limit else { return true };
        let worker = self.port.worker();
        match task.kind {
            TaskKind::Object => {
                self.is_at_end = false;
                limit.lock().send_other(worker);
                true
            }
            // A task that is not answered is not counted.
            kind => !asks(kind) || self.is_at_end || limit.lock().may_send(worker, task.seq),
        }
    }

    /// Gives a sign of life, and asks for the other machine's clock.
    fn ask(&mut self) -> Result<(), Loss> {
        self.asked = Instant::now();
        self.send(&FrameHeader::with_moments(FrameKind::Ping, [monotonic(), 0, 0]), &[])
    }

    fn send(&self, header: &FrameHeader, content: &[u8]) -> Result<(), Loss> {
        let frame = [header.as_bytes(), content].concat();
        let mut socket = self.socket;
        socket.write_all(&frame).map_err(|error| match error.kind() {
            ErrorKind::WouldBlock => self.gone("its connection takes nothing"),
            _ => self.failed(&error),
        })
    }

    /// Returns the loss of a worker that has gone in this way.
    fn gone(&self, how: &str) -> Loss {
        Loss::theirs(if self.is_inside { format!("{how}, in the middle of a batch") } else { how.into() })
    }

    fn failed(&self, error: &io::Error) -> Loss {
        self.gone(&format!("its connection has failed: {error}"))
    }

    fn check_silence(&self) -> Result<(), Loss> {
        let silent = self.heard.elapsed();
        if silent <= self.shared.beats.lost_after {
            return Ok(());
        }
        Err(self.gone(&format!("nothing was heard of it for {silent:.1?}")))
    }

    /// Takes what a call that reads has returned. Returns how many bytes came: 0 if the caller is to try again.
    fn hear(&mut self, result: io::Result<usize>) -> Result<usize, Loss> {
        let read = match result {
            Ok(0) => return Err(self.gone("its connection has ended")),
            Ok(read) => {
                self.heard = Instant::now();
                self.is_inside = true;
                read
            }
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {
                self.check_silence()?;
                0
            }
            Err(error) => return Err(self.failed(&error)),
        };
        self.tend()?;
        Ok(read)
    }

    /// Takes one frame.
    fn take_frame(&mut self) -> Result<(), Loss> {
        let mut bytes = [0; HEADER];
        let mut have = 0;
        while have < HEADER {
            let result = self.input.read(&mut bytes[have..]);
            have += self.hear(result)?;
        }
        let header = FrameHeader::read(&bytes).map_err(Loss::theirs)?;
        match header.kind {
            FrameKind::Beat if header.len == U64::ZERO => {
                let [asked, heard, answered] = header.at.map(U64::get);
                if asked != 0 {
                    self.clock.take(asked, heard, answered, monotonic());
                }
            }
            FrameKind::Result => self.take_result(Answer::check(&header)?)?,
            kind => return Err(Loss::theirs(format!("it has sent a {kind:?} of {} bytes", header.len))),
        }
        self.is_inside = false;
        Ok(())
    }

    /// Takes a batch into a slot. Drops it if nothing is wanted any more.
    fn take_result(&mut self, answer: Answer) -> Result<(), Loss> {
        let Answer { kind, seq, len, ends_part, ref table, generation, counts } = answer;
        let port = self.port;
        let mut commit = port.begin_relayed(generation);
        if !self.until(|| reserve(&mut commit, len))? {
            return self.skip(len);
        }
        self.read(&commit, len)?;
        self.translate_stamps(&commit, &answer).map_err(Loss::ours)?;
        if commit.own().is_some() && !self.until(|| Ok(commit.send()? == SendOutcome::Yes))? {
            return Ok(());
        }
        // Before the commit: the parent finds a batch counted that it has taken.
        match kind {
            ResultKind::Batch => {
                let count = |at: usize| self.before[at].wrapping_add(counts[at]);
                port.counters().now().replace(std::array::from_fn(count));
            }
            ResultKind::Object => {
                port.counters().begin_epoch();
                self.before = [0; 5];
            }
        }
        if self.until(|| commit.finish(seq, kind, table.clone(), len))? {
            self.shared.received.fetch_add(len, Ordering::Relaxed);
            if let Some(limit) = &self.shared.limit {
                let mut limit = limit.lock();
                limit.answer(port.worker(), (kind == ResultKind::Batch).then_some(len));
                self.is_at_end |= ends_part && limit.end_part(port.worker());
            }
        }
        Ok(())
    }

    /// Tries until there is room. Returns false if nothing is wanted any more.
    fn until(&mut self, mut attempt: impl FnMut() -> error::Result<bool>) -> Result<bool, Loss> {
        while !self.port.is_done() {
            if attempt().map_err(Loss::ours)? {
                return Ok(true);
            }
            self.port.wait_for_room().map_err(Loss::ours)?;
            self.tend()?;
            // Nothing is read meanwhile, so nothing can be heard.
            self.heard = Instant::now();
            let state = self.shared.state.lock();
            if let Some(loss) = &state.workers[self.port.worker() as usize].lost {
                return Err(loss.clone());
            }
        }
        Ok(false)
    }

    /// Reads the bytes of a batch to their place.
    fn read(&mut self, commit: &Commit<'_>, len: u64) -> Result<(), Loss> {
        let mut have = 0;
        while have < len {
            let ahead = self.input.buffer();
            have += if ahead.is_empty() {
                let result = commit.receive(self.socket.as_fd(), have..len).map_err(Loss::ours)?;
                self.hear(result)? as u64
            } else {
                let copied = (len - have).min(ahead.len() as u64);
                commit.copy_in(have, &ahead[..usize_from(copied)]).map_err(Loss::ours)?;
                self.input.consume(usize_from(copied));
                copied
            };
        }
        Ok(())
    }

    fn skip(&mut self, len: u64) -> Result<(), Loss> {
        let mut dropped = [0; AHEAD];
        let mut left = len;
        while left > 0 {
            let most = usize_from(left.min(AHEAD as u64));
            let result = self.input.read(&mut dropped[..most]);
            left -= self.hear(result)? as u64;
        }
        Ok(())
    }

    /// Makes the moments that follow the batch, if there are any, this machine's.
    fn translate_stamps(&self, commit: &Commit<'_>, answer: &Answer) -> error::Result<()> {
        let Answer { len, ref table, generation, .. } = *answer;
        let Some(at) = len.checked_sub(Stamps::BYTES).filter(|&at| table.end <= at) else { return Ok(()) };
        let mut bytes = Vec::new();
        commit.copy_out(at..len, &mut bytes)?;
        let Some(there) = Stamps::from_bytes(&bytes, generation) else { return Ok(()) };
        commit.copy_in(at, &self.clock.translate(there, monotonic()).to_bytes(generation))
    }
}

/// Returns true if a task of this kind asks for a batch.
fn asks(kind: TaskKind) -> bool {
    !matches!(kind, TaskKind::End | TaskKind::Object | TaskKind::Call)
}

/// Takes memory for a batch. Returns false if there is none yet.
fn reserve(commit: &mut Commit<'_>, len: u64) -> error::Result<bool> {
    Ok(match commit.reserve(len)? {
        Room::Ready => true,
        Room::Later => false,
        Room::Oversize => commit.own_segment(len)?,
    })
}
