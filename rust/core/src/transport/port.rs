//! A worker's side: takes tasks, fills slots, commits results. Composition only.

mod chunk;
mod commit;
mod own;
mod relayed;

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::os::eventfd::{EventFd, sleep};
use crate::os::memory::MemoryProbe;
use crate::os::{fd_passing, parent_death};
use crate::pool::{Fill, Growth, Leases, Limits, Pages, SlotId, WorkerSlots};
use crate::process::{self, Process};
use crate::ring::{Consumer, Producer, Ring};
use crate::sync::adaptive_spin::AdaptiveSpin;
use crate::sync::doorbell::sleep_unless;
use crate::sync::{Arc, Lock};
use crate::testing::failpoint::failpoint;
use crate::transport::LONGEST_SLEEP;
use crate::transport::fds::PortFds;
use crate::transport::layout::{Control, Counters};
use crate::transport::message::{Task, TaskDescriptor, TaskKind};

pub use chunk::Chunk;
pub use commit::{Commit, Room};
use own::OwnSegments;

/// Leaves lie at multiples of this.
pub const ALIGNMENT: u64 = crate::batch::wire::STORAGE_ALIGN;

/// The bytes of its free slots that an idle worker gives back for each [`LONGEST_SLEEP`]: to fault them in again takes
/// less than a tenth of that time.
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
    spin: AdaptiveSpin,
    state: Lock<PortState>,
}

#[derive(Debug)]
struct PortState {
    tasks: Consumer,
    results: Producer,
    slots: WorkerSlots,
    /// True if a task was taken whose result is not committed: only then is a slot filled.
    open: bool,
    filling: Option<Fill>,
    fillings: u64,
    own: OwnSegments,
}

impl PortState {
    /// Counts the segments of oversize batches against the share. If slots have grown meanwhile, segments that came back
    /// and no longer fit go to the system.
    #[inline]
    fn count_own(&mut self, results: Ring<'_>, share: u64) -> Result<()> {
        if self.own.is_empty() {
            return Ok(());
        }
        self.own.give_back(share.saturating_sub(self.slots.resident()));
        self.recount_own(results)
    }

    #[cold]
    fn recount_own(&mut self, results: Ring<'_>) -> Result<()> {
        let (head, tail) = (self.results.head(results)?, self.results.tail());
        let waiting = tail.wrapping_sub(head);
        self.slots.set_beside(self.own.count(|at| tail.wrapping_sub(at) <= waiting));
        Ok(())
    }

    /// Gives what oversize batches have left to the system. Returns true if that was anything.
    fn give_back_own(&mut self, results: Ring<'_>) -> Result<bool> {
        let any = self.own.give_back(0);
        if any {
            self.recount_own(results)?;
        }
        Ok(any)
    }

    /// Calls [`WorkerSlots::grow`]. What oversize batches have left makes room.
    #[inline]
    fn grow(&mut self, port: &Port, slot: SlotId, end: u64) -> Result<Growth> {
        let view = port.control.worker(port.worker);
        let grown = self.slots.grow(view.slots, slot, end, &mut &*port);
        let is_short = matches!(grown, Ok(Growth::NoRoom) | Err(Error::Memory { .. }));
        if is_short && self.give_back_own(view.results)? {
            return self.slots.grow(view.slots, slot, end, &mut &*port);
        }
        grown
    }
}

/// The reason why a worker continues.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wake {
    /// Something may have happened, or the time is over.
    Look,
    /// The wait has lasted for [`LONGEST_SLEEP`]: the worker is idle.
    Idle,
    /// The parent has ended: nothing is wanted any more.
    ParentEnded,
}

