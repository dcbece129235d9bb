//! A worker's side: takes tasks, fills slots, commits results. Composition only.

use std::collections::VecDeque;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::forks::Moment;
use crate::os::eventfd::{EventFd, sleep};
use crate::os::memory::MemoryProbe;
use crate::os::{Segment, fd_passing};
use crate::pool::{Growth, Ledger, Limits, OwnLease, Pages, SlotId, SlotWords, WorkerSlots};
use crate::process::{self, Lender, Process};
use crate::ring::{Consumer, Producer, Ring};
use crate::sync::adaptive_spin::AdaptiveSpin;
use crate::sync::doorbell::{sleep_unless, take_any};
use crate::sync::{Arc, Weak};
use crate::testing::failpoint::failpoint;
use crate::transport::LONGEST_SLEEP;
use crate::transport::fds::PortFds;
use crate::transport::layout::{Control, Counters};
use crate::transport::message::{BatchPlace, ResultDescriptor, ResultKind, Task, TaskDescriptor, TaskKind};

/// Leaves lie at multiples of this.
pub const ALIGNMENT: u64 = crate::batch::wire::STORAGE_ALIGN;

/// What an idle worker gives back of its free slots for each [`LONGEST_SLEEP`]: to fault that in again takes
/// less than a tenth of the time.
const GIVEN_BACK: u64 = 8 << 20;

/// A worker's end of the transport.
///
/// One thread takes tasks and commits; any may [`allocate`](Self::allocate).
#[derive(Debug)]
pub struct Port {
    control: Arc<Control>,
    worker: u32,
    limits: Limits,
    eventfd: EventFd,
    parent_eventfd: EventFd,
    parent_pidfd: OwnedFd,
    socket: OwnedFd,
    probe: MemoryProbe,
    /// The worker's process. A child that the dataset forks must not write to the slot being filled.
    process: &'static Process,
    _lender: Arc<Collated>,
    spin: AdaptiveSpin,
    state: Mutex<PortState>,
}

#[derive(Debug)]
struct PortState {
    tasks: Consumer,
    results: Producer,
    slots: WorkerSlots,
    /// Whether a task was taken whose result is not committed: only then is a slot filled.
    open: bool,
    filling: Option<Fill>,
    fillings: u64,
    /// Batches in segments of their own that the parent may not have taken: where each stands in the ring, and its
    /// bytes. Private, so that a worker that dies leaves nothing to repair: its successor begins with an empty ring.
    own: VecDeque<(u64, u64)>,
}

impl PortState {
    /// Drops those of the batches in segments of their own that the parent has taken.
    #[inline]
    fn count_own(&mut self, results: Ring<'_>) -> Result<()> {
        if self.own.is_empty() { Ok(()) } else { self.recount_own(results) }
    }

    #[cold]
    fn recount_own(&mut self, results: Ring<'_>) -> Result<()> {
        let (head, tail) = (self.results.head(results)?, self.results.tail());
        let waiting = tail.wrapping_sub(head);
        self.own.retain(|(at, _)| tail.wrapping_sub(*at) <= waiting);
        self.slots.set_beside(self.own.iter().map(|(_, bytes)| bytes).sum());
        Ok(())
    }
}

/// A slot that is being filled for one batch.
#[derive(Debug)]
pub struct Fill {
    slot: SlotId,
    /// The first byte that was not handed out, from the start of the window.
    bump: u64,
    /// What was handed out, in order; what the worker has dropped at the end is taken back.
    chunks: Vec<(u64, Weak<OwnLease>)>,
}

/// Bytes of a slot that collate may write to. The slot is not filled again before it is dropped, and the children
/// that were forked while it was there have ended.
#[derive(Debug)]
pub struct Chunk {
    address: usize,
    len: u64,
    lease: Arc<OwnLease>,
    process: &'static Process,
    taken: Moment,
}

impl Chunk {
    /// The address where they begin; as long as the chunk lives, no other code gets them.
    #[inline]
    #[must_use]
    pub fn address(&self) -> usize {
        self.address
    }

