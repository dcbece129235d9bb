//! A batch that has arrived: its bytes, and what keeps them until when.

use std::os::fd::BorrowedFd;
use std::ptr::NonNull;

use crate::batch::{Meta, wire};
use crate::error::{Error, Result};
use crate::forks::Moment;
use crate::os::Segment;
use crate::pool::{Custody, SlotId};
use crate::process::{self, Process};
use crate::sync::Arc;
use crate::timing::Stamps;
use crate::transport::joint::windows::HeldJointWindow;
use crate::transport::message::ResultKind;
use crate::transport::slot_memory::SlotWindow;
use crate::transport::worker_handle::WorkerHandle;

/// Keeps the bytes of one batch where they are. Dropping it, on any thread, gives them back.
#[derive(Debug)]
pub enum Backing {
    /// A slot of a worker, held; the worker fills it again once this is dropped.
    Slot(HeldSlot),
    /// A window of a batch that all workers have made, likewise.
    Shared(HeldJointWindow),
    /// A segment that carries this batch alone; gone, or the worker's, once this is dropped.
    Own(OwnSegment),
}

impl Backing {
    /// The address of `len` bytes at `offset` of the batch, valid while this lives.
    ///
    /// # Errors
    /// [`Error::Corrupt`] when they do not lie in it.
    pub fn pointer(&self, offset: u64, len: u64) -> Result<NonNull<u8>> {
        let (segment, start) = self.location();
        segment.pointer(start.saturating_add(offset), len)
    }

    /// Replaces `into` by a copy of `len` bytes at `offset` of the batch.
    ///
    /// # Errors
    /// [`Error::Corrupt`] when they do not lie in it.
    pub fn copy_out(&self, offset: u64, len: u64, into: &mut Vec<u8>) -> Result<()> {
        let (segment, start) = self.location();
        segment.copy_out(start.saturating_add(offset), len, into)
    }

    /// In which segment the batch lies, and where it begins.
    fn location(&self) -> (&Segment, u64) {
        match self {
            Self::Slot(HeldSlot { handle, slot, .. }) => {
                (handle.control.segment(), handle.control.window(handle.worker, *slot).start)
            }
            Self::Shared(held) => held.location(),
            Self::Own(own) => (&own.segment, 0),
        }
    }
}

impl Backing {
    /// Returns true if the batch lies in a window that all workers share.
    #[must_use]
    pub fn is_shared(&self) -> bool {
        matches!(self, Self::Shared(_))
    }

