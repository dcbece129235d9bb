//! A batch on its way from a connection into a slot: one step after another, none of which waits.

use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};

use super::frame::{HEADER, Header};
use super::loss::Loss;
use super::reader::{AHEAD, Reader};
use crate::error::{Error, Result};
use crate::os::Segment;
use crate::os::fd_passing::SendOutcome;
use crate::sync::Arc;
use crate::timing::Stamps;
use crate::transport::message::ResultKind;
use crate::transport::port::{Commit, Port, Room};

/// Bytes that one connection may take before others are served.
const TURN: u64 = 4 << 20;

/// The next frame of a connection.
#[derive(Debug)]
pub(super) struct Incoming {
    reader: Reader,
    frame: Frame,
}

/// The state of a frame.
#[derive(Debug)]
enum Frame {
    /// Its header is not there yet.
    Header,
    /// A batch.
    Batch(Box<Batch>),
    /// Bytes that nobody wants.
    Unwanted { left: u64 },
}

/// A batch, with the memory that it is read into.
#[derive(Debug)]
struct Batch {
    header: Header,
    kind: ResultKind,
    commit: Commit<Arc<Port>>,
    /// The segment of a batch that is too large for a slot.
    own: Option<(Segment, OwnedFd)>,
    /// Bytes that have come; `None` before there is room.
    have: Option<u64>,
    /// True once its segment was sent.
    is_sent: bool,
}

/// The outcome of a step.
#[derive(Debug)]
pub(super) enum Step {
    /// There is more to do.
    On,
    /// Nothing more is there to be read.
    Dry,
    /// There is no room yet.
    NoRoom,
    /// A header has come, of which nothing follows.
    Header(Header),
    /// A batch is committed.
    Committed(Header, ResultKind),
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

    /// Goes on as far as it can without waiting. `turn`: bytes that it may still take. `is_wanted`: false if results are dropped.
    /// `before`: what the predecessors of the worker have counted in this epoch. `stamps` turns the worker's moments into this machine's.
    ///
    /// # Errors
    /// Why the connection cannot go on.
    pub(super) fn step(
        &mut self,
        socket: &mut TcpStream,
        port: &Arc<Port>,
        turn: &mut u64,
        is_wanted: bool,
        before: &[u64; 5],
        stamps: impl Fn(Stamps) -> Stamps,
    ) -> std::result::Result<Step, Loss> {
        let Self { reader, frame } = self;
        match frame {
            Frame::Header => {
                let Some(bytes) = reader.ahead().first_chunk::<HEADER>() else {
                    return Ok(if reader.fill(socket)? { Step::On } else { Step::Dry });
                };
                let header = Header::from_bytes(bytes)?;
                reader.consume(HEADER);
                if header.len == 0 {
                    return Ok(Step::Header(header));
                }
                let kind = ResultKind::from_number(header.of)
                    .ok_or_else(|| format!("it has sent a result of kind {}", header.of))?;
                let commit = port.begin_relayed(header.at[2]);
                let batch = Batch { header, kind, commit, own: None, have: None, is_sent: false };
                *frame = Frame::Batch(Box::new(batch));
                Ok(Step::On)
            }
            Frame::Unwanted { left } => {
                if reader.ahead().is_empty() && !reader.fill(socket)? {
                    return Ok(Step::Dry);
                }
                let dropped = reader.ahead().len().min(usize::try_from(*left).unwrap_or(usize::MAX));
                reader.consume(dropped);
                *left -= dropped as u64;
                *turn = turn.saturating_sub(dropped as u64);
                if *left == 0 {
                    *frame = Frame::Header;
                }
                Ok(Step::On)
            }
            Frame::Batch(batch) => {
                if !is_wanted {
                    let left = batch.header.len - batch.have.unwrap_or(0);
                    *frame = if left == 0 { Frame::Header } else { Frame::Unwanted { left } };
                    return Ok(Step::On);
                }
                let step = batch.step(reader, socket, port, turn, before, stamps)?;
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
        port: &Port,
        turn: &mut u64,
        before: &[u64; 5],
        stamps: impl Fn(Stamps) -> Stamps,
    ) -> std::result::Result<Step, Loss> {
        let Some(have) = self.have else {
            return Ok(if self.reserve()? { Step::On } else { Step::NoRoom });
        };
        let left = self.header.len - have;
        let read = match reader.ahead() {
            _ if left == 0 => return Ok(self.finish(port, before, stamps)?),
            [] if left < AHEAD as u64 => {
                return Ok(if reader.fill(socket)? { Step::On } else { Step::Dry });
            }
            [] => {
                let asked = left.min(TURN);
                if reader.is_drained() {
                    return Ok(Step::Dry);
                }
                let range = have..have + asked;
                let received = self.commit.receive(socket.as_fd(), range, self.own.as_ref())?;
                let Some(read) = reader.record(asked as usize, received)? else { return Ok(Step::Dry) };
                read as u64
            }
            ahead => {
                let copied = left.min(ahead.len() as u64);
                self.commit.copy_in(have, &ahead[..copied as usize], self.own.as_ref())?;
                reader.consume(copied as usize);
                copied
            }
        };
        self.have = Some(have + read);
        *turn = turn.saturating_sub(read);
        Ok(Step::On)
    }

    /// Takes memory for the batch. `false`: there is none yet.
    fn reserve(&mut self) -> Result<bool> {
        match self.commit.reserve(self.header.len)? {
            Room::Ready => {}
            Room::Later => return Ok(false),
            Room::Oversize => match self.commit.own_segment(self.header.len)? {
                Some(own) => self.own = Some(own),
                None => return Ok(false),
            },
        }
        self.have = Some(0);
        Ok(true)
    }

    fn finish(&mut self, port: &Port, before: &[u64; 5], stamps: impl Fn(Stamps) -> Stamps) -> Result<Step> {
        let Header { seq, len, at: [table, table_len, generation], counts, .. } = self.header;
        let table_end = table.checked_add(table_len).filter(|&end| end <= len);
        let table_end = table_end.ok_or_else(|| Error::Corrupt("a table outside of its batch".into()))?;
        let own = self.own.as_ref();
        if !self.is_sent {
            if table_end.checked_add(Stamps::BYTES).is_some_and(|end| end <= len) {
                let at = len - Stamps::BYTES;
                let mut bytes = Vec::new();
                self.commit.copy_out(at..len, &mut bytes, own)?;
                if let Some(there) = Stamps::from_bytes(&bytes, generation) {
                    self.commit.copy_in(at, &stamps(there).to_bytes(generation), own)?;
                }
            }
            if let Some((_, fd)) = own {
                match self.commit.send(fd)? {
                    SendOutcome::Yes => {}
                    SendOutcome::Full | SendOutcome::TooManyInFlight => return Ok(Step::NoRoom),
                }
            }
            // Before the commit: the parent finds a batch counted that it has taken.
            match self.kind {
                ResultKind::Batch => {
                    port.counts().replace(std::array::from_fn(|at| before[at] + counts[at]));
                }
                ResultKind::Object => port.counters().begin_epoch(),
            }
            self.is_sent = true;
        }
        let is_committed = self.commit.finish(seq, self.kind, table..table_end, len, own.is_some())?;
        Ok(if is_committed { Step::Committed(self.header, self.kind) } else { Step::NoRoom })
    }
}

/// Bytes that may be read in one turn.
pub(super) fn turn() -> u64 {
    TURN
}