    /// How many bytes they are. Not zero.
    #[inline]
    #[must_use]
    #[allow(clippy::len_without_is_empty)]
    pub fn len(&self) -> u64 {
        self.len
    }
}

impl Drop for Chunk {
    fn drop(&mut self) {
        if !self.process.is_still(self.taken) {
            self.process.give_back(self.taken, || self.lease.clone());
        }
    }
}

/// The worker lends what it collates to itself, and to those that it forks: to ask whether it has any at a fork would
/// be more than to note the fork.
#[derive(Debug)]
struct Collated;

impl Lender for Collated {
    fn is_lending(&self) -> bool {
        true
    }
}

/// Whether a batch can be written into a slot now.
#[derive(Debug)]
#[must_use]
pub enum Room {
    /// It can.
    Ready,
    /// Once the parent has taken what was committed before: wait, then ask again.
    Later,
    /// It never fits: it must travel in a segment of its own.
    Oversize,
}

/// Why a worker goes on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wake {
    /// Something may have happened, or the time is over.
    Look,
    /// The parent has ended: nothing is wanted any more.
    ParentEnded,
}

impl Port {
    /// The end for `worker` of a segment that its parent made, with the share of memory the
    /// parent gave it. Slots that are warm stay so, and those that the user holds since an epoch before are left to him.
    ///
    /// # Errors
    /// [`Error::Corrupt`] when the segment is not one of this version.
    pub fn attach(control: Arc<Control>, worker: u32, share: u64, fds: PortFds) -> Result<Self> {
        // No result of this worker is in its ring, so no slot begins to be held between this look and the swap.
        Self::with_slots(control, worker, share, fds, |words, limits| {
            Ok(WorkerSlots::take_over(words, limits, &Ledger::busy(words)))
        })
    }

    /// The end for `worker` whose predecessor has ended. `busy` is what
    /// [`Engine::succeed`](crate::transport::engine::Engine::succeed) has returned; all else is as for
    /// [`attach`](Self::attach), which would take what the user still holds for free.
    ///
    /// # Errors
    /// As [`attach`](Self::attach); [`Error::Config`] when `busy` is that of another segment.
    pub fn take_over(
        control: Arc<Control>,
        worker: u32,
        share: u64,
        fds: PortFds,
        busy: &[u64],
    ) -> Result<Self> {
        Self::with_slots(control, worker, share, fds, |words, limits| {
            if busy.len() != words.free.len() {
                let (came, expected) = (busy.len(), words.free.len());
                return Err(Error::Config(format!(
                    "{came} words of held slots came, {expected} were expected"
                )));
            }
            Ok(WorkerSlots::take_over(words, limits, busy))
        })
    }