    /// The window that the batch lies in; `None` of a batch that lies in none.
    #[must_use]
    pub fn window(&self) -> Option<SlotWindow> {
        match self {
            Self::Slot(HeldSlot { handle, slot, .. }) => Some(SlotWindow::of(handle, *slot)),
            Self::Shared(held) => Some(SlotWindow::of_joint(held.number())),
            Self::Own(_) => None,
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

/// Gives the memory of an oversize batch back when it is dropped: to its worker, or to the system.
struct Emptied {
    segment: Arc<Segment>,
    process: &'static Process,
}

impl Drop for Emptied {
    fn drop(&mut self) {
        if !self.segment.last_word().is_ok_and(|word| Custody::new(word).give_back()) {
            // Refused, the pages go with the mapping.
            let _ = self.segment.punch(0, self.segment.len());
        }
        self.process.discount_lent();
    }
}

/// A slot that the parent holds.
#[derive(Debug)]
pub struct HeldSlot {
    handle: Arc<WorkerHandle>,
    slot: SlotId,
    /// Bytes counted against the user's half of the worker's share; `None` until it is a lease.
    cost: Option<u64>,
    held: Moment,
}

impl HeldSlot {
    /// Raises the hold of a slot that was just drained.
    pub(crate) fn new(handle: Arc<WorkerHandle>, slot: SlotId) -> Self {
        handle.leases.hold(handle.control.worker(handle.worker).slots, slot);
        let held = handle.process.now();
        Self { handle, slot, cost: None, held }
    }

    #[cold]
    fn release_after_a_fork(&self) {
        let Self { handle, slot, cost, held } = self;
        handle.process.give_back(*held, || Returned { handle: handle.clone(), slot: *slot, cost: *cost });
    }
}

impl Drop for HeldSlot {
    fn drop(&mut self) {
        if self.handle.process.is_still(self.held) {
            self.handle.release(self.slot, self.cost);
        } else {
            self.release_after_a_fork();
        }
    }
}

/// Releases a slot when it is dropped.
struct Returned {
    handle: Arc<WorkerHandle>,
    slot: SlotId,
    cost: Option<u64>,
}

impl Drop for Returned {
    fn drop(&mut self) {
        self.handle.release(self.slot, self.cost);
    }
}

/// A result, drained from its worker's ring.
#[derive(Debug)]
pub struct Received {
    /// The worker that made it.
    pub worker: u32,
    /// The task that it answers.
    pub seq: u64,
    /// The kind of the result.
    pub kind: ResultKind,
    pub(crate) generation: u64,
    pub(crate) used: u64,
    /// The start of its table in the batch.
    pub(crate) meta_offset: u64,
    pub(crate) meta: Vec<u8>,
    pub(crate) backing: Arc<Backing>,
}

impl Received {
    /// The table of the batch, validated against the bytes in use.
    ///
    /// # Errors
    /// [`Error::Corrupt`] when it is not what a worker writes.
    pub fn meta(&self) -> Result<Meta<'_>> {
        Meta::parse(&self.meta, self.generation, self.used)
    }

    /// Returns true if the table equals that of an earlier batch, of which `earlier` is the [table](Self::into_table).
    /// Then it is as valid as that table was, but for the bytes in use, which [`pointer`](Self::pointer) asks for.
    #[must_use]
    pub fn repeats(&self, earlier: &[u8]) -> bool {
        wire::repeats(&self.meta, self.generation, earlier)
    }

    /// The table, as [`into_table`](Self::into_table).
    #[must_use]
    pub fn table(&self) -> &[u8] {
        &self.meta
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

    /// Writes `before` and then the bytes of the batch from `offset` on to a socket, or some of them. Returns how many
    /// went.
    ///
    /// # Errors
    /// As [`Segment::send`].
    pub fn send(&self, socket: BorrowedFd<'_>, before: &[u8], offset: u64) -> Result<std::io::Result<usize>> {
        let (segment, start) = self.backing.location();
        segment.send(socket, before, start + offset, self.used.saturating_sub(offset))
    }

    /// Returns the stamps that follow the batch; `None` if its worker has written none.
    #[must_use]
    pub fn stamps(&self) -> Option<Stamps> {
        let mut bytes = Vec::new();
        let at = self.used.checked_sub(Stamps::BYTES)?;
        self.backing.copy_out(at, Stamps::BYTES, &mut bytes).ok()?;
        Stamps::from_bytes(&bytes, self.generation)
    }

    /// Returns true if the batch came in a segment of its own.
    #[must_use]
    pub fn is_oversize(&self) -> bool {
        matches!(*self.backing, Backing::Own(_))
    }

    /// Bytes of the batch.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.used
    }

    /// Makes the batch the user's, for as long as he likes. `false`: he holds as much of this worker
    /// as he may, and gets a copy.
    pub fn lease(&mut self) -> bool {
        match Arc::get_mut(&mut self.backing) {
            Some(Backing::Slot(held)) => {
                if held.cost.is_none() {
                    let WorkerHandle { control, worker, leases, process, .. } = &*held.handle;
                    let lease = || leases.try_lease(control.worker(*worker).slots, held.slot);
                    held.cost = lease().or_else(|| {
                        // Children for which much is kept may have gone.
                        process.look();
                        lease()
                    });
                }
                held.cost.is_some()
            }
            Some(Backing::Shared(held)) => held.lease(),
            Some(Backing::Own(_)) | None => true,
        }
    }

    /// Returns the owner that keeps the bytes, and nothing else of the batch.
    #[must_use]
    pub fn backing(&self) -> &Arc<Backing> {
        &self.backing
    }
}
