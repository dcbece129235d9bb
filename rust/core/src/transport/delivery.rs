//! A batch that has arrived: its bytes, and who keeps them until when.

use std::ptr::NonNull;

use crate::batch::{Meta, wire};
use crate::error::{Error, Result};
use crate::forks::Moment;
use crate::os::Segment;
use crate::os::eventfd::Bell;
use crate::pool::{Closing, Ledger, SlotId};
use crate::process::{self, Lender, Process};
use crate::sync::Arc;
use crate::transport::layout::Control;
use crate::transport::message::ResultKind;

/// What the parent knows of one worker, and every lease on that worker's slots with it.
///
/// INVARIANT: all of it is usable from any thread, without the interpreter, at interpreter exit.
#[derive(Debug)]
pub(crate) struct Seat {
    pub(crate) control: Arc<Control>,
    pub(crate) worker: u32,
    /// The worker's bell: it sleeps for tasks and for room.
    pub(crate) bell: Bell,
    pub(crate) ledger: Ledger,
    /// The process that may release: a forked child inherits leases and must leave them alone.
    pub(crate) process: &'static Process,
    closing: Closing,
}

impl Lender for Seat {
    fn is_lending(&self) -> bool {
        self.ledger.leased_slots() > 0
    }
}

impl Seat {
    pub(crate) fn new(control: Arc<Control>, worker: u32, bell: Bell, ledger: Ledger) -> Arc<Self> {
        let process = process::current();
        let seat = Arc::new(Self { control, worker, bell, ledger, process, closing: Closing::new() });
        let lender = Arc::downgrade(&seat);
        process.register(lender);
        seat
    }

    /// Wakes the worker if it sleeps.
    pub(crate) fn wake(&self) {
        if self.control.worker(self.worker).worker_sleeps.take() {
            self.bell.ring();
        }
    }

    /// Gives the memory of all slots that nobody holds back, now and at every later release.
    ///
    /// To be called when the worker has ended: nothing is filled any more.
    pub(crate) fn close(&self) {
        self.closing.close();
        self.control.retire(self.worker, (0..self.control.geometry().slots).map(SlotId::new));
        self.control.give_back(self.control.arena(self.worker));
    }

    /// Of the process that holds, when no child that it forked may have the slot.
    fn release(&self, slot: SlotId, cost: Option<u64>) {
        self.ledger.release(self.control.worker(self.worker).slots, slot, cost);
        if self.closing.is_closed() {
            // While this thread was between the two stores of its release, the slot may have come round:
            // then it is held, and who holds it now gives it back.
            self.control.retire(self.worker, std::iter::once(slot));
        } else {
            self.wake();
        }
    }
}

/// Keeps the bytes of one batch where they are. Dropping it, on any thread, gives them back.
#[derive(Debug)]
pub enum Backing {
    /// A slot of a worker, held; the worker fills it again once this is dropped.
    Slot(HeldSlot),
    /// A segment that carries this batch alone; gone once this is dropped.
    Own(OwnSegment),
}

impl Backing {
    /// The address of `len` bytes at `offset` of the batch, valid while this lives.
    ///
    /// # Errors
    /// [`Error::Corrupt`] when they do not lie in it.
    pub fn pointer(&self, offset: u64, len: u64) -> Result<NonNull<u8>> {
        let (segment, start) = self.place();
        segment.pointer(start.saturating_add(offset), len)
    }

    /// Replaces `into` by a copy of `len` bytes at `offset` of the batch.
    ///
    /// # Errors
    /// [`Error::Corrupt`] when they do not lie in it.
    pub fn copy_out(&self, offset: u64, len: u64, into: &mut Vec<u8>) -> Result<()> {
        let (segment, start) = self.place();
        segment.copy_out(start.saturating_add(offset), len, into)
    }

    /// In which segment the batch lies, and where it begins.
    fn place(&self) -> (&Segment, u64) {
        match self {
            Self::Slot(HeldSlot { seat, slot, .. }) => {
                (seat.control.segment(), seat.control.window(seat.worker, *slot).start)
            }
            Self::Own(own) => (&own.segment, 0),
        }
    }
}

/// The segment of an oversize batch, delivered.
#[derive(Debug)]
pub struct OwnSegment {
    segment: Arc<Segment>,
    /// The process that it was delivered to.
    process: &'static Process,
    held: Moment,
}

impl OwnSegment {
    pub(crate) fn new(segment: Segment) -> Self {
        let process = process::current();
        process.count_lent();
        Self { segment: Arc::new(segment), process, held: process.now() }
    }
}

impl Drop for OwnSegment {
    fn drop(&mut self) {
        let Self { segment, process, held } = self;
        let emptied = || Emptied { segment: segment.clone(), process };
        if process.is_still(*held) {
            drop(emptied());
        } else {
            // A child has a mapping of its own: what this process gives back is gone there too.
            process.give_back(*held, emptied);
        }
    }
}