    fn with_slots(
        control: Arc<Control>,
        worker: u32,
        share: u64,
        PortFds { eventfd, parent_eventfd, parent_pidfd, socket }: PortFds,
        slots: impl FnOnce(SlotWords<'_>, Limits) -> Result<WorkerSlots>,
    ) -> Result<Self> {
        if worker >= control.geometry().workers {
            return Err(Error::Config(format!("worker {worker} of {}", control.geometry().workers)));
        }
        let process = process::current();
        let lender = Arc::new(Collated);
        let as_lender = Arc::downgrade(&lender);
        process.register(as_lender);
        let limits = control.limits(share);
        let view = control.worker(worker);
        let state = PortState {
            tasks: Consumer::attach(view.tasks)?,
            results: Producer::attach(view.results)?,
            slots: slots(view.slots, limits)?,
            open: false,
            filling: None,
            fillings: 0,
            own: VecDeque::new(),
        };
        Ok(Self {
            worker,
            limits,
            eventfd: EventFd::attach(eventfd),
            parent_eventfd: EventFd::attach(parent_eventfd),
            parent_pidfd,
            socket,
            probe: MemoryProbe::new(),
            process,
            _lender: lender,
            spin: AdaptiveSpin::default(),
            state: Mutex::new(state),
            control,
        })
    }

    /// Whether this is the worker, and not a process that its dataset forked: that one must leave rings and slots alone.
    #[must_use]
    pub fn is_current(&self) -> bool {
        self.process.is_current()
    }

    /// The next task, if one is there.
    ///
    /// # Errors
    /// [`Error::Corrupt`] when the parent wrote what it never writes.
    pub fn try_task(&self) -> Result<Option<Task>> {
        let view = self.control.worker(self.worker);
        let mut state = self.lock();
        let Some(words) = state.tasks.peek(view.tasks)? else { return Ok(None) };
        let TaskDescriptor { seq, kind, offset, len } = TaskDescriptor::from_words(&words)?;
        let arena = self.control.arena(self.worker);
        if offset.checked_add(len).is_none_or(|end| end > arena.end - arena.start) {
            return Err(Error::Corrupt(format!("a task of {len} bytes at {offset} of its arena")));
        }
        let mut bytes = Vec::new();
        self.control.segment().copy_out(arena.start + offset, len, &mut bytes)?;
        failpoint("task-taken");
        state.tasks.advance(view.tasks);
        failpoint("task-handed-back");
        state.open = kind != TaskKind::End;
        Ok(Some(Task { seq, kind, bytes }))
    }

    /// Sleeps until the parent sends something or gives room, ends, a signal comes, or `limit` or
    /// [`LONGEST_SLEEP`] is over. After a sleep of that length, free slots begin to give their memory back.
    ///
    /// # Errors
    /// [`Error::Os`] when the system refuses.
    pub fn wait(&self, limit: Duration) -> Result<Wake> {
        let tasks = self.control.worker(self.worker).tasks;
        let began = Instant::now();
        let found = || Ok(self.lock().tasks.peek(tasks)?.is_some());
        let sleep = || self.wait_unless(found, limit.min(LONGEST_SLEEP));
        let wake = self.spin.before(limit, found, sleep)?.unwrap_or(Wake::Look);
        if began.elapsed() >= LONGEST_SLEEP {
            let words = self.control.worker(self.worker).slots;
            self.lock().slots.shrink(words, GIVEN_BACK, &mut self.pages());
        }
        Ok(wake)
    }

    /// As [`wait`](Self::wait), for room and not for tasks.
    ///
    /// # Errors
    /// [`Error::Os`] when the system refuses.
    pub fn wait_for_room(&self) -> Result<Wake> {
        // What was given back between the last look and the announcement is found after a short sleep.
        self.wait_unless(|| Ok(false), Duration::from_millis(5))
    }

    fn wait_unless(&self, found: impl FnOnce() -> Result<bool>, limit: Duration) -> Result<Wake> {
        self.process.glance();
        let flag = self.control.worker(self.worker).worker_sleeps;
        let ended = sleep_unless(flag, found, || sleep(&self.eventfd, self.parent_pidfd.as_fd(), limit))?;
        Ok(if ended == Some(true) { Wake::ParentEnded } else { Wake::Look })
    }

    /// Whether the parent wants nothing more.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.control.is_done()
    }

