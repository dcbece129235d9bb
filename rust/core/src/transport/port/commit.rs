//! A batch on its way into the ring, into a slot or into a segment of its own.

use std::ops::Range;
use std::os::fd::AsFd;
use std::ptr::NonNull;

use super::own::OwnSegment;
use super::{Port, PortState};
use crate::error::{Error, Result};
use crate::number::usize_from;
use crate::os::Segment;
use crate::os::fd_passing::{self, SendOutcome};
use crate::pool::{Fill, Growth};
use crate::sync::doorbell::take_any;
use crate::testing::failpoint::failpoint;
use crate::transport::message::{BatchLocation, ResultDescriptor, ResultKind};

/// Says if a batch can be written into a slot now.
#[derive(Debug)]
#[must_use]
pub enum Room {
    /// The batch can be written now.
    Ready,
    /// The batch can be written once the parent has taken what was committed before: wait, then ask again.
    Later,
    /// The batch never fits: it must travel in a segment of its own.
    Oversize,
}

/// One batch on its way into the ring. Dropped before [`finish`](Self::finish), it was never there.
#[derive(Debug)]
pub struct Commit<'a> {
    pub(super) port: &'a Port,
    pub(super) fill: Option<Fill>,
    pub(super) generation: u64,
    /// The segment of a batch that lies in no slot.
    pub(super) own: Option<OwnSegment>,
    /// True if the worker uses such a segment again.
    pub(super) keeps: bool,
}