impl Port {
    /// The end for `worker` of a segment that its parent made, with the share of memory the parent gave it. Warm slots
    /// stay warm, and slots that the user holds since an earlier epoch stay held. `busy`: of a worker whose predecessor
    /// has ended, what [`Engine::succeed`](crate::transport::engine::Engine::succeed) has returned.
    ///
    /// # Errors
    /// [`Error::Corrupt`] when the segment is not one of this version; [`Error::Config`] when `busy` is that of another.
    pub fn attach(
        control: Arc<Control>,
        worker: u32,
        share: u64,
        PortFds { eventfd, parent_eventfd, parent_pidfd, socket }: PortFds,
        busy: Option<&[u64]>,
    ) -> Result<Self> {
        if worker >= control.geometry().workers {
            return Err(Error::Config(format!("worker {worker} of {}", control.geometry().workers)));
        }
        let process = process::current();
        let limits = control.limits(share);
        let view = control.worker(worker);
        // Without a predecessor, no result of this worker is in its ring, so no slot begins to be held after this look.
        let found = Leases::busy(view.slots);
        let busy = busy.unwrap_or(&found);
        if busy.len() != found.len() {
            let (came, expected) = (busy.len(), found.len());
            return Err(Error::Config(format!("{came} words of held slots came, {expected} were expected")));
        }
        let state = PortState {
            tasks: Consumer::attach(view.tasks)?,
            results: Producer::attach(view.results)?,
            slots: WorkerSlots::take_over(view.slots, limits, busy),
            open: false,
            filling: None,
            fillings: 0,
            own: OwnSegments::default(),
        };
        // It lends the worker's collated batches to the worker itself and to the processes that it forks. It always counts
        // as lending: to find out at a fork would cost more than to record the fork.
        process.count_lent();
        Ok(Self {
            worker,
            limits,
            eventfd: EventFd::attach(eventfd),
            parent_eventfd: EventFd::attach(parent_eventfd),
            parent_pidfd,
            socket,
            probe: MemoryProbe::new(),
            process,
            spin: AdaptiveSpin::default(),
            state: Lock::new(state),
            control,
        })
    }

    /// Returns true in the worker, and false in a process that its dataset forked. Such a process must leave rings and
    /// slots alone.
    #[must_use]
    pub fn is_current(&self) -> bool {
        self.process.is_current()
    }

    /// Arranges that this process is killed `grace` after the parent's end, if it has not ended by then. `pipe`:
    /// as [`parent_death::end_with`] takes it.
    ///
    /// # Errors
    /// [`Error::Os`] when the system cannot do it.
    pub fn end_with_parent(&self, pipe: Option<BorrowedFd<'_>>, grace: Duration) -> Result<()> {
        parent_death::end_with(self.parent_pidfd.as_fd(), pipe, grace)
    }

    /// The next task, if one has come.
    ///
    /// # Errors
    /// [`Error::Corrupt`] when the parent wrote what it never writes.
    pub fn try_task(&self) -> Result<Option<Task>> {
        let view = self.control.worker(self.worker);
        let mut state = self.state.lock();
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

    /// Takes the descriptor that the parent sent for a task that names `tag`.
    ///
    /// # Errors
    /// [`Error::Os`] when this process has no room for it, [`Error::Corrupt`] when none was sent.
    pub fn receive_fd(&self, tag: u64) -> Result<OwnedFd> {
        fd_passing::receive(self.socket.as_fd(), tag)
    }

    /// Sleeps until the parent sends something or gives room, ends, a signal comes, or `limit` or
    /// [`LONGEST_SLEEP`] is over. After a sleep of that length, free slots begin to give their memory back.
    ///
    /// # Errors
    /// [`Error::Os`] when the system refuses.
    pub fn wait(&self, limit: Duration) -> Result<Wake> {
        self.wait_for_any(limit, || false)
    }

    /// As [`wait`](Self::wait), also for something that `is_there` finds, after which the parent
    /// [wakes](crate::transport::engine::Engine::wake_workers) the workers.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    #[inline]
    pub fn wait_for_any(&self, limit: Duration, is_there: impl Fn() -> bool) -> Result<Wake> {
        let tasks = self.control.worker(self.worker).tasks;
        let began = Instant::now();
        let found = || Ok(self.state.lock().tasks.peek(tasks)?.is_some() || is_there());
        let sleep = || self.wait_unless(found, limit.min(LONGEST_SLEEP));
        let wake = self.spin.before(limit, found, sleep)?.unwrap_or(Wake::Look);
        if began.elapsed() < LONGEST_SLEEP {
            return Ok(wake);
        }
        let view = self.control.worker(self.worker);
        let mut state = self.state.lock();
        state.give_back_own(view.results)?;
        state.slots.shrink(view.slots, GIVEN_BACK, &mut &*self);
        Ok(if wake == Wake::Look { Wake::Idle } else { wake })
    }

    /// As [`wait`](Self::wait), for room and not for tasks. Does not sleep if slots came back, or results were taken,
    /// since the caller looked.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    pub fn wait_for_room(&self) -> Result<Wake> {
        let view = self.control.worker(self.worker);
        let found = || {
            let PortState { slots, results, .. } = &mut *self.state.lock();
            Ok(slots.sweep(view.slots) | results.has_new_head(view.results)?)
        };
        // Not longer: a place in the ring, or in the socket, comes without a notification.
        self.wait_unless(found, Duration::from_millis(5))
    }

