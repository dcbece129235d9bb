//! A batch on its way from a connection into a slot: one step after another, none of which waits.

use std::net::TcpStream;
use std::ops::Range;
use std::os::fd::AsFd;

use zerocopy::little_endian::U64;

use super::frame::{FrameHeader, FrameKind, HEADER};
use super::loss::Loss;
use super::peer_clock::PeerClock;
use super::reader::{AHEAD, Reader};
use super::usize_from;
use crate::error;
use crate::os::clock::monotonic;
use crate::os::fd_passing::SendOutcome;
use crate::sync::Arc;
use crate::timing::Stamps;
use crate::transport::message::ResultKind;
use crate::transport::port::{Commit, Port, Room};

/// Bytes that one connection may take before others are served.
pub(super) const TURN: u64 = 4 << 20;

/// Bytes that a frame counts as, beside its content: it takes time without content, too.
pub(super) const OF_FRAME: u64 = 4 << 10;

/// The longest batch that is taken for one: no machine makes longer ones, so a longer length is garbled.
pub(super) const LONGEST_BATCH: u64 = 1 << 40;

/// The next frame of a connection.
#[derive(Debug)]
pub(super) struct Incoming {
    reader: Reader,
    frame: Frame,
}

/// The state of a frame.
#[derive(Debug)]
enum Frame {
    /// The header has not come yet.
    Header,
    /// A batch.
    Batch(Box<Batch>),
    /// Bytes that nobody wants.
    Unwanted { left: u64 },
}

/// A batch, with the memory that it is read into.
#[derive(Debug)]
struct Batch {
    answer: Answer,
    commit: Commit<Arc<Port>>,
    /// Bytes that have come; `None` before there is room.
    have: Option<u64>,
    /// True once its segment was sent.
    is_sent: bool,
}

/// The header of a result, checked.
#[derive(Debug, Clone)]
pub(super) struct Answer {
    pub(super) kind: ResultKind,
    pub(super) seq: u64,
    /// Bytes of the result, its table among them.
    pub(super) len: u64,
    /// True if its worker answers no other task of this epoch.
    pub(super) ends_part: bool,
    /// INVARIANT: within `len`.
    table: Range<u64>,
    /// The number of its filling.
    generation: u64,
    counts: [u64; 5],
}

/// One turn of a connection.
pub(super) struct Turn<'a> {
    pub(super) port: &'a Arc<Port>,
    pub(super) clock: &'a PeerClock,
    /// The counts of the worker's predecessors in this epoch.
    pub(super) before: &'a [u64; 5],
    /// False if results are dropped.
    pub(super) is_wanted: bool,
    /// Bytes that it may still take.
    pub(super) left: u64,
}

/// The outcome of a step.
#[derive(Debug)]
pub(super) enum Step {
    /// There is more to do.
    On,
    /// There is nothing more to read.
    Dry,
    /// There is no room yet.
    NoRoom,
    /// A sign of life has come, with these moments.
    Beat([u64; 3]),
    /// A result is committed.
    Committed(Answer),
}

impl Turn<'_> {
    fn count(&mut self, bytes: u64) {
        self.left = self.left.saturating_sub(bytes);
    }
}

impl Answer {
    /// Checks the header of a result.
    ///
    /// # Errors
    /// Where no worker sends such a header.
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

impl Incoming {
    /// At the start of a frame.
    pub(super) fn new() -> Self {
        Self { reader: Reader::new(), frame: Frame::Header }
    }

    /// Returns true if a frame has begun and is not all there.
    pub(super) fn is_inside(&self) -> bool {
        !matches!(self.frame, Frame::Header) || !self.reader.ahead().is_empty()
    }