impl Commit<'_> {
    /// The number of this filling, for the meta block.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// The addresses of what was allocated of the slot that is being filled, from the slot's start.
    #[must_use]
    pub fn filled(&self) -> Range<usize> {
        let Some(fill) = &self.fill else { return 0..0 };
        let window = self.port.control.window(self.port.worker, fill.slot);
        let start = self.port.control.segment().base().as_ptr() as usize + usize_from(window.start);
        start..start + usize_from(fill.bump())
    }

    /// The first byte of the slot that is free for copies.
    #[must_use]
    pub fn bump(&mut self) -> u64 {
        self.fill.as_mut().map_or(0, |fill| {
            fill.take_back();
            fill.bump()
        })
    }

    /// Makes bytes `0..end` of a slot usable for this batch.
    ///
    /// # Errors
    /// [`Error::Memory`] when the machine or the control group has not enough left.
    pub fn reserve(&mut self, end: u64) -> Result<Room> {
        let port = self.port;
        let view = port.control.worker(port.worker);
        let mut state = port.state.lock();
        if self.fill.is_none() {
            if end > port.limits.half() {
                return Ok(Room::Oversize);
            }
            let slot = state.slots.begin(view.slots);
            self.fill = slot.map(Fill::new);
        }
        loop {
            state.count_own(view.results, port.limits.share)?;
            if let Some(fill) = &self.fill {
                match state.grow(port, fill.slot, end)? {
                    Growth::Ready => return Ok(Room::Ready),
                    Growth::Oversize => return Ok(Room::Oversize),
                    Growth::NoRoom => {}
                }
            }
            // INVARIANT: a worker waits only for results that come before this one. With none left in the
            // ring, room would come only from the user or the worker itself: nothing to wait for.
            if !view.results.is_empty()? {
                return Ok(Room::Later);
            }
            // Counted before the parent took the last one: look again, once.
            if state.own.are_taken() {
                return Ok(Room::Oversize);
            }
        }
    }

    /// The address of `len` bytes at `offset` of the slot, of what [`reserve`](Self::reserve) made usable.
    ///
    /// # Errors
    /// [`Error::Config`] when there is no slot.
    pub fn pointer(&self, offset: u64, len: u64) -> Result<NonNull<u8>> {
        let Some(fill) = &self.fill else { return Err(Error::Config("no slot is being filled".into())) };
        let window = self.port.control.window(self.port.worker, fill.slot);
        self.port.control.segment().pointer(window.start + offset, len)
    }

    /// Takes a segment of `len` bytes for this batch, one that was used before or a new one, which is checked against the
    /// memory that is left. `false`: once the parent has taken what was committed before; wait and ask
    /// [`reserve`](Self::reserve) again.
    ///
    /// Such segments that the parent has not taken, those that are kept, and the slots stay within the share together, but
    /// for a batch that has nothing before it.
    ///
    /// # Errors
    /// [`Error::Memory`] or [`Error::Os`] when there is no memory for it.
    pub fn own_segment(&mut self, len: u64) -> Result<bool> {
        let port = self.port;
        let view = port.control.worker(port.worker);
        let mut state = port.state.lock();
        let bytes = OwnSegment::bytes_for(len, port.limits.page);
        let found = state.own.take(bytes);
        let bytes = found.as_ref().map_or(bytes, OwnSegment::bytes);
        let has_room = |state: &mut PortState| {
            state.recount_own(view.results)?;
            Ok::<_, Error>(state.slots.make_room(view.slots, bytes, &mut &*port))
        };
        let mut is_within = found.is_some() && has_room(&mut state)?;
        if !is_within {
            // The others make room. Where none was found, none of them fits.
            state.own.give_back(0);
            is_within = has_room(&mut state)?;
        }
        if !is_within {
            // INVARIANT: as in `reserve`.
            if !view.results.is_empty()? {
                state.own.put_back(found);
                return Ok(false);
            }
            // The segment exceeds the share in any case, but warm slots do not add to that: they are given back.
            state.slots.shrink(view.slots, bytes, &mut &*port);
        }
        let own = match found {
            Some(own) => own,
            None => {
                port.probe.require(bytes)?;
                state.own.create(bytes, if self.keeps { port.limits.share } else { 0 })?
            }
        };
        drop(state);
        own.lend();
        self.own = Some(own);
        Ok(true)
    }

    /// The segment of [`own_segment`](Self::own_segment), from whose start the batch is written.
    #[must_use]
    pub fn own(&self) -> Option<&Segment> {
        self.own.as_ref().map(OwnSegment::segment)
    }

    /// Sends the descriptor of the batch's own segment; to be called before [`finish`](Self::finish). Where it was
    /// not sent: wait and try again.
    ///
    /// # Errors
    /// [`Error::Os`] when the parent is gone, [`Error::Config`] when there is no such segment.
    pub fn send(&self) -> Result<SendOutcome> {
        let Some(own) = &self.own else {
            return Err(Error::Config("the batch has no segment of its own".into()));
        };
        let sent = fd_passing::send(self.port.socket.as_fd(), own.fd(), self.generation)?;
        failpoint("segment-sent");
        Ok(sent)
    }

    /// Commits the batch. `meta` was written to `meta_offset` of the slot, or of the batch's own segment, which was
    /// sent; `used` bytes of it are in use. `false`: the ring is full, wait and try again.
    ///
    /// # Errors
    /// [`Error::Corrupt`] when the parent wrote what it never writes, [`Error::Config`] when there is neither.
    pub fn finish(&mut self, seq: u64, kind: ResultKind, meta: Range<u64>, used: u64) -> Result<bool> {
        let location = match (&self.own, &self.fill) {
            (Some(_), _) => BatchLocation::Own,
            (None, Some(fill)) => BatchLocation::Slot(fill.slot),
            (None, None) => return Err(Error::Config("a batch without memory".into())),
        };
        self.push(seq, kind, meta, used, location)
    }

    /// As [`finish`](Self::finish), of a batch that lies in a window that all workers share, and that this worker
    /// collates.
    ///
    /// # Errors
    /// As [`finish`](Self::finish).
    pub fn finish_shared(
        &mut self,
        seq: u64,
        kind: ResultKind,
        meta: Range<u64>,
        used: u64,
        window: u32,
    ) -> Result<bool> {
        self.push(seq, kind, meta, used, BatchLocation::Shared(window))
    }

    #[inline]
    fn push(
        &mut self,
        seq: u64,
        kind: ResultKind,
        meta: Range<u64>,
        used: u64,
        location: BatchLocation,
    ) -> Result<bool> {
        failpoint("filled");
        let port = self.port;
        let view = port.control.worker(port.worker);
        let words = ResultDescriptor {
            seq,
            kind,
            location,
            meta_offset: meta.start,
            meta_len: meta.end - meta.start,
            used,
            generation: self.generation,
        }
        .to_words();
        let mut state = port.state.lock();
        let at = state.results.tail();
        if !state.results.push(view.results, &words)? {
            return Ok(false);
        }
        if let Some(own) = self.own.take() {
            state.own.sent(at, own);
        }
        // A batch in a segment of its own leaves the slot, if there is one, to be abandoned.
        if let BatchLocation::Slot(slot) = location {
            state.slots.commit(slot);
            self.fill = None;
        }
        drop(state);
        failpoint("tail-stored");
        port.control.ready().set(port.worker);
        failpoint("ready-set");
        if take_any([view.parent_sleeps, port.control.parent_sleeps()]) {
            failpoint("flag-taken");
            port.parent_eventfd.notify();
        }
        Ok(true)
    }
}

impl Drop for Commit<'_> {
    fn drop(&mut self) {
        // Its own leases end before the slot is free.
        if let Some(slot) = self.fill.take().map(|fill| fill.slot) {
            self.port.state.lock().slots.abandon(slot);
        }
    }
}