/// Gives the memory of an oversize batch back when it is dropped.
struct Emptied {
    segment: Arc<Segment>,
    process: &'static Process,
}

impl Drop for Emptied {
    fn drop(&mut self) {
        // Refused, the pages go with the mapping.
        let _ = self.segment.punch(0, self.segment.len());
        self.process.discount_lent();
    }
}

/// A slot that the parent holds.
#[derive(Debug)]
pub struct HeldSlot {
    seat: Arc<Seat>,
    slot: SlotId,
    /// Bytes counted against the user's half of the worker's share; `None` until it is a lease.
    cost: Option<u64>,
    held: Moment,
}

impl HeldSlot {
    /// Raises the hold of a slot that was just drained.
    pub(crate) fn new(seat: Arc<Seat>, slot: SlotId) -> Self {
        seat.ledger.hold(seat.control.worker(seat.worker).slots, slot);
        let held = seat.process.now();
        Self { seat, slot, cost: None, held }
    }

    #[cold]
    fn release_after_a_fork(&self) {
        let Self { seat, slot, cost, held } = self;
        seat.process.give_back(*held, || Returned { seat: seat.clone(), slot: *slot, cost: *cost });
    }
}

impl Drop for HeldSlot {
    fn drop(&mut self) {
        if self.seat.process.is_still(self.held) {
            self.seat.release(self.slot, self.cost);
        } else {
            self.release_after_a_fork();
        }
    }
}

/// Releases a slot when it is dropped.
struct Returned {
    seat: Arc<Seat>,
    slot: SlotId,
    cost: Option<u64>,
}

impl Drop for Returned {
    fn drop(&mut self) {
        self.seat.release(self.slot, self.cost);
    }
}

/// A result, drained from its worker's ring.
#[derive(Debug)]
pub struct Delivery {
    /// Who made it.
    pub worker: u32,
    /// The task that it answers.
    pub seq: u64,
    /// What it is.
    pub kind: ResultKind,
    pub(crate) generation: u64,
    pub(crate) used: u64,
    pub(crate) meta: Vec<u8>,
    pub(crate) backing: Arc<Backing>,
}

impl Delivery {
    /// The table of the batch, validated against the bytes in use.
    ///
    /// # Errors
    /// [`Error::Corrupt`] when it is not what a worker writes.
    pub fn meta(&self) -> Result<Meta<'_>> {
        Meta::parse(&self.meta, self.generation, self.used)
    }

    /// Whether its table is that of an earlier batch: then it is as valid as that one was, of which
    /// `earlier` is the [table](Self::into_table), but for the bytes in use, which
    /// [`pointer`](Self::pointer) asks for.
    #[must_use]
    pub fn repeats(&self, earlier: &[u8]) -> bool {
        wire::repeats(&self.meta, self.generation, earlier)
    }

    /// The table, for [`repeats`](Self::repeats) of later batches.
    #[must_use]
    pub fn into_table(self) -> Vec<u8> {
        self.meta
    }

    /// The address of `len` bytes at `offset` of the batch, valid while the backing lives.
    ///
    /// # Errors
    /// [`Error::Corrupt`] when they do not lie in it.
    pub fn pointer(&self, offset: u64, len: u64) -> Result<NonNull<u8>> {
        if offset.checked_add(len).is_none_or(|end| end > self.used) {
            return Err(Error::Corrupt(format!("{len} bytes at {offset} of a batch of {}", self.used)));
        }
        self.backing.pointer(offset, len)
    }

    /// Whether the batch came in a segment of its own.
    #[must_use]
    pub fn is_oversize(&self) -> bool {
        matches!(*self.backing, Backing::Own(_))
    }

    /// Bytes of the batch.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.used
    }

    /// Whether it has no bytes; it has at least its table.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.used == 0
    }

    /// Makes the batch the user's, for as long as he likes. `false`: he holds as much of this worker
    /// as he may, and gets a copy.
    pub fn lease(&mut self) -> bool {
        match Arc::get_mut(&mut self.backing) {
            Some(Backing::Slot(held)) => {
                if held.cost.is_none() {
                    let Seat { control, worker, ledger, process, .. } = &*held.seat;
                    let lease = || ledger.try_lease(control.worker(*worker).slots, held.slot);
                    held.cost = lease().or_else(|| {
                        // Children for whom much is kept may have gone.
                        process.look();
                        lease()
                    });
                }
                held.cost.is_some()
            }
            Some(Backing::Own(_)) | None => true,
        }
    }

    /// What keeps the bytes, and nothing else of the batch.
    #[must_use]
    pub fn backing(&self) -> &Arc<Backing> {
        &self.backing
    }
}