    /// `nbytes` of the slot that is being filled, or `None` where private memory serves better: between
    /// tasks, for what does not fit, when the worker itself keeps too much of its slots. Never waits.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] when the machine or the control group has not enough left.
    pub fn allocate(&self, nbytes: u64) -> Result<Option<Chunk>> {
        if !self.process.is_current() {
            return Ok(None);
        }
        let view = self.control.worker(self.worker);
        let mut state = self.lock();
        if !state.open || nbytes == 0 {
            return Ok(None);
        }
        if self.keeps_too_much(&state.slots) {
            self.process.look();
            return Ok(None);
        }
        state.count_own(view.results)?;
        let PortState { slots, filling, .. } = &mut *state;
        let fill = match filling {
            Some(fill) => fill,
            None => {
                let Some(slot) = slots.begin(view.slots) else { return Ok(None) };
                filling.insert(Fill { slot, bump: 0, chunks: Vec::new() })
            }
        };
        fill.take_back();
        let start = fill.bump.next_multiple_of(ALIGNMENT);
        let Some(end) = start.checked_add(nbytes) else { return Ok(None) };
        let Growth::Ready = slots.grow(view.slots, fill.slot, end, &mut self.pages())? else {
            return Ok(None);
        };
        let window = self.control.window(self.worker, fill.slot);
        let pointer = self.control.segment().pointer(window.start + start, nbytes)?;
        let lease = Arc::new(slots.own_lease(fill.slot));
        fill.chunks.push((start, Arc::downgrade(&lease)));
        fill.bump = end;
        failpoint("chunk-taken");
        let (process, taken) = (self.process, self.process.now());
        Ok(Some(Chunk { address: pointer.as_ptr() as usize, len: nbytes, lease, process, taken }))
    }

    /// Ends what this worker does with its slots: from now on nothing is allocated. `false`: the worker itself still
    /// has something in one of them, so the memory must stay mapped here for as long as this process lives.
    ///
    /// With `true`, nothing of this process uses the memory once the port is dropped.
    pub fn leave(&self) -> bool {
        let mut state = self.lock();
        state.open = false;
        state.filling = None;
        !state.slots.has_own_leases()
    }

    /// A dataset that keeps what collate gave it keeps slots: past a quarter it must use memory of its own.
    fn keeps_too_much(&self, slots: &WorkerSlots) -> bool {
        let total = self.control.geometry().slots;
        slots.own_leased_slots() > total / 4 || slots.own_leased_bytes() > self.limits.share / 4
    }

    /// Ends allocation for this batch and begins its commit. What was allocated stays where it is.
    #[must_use]
    pub fn begin_commit(&self) -> Commit<'_> {
        let mut state = self.lock();
        state.open = false;
        state.fillings += 1;
        let generation = state.fillings;
        Commit { port: self, fill: state.filling.take(), generation, own: 0 }
    }

    /// What this worker has done.
    #[must_use]
    pub fn counters(&self) -> &Counters {
        self.control.worker(self.worker).counters
    }

    fn pages(&self) -> PortPages<'_> {
        PortPages { port: self }
    }

    fn lock(&self) -> MutexGuard<'_, PortState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        if !self.leave() {
            // INVARIANT: a chunk's address stays mapped for as long as the chunk lives. It has no part in the mapping,
            // because that would cost each allocation two atomic operations, so the mapping stays with the process.
            std::mem::forget(Arc::clone(&self.control));
        }
    }
}

impl Fill {
    /// Takes the chunks at the end that the worker no longer has.
    fn take_back(&mut self) {
        while let Some((start, lease)) = self.chunks.last() {
            if lease.strong_count() > 0 {
                break;
            }
            self.bump = *start;
            self.chunks.pop();
        }
    }
}

struct PortPages<'a> {
    port: &'a Port,
}

impl Pages for PortPages<'_> {
    fn punch(&mut self, slot: SlotId, bytes: Range<u64>) -> Result<()> {
        let window = self.port.control.window(self.port.worker, slot);
        self.port.control.segment().punch(window.start + bytes.start, bytes.end - bytes.start)
    }

    fn available(&mut self, need: u64) -> Result<()> {
        self.port.probe.require(need)
    }
}