    fn wait_unless(&self, found: impl FnOnce() -> Result<bool>, limit: Duration) -> Result<Wake> {
        self.process.glance();
        let flag = self.control.worker(self.worker).worker_sleeps;
        let ended = sleep_unless(flag, found, || sleep(&self.eventfd, self.parent_pidfd.as_fd(), limit))?;
        Ok(if ended == Some(true) { Wake::ParentEnded } else { Wake::Look })
    }

    /// Returns the number of this worker, from 0.
    #[must_use]
    pub fn worker(&self) -> u32 {
        self.worker
    }

    /// Begins a task that came by another way than the ring: from now on its batch may lie in a slot.
    pub fn begin_task(&self) {
        self.state.lock().open = true;
    }

    /// Returns true if the parent wants nothing more.
    #[must_use]
    pub fn is_done(&self) -> bool {
        self.control.is_done()
    }

    /// `nbytes` of the slot that is being filled, or `None` where private memory serves better: between
    /// tasks, for what does not fit, when the worker itself keeps too much of its slots. Never waits.
    ///
    /// # Errors
    /// [`Error::Memory`] when the machine or the control group has not enough left.
    pub fn allocate(&self, nbytes: u64) -> Result<Option<Chunk>> {
        if !self.process.is_current() {
            return Ok(None);
        }
        let view = self.control.worker(self.worker);
        let mut state = self.state.lock();
        if !state.open || nbytes == 0 {
            return Ok(None);
        }
        if self.keeps_too_much(&state.slots) {
            self.process.look();
            return Ok(None);
        }
        state.count_own(view.results, self.limits.share)?;
        let PortState { slots, filling, .. } = &mut *state;
        let fill = match filling {
            Some(fill) => fill,
            None => {
                let Some(slot) = slots.begin(view.slots) else { return Ok(None) };
                filling.insert(Fill::new(slot))
            }
        };
        fill.take_back();
        let (slot, start) = (fill.slot, fill.bump().next_multiple_of(ALIGNMENT));
        let Some(end) = start.checked_add(nbytes) else { return Ok(None) };
        let Growth::Ready = state.grow(self, slot, end)? else { return Ok(None) };
        let PortState { slots, filling: Some(fill), .. } = &mut *state else { return Ok(None) };
        let window = self.control.window(self.worker, slot);
        let pointer = self.control.segment().pointer(window.start + start, nbytes)?;
        let lease = slots.own_lease(slot);
        let lease = fill.hand_out(start, end, lease);
        failpoint("chunk-taken");
        let (address, process) = (pointer.as_ptr() as usize, self.process);
        Ok(Some(Chunk { address, len: nbytes, lease, process, taken: process.now() }))
    }

    /// Ends what this worker does with its slots: from now on nothing is allocated. `false`: the worker itself still
    /// has something in one of them, so the memory must stay mapped here for as long as this process lives.
    ///
    /// With `true`, nothing of this process uses the memory once the port is dropped.
    pub fn detach(&self) -> bool {
        let mut state = self.state.lock();
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
        let mut state = self.state.lock();
        state.open = false;
        state.fillings += 1;
        let generation = state.fillings;
        Commit { port: self, fill: state.filling.take(), generation, own: None, keeps: true }
    }

    /// Returns the counters of this worker's work.
    #[must_use]
    pub fn counters(&self) -> &Counters {
        self.control.worker(self.worker).counters
    }
}

impl Drop for Port {
    fn drop(&mut self) {
        if !self.detach() {
            // INVARIANT: a chunk's address stays mapped for as long as the chunk lives. It has no part in the mapping,
            // because that would cost each allocation two atomic operations, so the mapping stays with the process.
            std::mem::forget(Arc::clone(&self.control));
        }
        self.process.discount_lent();
    }
}

impl Pages for &Port {
    fn punch(&mut self, slot: SlotId, bytes: Range<u64>) -> Result<()> {
        let window = self.control.window(self.worker, slot);
        self.control.segment().punch(window.start + bytes.start, bytes.end - bytes.start)
    }

    fn available(&mut self, need: u64) -> Result<()> {
        self.probe.require(need)
    }
}
