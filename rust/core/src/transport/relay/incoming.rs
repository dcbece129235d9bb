//! A batch on its way from a connection into a slot: one step after another, none of which waits.

use std::io::{ErrorKind, Read};
use std::net::TcpStream;
use std::os::fd::{AsFd, OwnedFd};

use super::frame::{HEADER, Header};
use crate::error::{Error, Result};
use crate::os::Segment;
use crate::os::fd_passing::SendOutcome;
use crate::sync::Arc;
use crate::timing::Stamps;
use crate::transport::message::ResultKind;
use crate::transport::port::{Commit, Port, Room};

/// Bytes that one connection may take before others are served.
const TURN: u64 = 4 << 20;

/// The state of a connection's next frame.
#[derive(Debug)]
pub(super) enum Incoming {
    /// A header.
    Header { bytes: [u8; HEADER], have: usize },
    /// A batch.
    Batch(Box<Batch>),
    /// Bytes that nobody wants.
    Unwanted { left: u64 },
}

/// A batch, with the memory that it is read into.
#[derive(Debug)]
pub(super) struct Batch {
    pub(super) header: Header,
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
        Self::Header { bytes: [0; HEADER], have: 0 }
    }

    /// Returns true if a frame has begun and is not all there.
    pub(super) fn is_inside(&self) -> bool {
        !matches!(self, Self::Header { have: 0, .. })
    }

    /// Goes on as far as it can without waiting. `turn`: bytes that it may still take. `is_wanted`: false if results are dropped.
    /// `before`: what the predecessors of the worker have counted in this epoch. `stamps` turns the worker's moments into this machine's.
    ///
    /// # Errors
    /// Why the connection cannot go on, in words.
    pub(super) fn step(
        &mut self,
        socket: &mut TcpStream,
        port: &Arc<Port>,
        turn: &mut u64,
        is_wanted: bool,
        before: &[u64; 5],
        stamps: impl Fn(Stamps) -> Stamps,
    ) -> std::result::Result<Step, String> {
        match self {
            Self::Header { bytes, have } => {
                let Some(read) = read(socket.read(&mut bytes[*have..]))? else { return Ok(Step::Dry) };
                *have += read;
                if *have < HEADER {
                    return Ok(Step::On);
                }
                let header = Header::from_bytes(bytes).map_err(text)?;
                *self = Self::new();
                if header.len == 0 {
                    return Ok(Step::Header(header));
                }
                let kind = ResultKind::from_number(header.of)
                    .ok_or_else(|| format!("it has sent a result of kind {}", header.of))?;
                let commit = port.begin_relayed(header.at[2]);
                *self = Self::Batch(Box::new(Batch {
                    header,
                    kind,
                    commit,
                    own: None,
                    have: None,
                    is_sent: false,
                }));
                Ok(Step::On)
            }
            Self::Unwanted { left } => {
                let mut scratch = [0; 64 << 10];
                let most = (*left).min(scratch.len() as u64) as usize;
                let Some(read) = read(socket.read(&mut scratch[..most]))? else { return Ok(Step::Dry) };
                *left -= read as u64;
                *turn = turn.saturating_sub(read as u64);
                if *left == 0 {
                    *self = Self::new();
                }
                Ok(Step::On)
            }
            Self::Batch(batch) => {
                if !is_wanted {
                    let left = batch.header.len - batch.have.unwrap_or(0);
                    *self = if left == 0 { Self::new() } else { Self::Unwanted { left } };
                    return Ok(Step::On);
                }
                let step = batch.step(socket, port, turn, before, stamps)?;
                if let Step::Committed(..) = step {
                    *self = Self::new();
                }
                Ok(step)
            }
        }
    }
}

impl Batch {
    fn step(
        &mut self,
        socket: &TcpStream,
        port: &Port,
        turn: &mut u64,
        before: &[u64; 5],
        stamps: impl Fn(Stamps) -> Stamps,
    ) -> std::result::Result<Step, String> {
        let Some(have) = self.have else {
            return Ok(if self.reserve().map_err(text)? { Step::On } else { Step::NoRoom });
        };
        let len = self.header.len;
        if have == len {
            return self.finish(port, before, stamps).map_err(text);
        }
        let end = len.min(have.saturating_add(TURN));
        let received = self.commit.receive(socket.as_fd(), have..end, self.own.as_ref()).map_err(text)?;
        let Some(read) = read(received)? else { return Ok(Step::Dry) };
        self.have = Some(have + read as u64);
        *turn = turn.saturating_sub(read as u64);
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

/// Returns how many bytes came; `None`: none are there now.
fn read(result: std::io::Result<usize>) -> std::result::Result<Option<usize>, String> {
    match result {
        Ok(0) => Err("its connection has ended".into()),
        Ok(read) => Ok(Some(read)),
        Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => Ok(None),
        Err(error) => Err(format!("its connection has failed: {error}")),
    }
}

fn text(error: Error) -> String {
    error.to_string()
}