/// One batch on its way into the ring. Dropped before [`finish`](Self::finish), it was never there.
#[derive(Debug)]
pub struct Commit<'a> {
    port: &'a Port,
    fill: Option<Fill>,
    generation: u64,
    /// Bytes of its own segment.
    own: u64,
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
        let start = self.port.control.segment().base().as_ptr() as usize + window.start as usize;
        start..start + fill.bump as usize
    }

    /// The first byte of the slot that is free for copies.
    #[must_use]
    pub fn bump(&mut self) -> u64 {
        self.fill.as_mut().map_or(0, |fill| {
            fill.take_back();
            fill.bump
        })
    }

    /// Makes bytes `0..end` of a slot usable for this batch.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] when the machine or the control group has not enough left.
    pub fn reserve(&mut self, end: u64) -> Result<Room> {
        let port = self.port;
        let view = port.control.worker(port.worker);
        let mut state = port.lock();
        if self.fill.is_none() {
            if end > port.limits.half() {
                return Ok(Room::Oversize);
            }
            let slot = state.slots.begin(view.slots);
            self.fill = slot.map(|slot| Fill { slot, bump: 0, chunks: Vec::new() });
        }
        loop {
            state.count_own(view.results)?;
            if let Some(fill) = &self.fill {
                match state.slots.grow(view.slots, fill.slot, end, &mut port.pages())? {
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
            if state.own.is_empty() {
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

    /// A segment of `len` bytes for this batch alone, checked against the memory that is left. `None`: once the parent
    /// has taken what was committed before; wait and ask [`reserve`](Self::reserve) again.
    ///
    /// Such segments that the parent has not taken and the slots stay within the share together, but for a batch
    /// that has nothing before it.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] or [`Error::Os`] when it cannot be had.
    pub fn own_segment(&mut self, len: u64) -> Result<Option<(Segment, OwnedFd)>> {
        let port = self.port;
        let view = port.control.worker(port.worker);
        let bytes = len.next_multiple_of(port.limits.page);
        let mut state = port.lock();
        state.count_own(view.results)?;
        if !state.slots.room_beside(view.slots, bytes, &mut port.pages()) {
            // INVARIANT: as in `reserve`.
            if !view.results.is_empty()? {
                return Ok(None);
            }
            // What is over the share anyway is so without warm slots.
            state.slots.shrink(view.slots, bytes, &mut port.pages());
        }
        drop(state);
        port.probe.require(bytes)?;
        let made = Segment::create("ringloader-batch", len)?;
        self.own = bytes;
        Ok(Some(made))
    }

    /// Sends the descriptor of an oversize batch's segment; to be called before [`finish`](Self::finish). `false`:
    /// the socket is full, wait and try again.
    ///
    /// # Errors
    /// [`Error::Os`] when the parent is gone.
    pub fn send(&self, fd: &OwnedFd) -> Result<bool> {
        let sent = fd_passing::send(self.port.socket.as_fd(), fd.as_fd(), self.generation)?;
        failpoint("segment-sent");
        Ok(sent)
    }

    /// Commits the batch. `meta` was written to `meta_offset` of the slot, or of the segment that was
    /// sent if `own`; `used` bytes of it are in use. `false`: the ring is full, wait and try again.
    ///
    /// # Errors
    /// [`Error::Corrupt`] when the parent wrote what it never writes, [`Error::Config`] when there is no
    /// slot and not `own`.
    pub fn finish(
        &mut self,
        seq: u64,
        kind: ResultKind,
        meta: Range<u64>,
        used: u64,
        own: bool,
    ) -> Result<bool> {
        failpoint("filled");
        let port = self.port;
        let view = port.control.worker(port.worker);
        let place = match &self.fill {
            Some(fill) if !own => BatchPlace::Slot(fill.slot),
            None if !own => return Err(Error::Config("a batch without a slot has to be sent first".into())),
            _ => BatchPlace::Own,
        };
        let words = ResultDescriptor {
            seq,
            kind,
            place,
            meta_offset: meta.start,
            meta_len: meta.end - meta.start,
            used,
            generation: self.generation,
        }
        .to_words();
        let mut state = port.lock();
        let at = state.results.tail();
        if !state.results.push(view.results, &words)? {
            return Ok(false);
        }
        if let BatchPlace::Own = place {
            state.own.push_back((at, self.own));
        }
        // A batch in a segment of its own leaves the slot, if there is one, to be abandoned.
        if let BatchPlace::Slot(slot) = place {
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
        if let Some(fill) = self.fill.take() {
            self.port.lock().slots.abandon(fill.slot);
        }
    }
}