    /// Reads all that it can without waiting.
    ///
    /// # Errors
    /// The reason why the connection cannot continue.
    pub(super) fn step(&mut self, socket: &mut TcpStream, turn: &mut Turn<'_>) -> Result<Step, Loss> {
        let Self { reader, frame } = self;
        match frame {
            Frame::Header => {
                let Some(bytes) = reader.ahead().first_chunk::<HEADER>() else {
                    return Ok(if reader.fill(socket)? { Step::On } else { Step::Dry });
                };
                let header = FrameHeader::read(bytes).map_err(Loss::theirs)?;
                reader.consume(HEADER);
                turn.count(OF_FRAME);
                match header.kind {
                    FrameKind::Beat if header.len == U64::ZERO => Ok(Step::Beat(header.at.map(U64::get))),
                    FrameKind::Result => {
                        let answer = Answer::check(&header)?;
                        let commit = turn.port.begin_relayed(answer.generation);
                        let batch = Batch { answer, commit, have: None, is_sent: false };
                        *frame = Frame::Batch(Box::new(batch));
                        Ok(Step::On)
                    }
                    kind => Err(Loss::theirs(format!("it has sent a {kind:?} of {} bytes", header.len))),
                }
            }
            Frame::Unwanted { left } => {
                if reader.ahead().is_empty() && !reader.fill(socket)? {
                    return Ok(Step::Dry);
                }
                let dropped = (*left).min(reader.ahead().len() as u64);
                reader.consume(usize_from(dropped));
                *left -= dropped;
                turn.count(dropped);
                if *left == 0 {
                    *frame = Frame::Header;
                }
                Ok(Step::On)
            }
            Frame::Batch(batch) => {
                if !turn.is_wanted {
                    let left = batch.answer.len - batch.have.unwrap_or(0);
                    *frame = if left == 0 { Frame::Header } else { Frame::Unwanted { left } };
                    return Ok(Step::On);
                }
                let step = batch.step(reader, socket, turn)?;
                if let Step::Committed(..) = step {
                    *frame = Frame::Header;
                }
                Ok(step)
            }
        }
    }
}

impl Batch {
    fn step(
        &mut self,
        reader: &mut Reader,
        socket: &mut TcpStream,
        turn: &mut Turn<'_>,
    ) -> Result<Step, Loss> {
        let Some(have) = self.have else {
            let is_there = self.reserve().map_err(Loss::ours)?;
            return Ok(if is_there { Step::On } else { Step::NoRoom });
        };
        let left = self.answer.len - have;
        let read = match reader.ahead() {
            _ if left == 0 => return self.finish(turn).map_err(Loss::ours),
            [] if left < AHEAD as u64 => {
                return Ok(if reader.fill(socket)? { Step::On } else { Step::Dry });
            }
            [] => {
                let asked = left.min(TURN);
                if reader.is_drained() {
                    return Ok(Step::Dry);
                }
                let range = have..have + asked;
                let received = self.commit.receive(socket.as_fd(), range);
                let received = received.map_err(Loss::ours)?;
                let Some(read) = reader.record(usize_from(asked), received)? else { return Ok(Step::Dry) };
                read as u64
            }
            ahead => {
                let copied = left.min(ahead.len() as u64);
                let bytes = &ahead[..usize_from(copied)];
                self.commit.copy_in(have, bytes).map_err(Loss::ours)?;
                reader.consume(usize_from(copied));
                copied
            }
        };
        self.have = Some(have + read);
        turn.count(read);
        Ok(Step::On)
    }

    /// Takes memory for the batch. `false`: there is none yet.
    fn reserve(&mut self) -> error::Result<bool> {
        match self.commit.reserve(self.answer.len)? {
            Room::Ready => {}
            Room::Later => return Ok(false),
            Room::Oversize => {
                if !self.commit.own_segment(self.answer.len)? {
                    return Ok(false);
                }
            }
        }
        self.have = Some(0);
        Ok(true)
    }

    fn finish(&mut self, turn: &Turn<'_>) -> error::Result<Step> {
        let Answer { kind, seq, len, ref table, counts, .. } = self.answer;
        if !self.is_sent {
            self.translate_stamps(turn.clock)?;
            if self.commit.own().is_some() {
                match self.commit.send()? {
                    SendOutcome::Yes => {}
                    SendOutcome::Full | SendOutcome::TooManyInFlight => return Ok(Step::NoRoom),
                }
            }
            // Before the commit: the parent finds a batch counted that it has taken.
            match kind {
                ResultKind::Batch => {
                    let count = |at: usize| turn.before[at].wrapping_add(counts[at]);
                    turn.port.counts().replace(std::array::from_fn(count));
                }
                ResultKind::Object => turn.port.counters().begin_epoch(),
            }
            self.is_sent = true;
        }
        let is_committed = self.commit.finish(seq, kind, table.clone(), len)?;
        Ok(if is_committed { Step::Committed(self.answer.clone()) } else { Step::NoRoom })
    }

    /// Makes the moments that follow the batch, if there are any, this machine's.
    fn translate_stamps(&self, clock: &PeerClock) -> error::Result<()> {
        let Answer { len, ref table, generation, .. } = self.answer;
        let Some(at) = len.checked_sub(Stamps::BYTES).filter(|&at| table.end <= at) else { return Ok(()) };
        let mut bytes = Vec::new();
        self.commit.copy_out(at..len, &mut bytes)?;
        let Some(there) = Stamps::from_bytes(&bytes, generation) else { return Ok(()) };
        self.commit.copy_in(at, &clock.translate(there, monotonic()).to_bytes(generation))
    }
}
