//! The parent's side: hands out tasks, takes results, waits. Composition only.

mod channel;
mod segment_cache;

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::os::eventfd::EventFd;
use crate::os::poller::Poller;
use crate::os::process::pidfd;
use crate::os::{Segment, fd_passing};
use crate::pool::Ledger;
use crate::process::{self, Process};
use crate::ring::{ByteFifo, Consumer, Producer, Words};
use crate::sync::Arc;
use crate::sync::adaptive_spin::AdaptiveSpin;
use crate::sync::doorbell::sleep_unless;
use crate::sync::ready::Ready;
use crate::testing::failpoint::failpoint;
use crate::testing::fault::fault;
use crate::transport::delivery::{Backing, Delivery, HeldSlot, OwnSegment};
use crate::transport::fds::{PortFds, WorkerFds};
use crate::transport::layout::{Control, Geometry};
use crate::transport::message::{BatchPlace, ResultDescriptor, ResultKind, Task, TaskDescriptor, TaskIndex};
use crate::transport::slot_memory::SlotMemory;
use crate::transport::worker_handle::{WorkerHandle, holds_overwritten};
use crate::transport::{LONGEST_SLEEP, Transport};

use channel::WorkerChannel;
pub use segment_cache::CachedSegment;

/// The largest memory of a table that is kept for the next one.
const MOST_KEPT: usize = 256 << 10;

/// The parent's end of the transport between it and its workers.
///
/// May be used from several threads: one takes results at a time, any may close.
#[derive(Debug)]
pub struct Engine {
    control: Arc<Control>,
    /// For workers to attach to.
    memfd: OwnedFd,
    share: u64,
    poller: Poller,
    /// The pidfd of the parent, for its workers, which end when it does.
    pidfd: OwnedFd,
    handles: Vec<Arc<WorkerHandle>>,
    /// The ends of the socket pairs that are the workers', until each has its own. Beside the state: a forked worker
    /// looks here, and what held the state's lock at the fork never gives it back there.
    worker_ends: Mutex<Vec<Option<Arc<OwnedFd>>>>,
    state: Mutex<EngineState>,
    spin: AdaptiveSpin,
    /// The process that made it. A forked child has all of it too.
    process: &'static Process,
}

#[derive(Debug)]
struct EngineState {
    channels: Vec<WorkerChannel>,
    ready: Ready,
    /// Whether tasks may be pending anywhere.
    behind: bool,
    ended: VecDeque<u32>,
    /// When the poller was last asked for ended workers.
    looked: Instant,
    woken: bool,
    closed: bool,
    /// Memory for the next delivery's table.
    table: Vec<u8>,
}

impl EngineState {
    /// Without channels, for `workers` workers.
    fn new(workers: u32) -> Self {
        Self {
            channels: Vec::new(),
            ready: Ready::new(workers),
            behind: false,
            ended: VecDeque::new(),
            looked: Instant::now(),
            woken: false,
            closed: false,
            table: Vec::new(),
        }
    }
}

impl Engine {
    /// Makes the transport for `workers` workers, of which each may have `max_tasks` tasks undelivered
    /// and take `share` bytes of shared memory.
    ///
    /// # Errors
    /// [`Error::Config`] for impossible figures, [`Error::Os`] when the system refuses; nothing is left then.
    pub fn new(workers: u32, max_tasks: u32, share: u64) -> Result<Self> {
        let process = process::current();
        process.look();
        let geometry = Geometry::new(workers, max_tasks, share.div_ceil(2))?;
        let (control, memfd) = Control::create(geometry)?;
        let control = Arc::new(control);
        let limits = control.limits(share);
        let mut engine = Self {
            share,
            poller: Poller::new(EventFd::new()?)?,
            pidfd: pidfd(0)?,
            handles: Vec::new(),
            worker_ends: Mutex::default(),
            state: Mutex::new(EngineState::new(workers)),
            memfd,
            control,
            spin: AdaptiveSpin::default(),
            process,
        };
        for worker in 0..workers {
            let view = engine.control.worker(worker);
            let (socket, theirs) = fd_passing::pair()?;
            engine.ends().push(Some(Arc::new(theirs)));
            engine.lock().channels.push(WorkerChannel {
                tasks: Producer::attach(view.tasks)?,
                arena: ByteFifo::new(engine.control.geometry().arena),
                pending: VecDeque::new(),
                results: Consumer::attach(view.results)?,
                pidfd: None,
                socket: Some(socket),
            });
            let ledger = Ledger::new(limits, view.slots.slots());
            engine.handles.push(WorkerHandle::new(engine.control.clone(), worker, EventFd::new()?, ledger));
        }
        Ok(engine)
    }

    /// The segment and its geometry.
    #[must_use]
    pub fn control(&self) -> &Arc<Control> {
        &self.control
    }

    /// Its slots as memory, for a driver to register.
    #[must_use]
    pub fn slot_memory(&self) -> SlotMemory {
        SlotMemory::new(&self.handles)
    }

    /// Bytes of shared memory that each worker may take.
    #[must_use]
    pub fn share(&self) -> u64 {
        self.share
    }

    /// Bytes of the largest batch that a slot takes.
    #[must_use]
    pub fn largest(&self) -> u64 {
        self.control.limits(self.share).half()
    }

    /// What `worker` must have to attach, until [`watch_worker`](Self::watch_worker) says that it has.
    #[must_use]
    pub fn worker_fds(&self, worker: u32) -> WorkerFds<'_> {
        WorkerFds {
            segment: self.memfd.as_fd(),
            worker_eventfd: self.handles[worker as usize].eventfd.as_fd(),
            parent_eventfd: self.poller.eventfd().as_fd(),
            parent_pidfd: self.pidfd.as_fd(),
            socket: self.ends()[worker as usize].clone(),
        }
    }

    /// In the process that was forked as `worker`: what its port keeps. The ends of socket pairs that are others' are
    /// closed first: where the parent could fork, the worker has room then.
    ///
    /// # Errors
    /// As [`WorkerFds::for_port`].
    pub fn inherited_fds(&self, worker: u32) -> io::Result<PortFds> {
        let fds = self.worker_fds(worker);
        if !self.process.is_current() {
            self.ends().fill(None);
            // What is locked was locked at the fork, by a thread that is not here, and stays open.
            if let Ok(mut state) = self.state.try_lock() {
                state.channels.iter_mut().for_each(|channel| channel.socket = None);
            }
        }
        fds.for_port()
    }

    /// Watches the process that runs as `worker`, which has its descriptors: its end of the socket pair is its alone.
    ///
    /// # Errors
    /// [`Error::Os`] when the system refuses for another reason than that it has ended already.
    pub fn watch_worker(&self, worker: u32, pid: u32) -> Result<()> {
        self.ends()[worker as usize] = None;
        let mut state = self.lock();
        match pidfd(pid) {
            Ok(pidfd) => {
                self.poller.add(worker, pidfd.as_fd())?;
                state.channels[worker as usize].pidfd = Some(pidfd);
            }
            Err(Error::Os { errno, .. }) if errno == rustix::io::Errno::SRCH.raw_os_error() => {
                state.ready.look_at(worker);
                state.ended.push_back(worker);
            }
            Err(other) => return Err(other),
        }
        Ok(())
    }

    /// Notes that the process that ran as `worker` has left the memory, which is no more mapped there, and lives on. It
    /// is not watched any more, and counts as ended for [`store`](Self::store). To be called when all results of it that
    /// anyone wants were taken.
    pub fn note_left(&self, worker: u32) {
        if let Some(pidfd) = self.lock().channels[worker as usize].pidfd.take() {
            self.poller.remove(pidfd.as_fd());
        }
    }

    /// Makes the rings of `worker`, whose process has ended, ready for a successor. Returns the slots
    /// that are still held, for [`Port::take_over`](crate::transport::port::Port::take_over). To be called after
    /// [`take_ended`](Self::take_ended) has named the worker and [`try_next`](Self::try_next) has
    /// given all that it had committed; then start the successor, [`watch_worker`](Self::watch_worker)
    /// it, and send again every task whose result has not come.
    ///
    /// Tasks that were sent and not taken are dropped: the one that the worker had taken and not
    /// answered comes before them, is no longer in the ring, and results must ascend. The rings
    /// go on at their positions instead of being reset, so that neither end ever sees a position go
    /// back: for the moment the parent is both ends of the task ring.
    ///
    /// # Errors
    /// [`Error::Config`] when the worker is not known to have ended, when results of it are still in
    /// the ring, which would take their slots for free, or after [`close`](Self::close);
    /// [`Error::Corrupt`] from a ring; [`Error::Os`] when there are too many open files.
    pub fn succeed(&self, worker: u32) -> Result<Vec<u64>> {
        let mut state = self.lock();
        let refuse = |why| Err(Error::Config(format!("worker {worker} cannot be succeeded: {why}")));
        if state.closed {
            return refuse("the engine is closed");
        }
        let view = self.control.worker(worker);
        let channel = &mut state.channels[worker as usize];
        if channel.pidfd.is_some() {
            return refuse("it has not ended yet; wait until take_ended() names it");
        }
        if channel.results.peek(view.results)?.is_some() {
            return refuse("it has committed results that were not taken; call try_next() first");
        }
        if !self.handles[worker as usize].ledger.is_borne_out(view.slots) {
            return Err(holds_overwritten(worker));
        }
        // What it sent for batches that it did not commit goes with its pair: its successor numbers from the start.
        let (socket, theirs) = fd_passing::pair()?;
        channel.drop_tasks(view.tasks)?;
        channel.socket = Some(socket);
        self.ends()[worker as usize] = Some(Arc::new(theirs));
        state.ended.retain(|&ended| ended != worker);
        Ok(Ledger::busy(view.slots))
    }

    /// The task that `worker` took last, as far as its bytes are still there: what it is in, unless its result has come.
    ///
    /// # Errors
    /// [`Error::Corrupt`] from the ring, [`Error::Inherited`] in a forked child.
    pub fn in_hand(&self, worker: u32) -> Result<Option<Task>> {
        let mut state = self.lock_own()?;
        let channel = &mut state.channels[worker as usize];
        let ring = self.control.worker(worker).tasks;
        let Some((position, words)) = channel.tasks.last_taken(ring)? else { return Ok(None) };
        if !channel.arena.holds(position) {
            return Ok(None);
        }
        let TaskDescriptor { seq, kind, offset, len } = TaskDescriptor::from_words(&words)?;
        let arena = self.control.arena(worker);
        if offset.checked_add(len).is_none_or(|end| end > arena.end - arena.start) {
            return Ok(None);
        }
        let mut bytes = Vec::new();
        self.control.segment().copy_out(arena.start + offset, len, &mut bytes)?;
        Ok(Some(Task { seq, kind, bytes }))
    }

    /// Sends `task` to `worker`, or keeps it until there is room. Never blocks.
    ///
    /// # Errors
    /// [`Error::TaskTooLarge`] when it can never be sent, [`Error::Corrupt`] from the ring, [`Error::Inherited`]
    /// in a forked child.
    pub fn put_task(&self, worker: u32, task: Task) -> Result<()> {
        let state = &mut *self.lock_own()?;
        let channel = &mut state.channels[worker as usize];
        if !channel.arena.fits(task.bytes.len() as u64) {
            let (len, capacity) = (task.bytes.len() as u64, self.control.geometry().arena);
            return Err(Error::TaskTooLarge { len, capacity });
        }
        channel.pending.push_back(task);
        self.flush(worker, channel)?;
        state.behind |= !channel.pending.is_empty();
        Ok(())
    }

    /// Sends `fd` to `worker`, for a task that names `tag`. Tags ascend. `false`: there is no room, try again later.
    ///
    /// # Errors
    /// [`Error::Os`] when the worker has ended, [`Error::Inherited`] in a forked child.
    pub fn send_fd(&self, worker: u32, fd: BorrowedFd<'_>, tag: u64) -> Result<bool> {
        match &self.lock_own()?.channels[worker as usize].socket {
            Some(socket) => fd_passing::send(socket.as_fd(), fd, tag),
            None => Err(Error::Config(format!("worker {worker} has left"))),
        }
    }

    /// Sends what is pending, as far as there is room.
    fn flush(&self, worker: u32, channel: &mut WorkerChannel) -> Result<()> {
        let view = self.control.worker(worker);
        let mut sent = false;
        while let Some(task) = channel.pending.front() {
            let head = channel.tasks.head(view.tasks)?;
            // The bytes of the task that the worker took last stay, if there is room: for `in_hand`.
            channel.arena.reclaim(head.wrapping_sub(1));
            let len = task.bytes.len() as u64;
            if channel.tasks.tail() - head >= view.tasks.capacity() {
                break;
            }
            let offset = channel.arena.reserve(len).or_else(|| {
                channel.arena.reclaim(head);
                channel.arena.reserve(len)
            });
            let Some(offset) = offset else { break };
            self.control.segment().copy_in(self.control.arena(worker).start + offset, &task.bytes)?;
            let words = TaskDescriptor { seq: task.seq, kind: task.kind, offset, len }.to_words();
            channel.arena.commit(channel.tasks.tail());
            if !channel.tasks.push(view.tasks, &words)? {
                return Err(Error::Corrupt("a task ring filled up without a producer".into()));
            }
            channel.pending.pop_front();
            sent = true;
        }
        if sent {
            self.handles[worker as usize].wake();
        }
        Ok(())
    }

    /// The next result of any worker that is there, without waiting; none after [`close`](Self::close).
    ///
    /// # Errors
    /// [`Error::Arrival`] when the memory of a result cannot be had: that result is gone, and those behind it
    /// are still there. [`Error::Corrupt`] when a worker wrote what none writes, which stays there: every later
    /// call says so again. [`Error::Inherited`] in a forked child.
    pub fn try_next(&self) -> Result<Option<Delivery>> {
        let mut state = self.lock_own()?;
        if state.looked.elapsed() >= LONGEST_SLEEP / 2 {
            // A caller that always finds something never sleeps, and would never hear of a death.
            let ended = self.poller.ended()?;
            self.note_ended(&mut state, ended);
        }
        if state.behind && !state.closed {
            // Room comes without a word, and not all tasks are answered: workers with room are found only so.
            for (worker, channel) in state.channels.iter_mut().enumerate() {
                self.flush(worker as u32, channel)?;
            }
            state.behind = state.channels.iter().any(|channel| !channel.pending.is_empty());
        }
        let Some(worker) = self.find(&mut state)? else { return Ok(None) };
        let taken = self.take(&mut state, worker);
        // Else the next call finds what cannot be read again.
        if matches!(taken, Ok(_) | Err(Error::Arrival { .. })) {
            state.ready.pass(worker);
        }
        taken
    }

    /// A worker whose ring has a result, if there is one.
    fn find(&self, state: &mut EngineState) -> Result<Option<u32>> {
        let EngineState { channels, ready, .. } = state;
        ready.find(self.control.ready(), |worker| self.has(channels, worker))
    }

    fn has(&self, channels: &mut [WorkerChannel], worker: u32) -> Result<bool> {
        Ok(!channels[worker as usize].results.is_empty(self.control.worker(worker).results)?)
    }

    /// As [`try_next`](Self::try_next), of one worker. Looks for no worker's end: a caller that waits for one worker
    /// sleeps sooner or later.
    ///
    /// # Errors
    /// As [`try_next`](Self::try_next).
    pub fn try_next_of(&self, worker: u32) -> Result<Option<Delivery>> {
        self.take(&mut *self.lock_own()?, worker)
    }

    /// INVARIANT: under the lock from the descriptor to the hold, so that closing comes before the one or
    /// after the other, and gives no pages back in between.
    fn take(&self, state: &mut EngineState, worker: u32) -> Result<Option<Delivery>> {
        if state.closed {
            return Ok(None);
        }
        let channel = &mut state.channels[worker as usize];
        if !channel.pending.is_empty() {
            self.flush(worker, channel)?;
        }
        let ring = self.control.worker(worker).results;
        let Some(words) = channel.results.peek(ring)? else { return Ok(None) };
        // INVARIANT: what cannot be read stays in the ring, so that no call waits for what was in it.
        let descriptor = self.descriptor(&words)?;
        channel.results.advance(ring);
        let table = std::mem::take(&mut state.table);
        self.open(worker, &channel.socket, descriptor, table).map(Some).map_err(|error| {
            let task = (descriptor.kind == ResultKind::Batch).then_some(descriptor.seq);
            Error::Arrival { task, error: Box::new(error) }
        })
    }

    /// What the next result of `worker` answers and is, if [`try_next_of`](Self::try_next_of) would take one.
    ///
    /// # Errors
    /// [`Error::Corrupt`] when the worker wrote what none writes; [`Error::Inherited`] in a forked child.
    pub fn peek_of(&self, worker: u32) -> Result<Option<(u64, ResultKind)>> {
        let mut state = self.lock_own()?;
        if state.closed {
            return Ok(None);
        }
        let words = state.channels[worker as usize].results.peek(self.control.worker(worker).results)?;
        let descriptor = words.map(|words| self.descriptor(&words)).transpose()?;
        Ok(descriptor.map(|descriptor| (descriptor.seq, descriptor.kind)))
    }

    /// Whether a result of `only` (of any worker, if `None`) is there.
    fn has_any_of(&self, only: Option<u32>) -> Result<bool> {
        let mut state = self.lock();
        match only {
            Some(worker) => self.has(&mut state.channels, worker),
            None => Ok(self.find(&mut state)?.is_some()),
        }
    }

    fn descriptor(&self, words: &Words) -> Result<ResultDescriptor> {
        let geometry = self.control.geometry();
        ResultDescriptor::from_words(words, geometry.slots, geometry.window)
    }

    /// Takes the memory of a table that is done with: that of the next delivery is copied to it.
    pub fn reuse(&self, table: Vec<u8>) {
        if table.capacity() <= MOST_KEPT {
            self.lock().table = table;
        }
    }

    /// Turns a descriptor into a delivery, whose table is copied to `meta`.
    fn open(
        &self,
        worker: u32,
        socket: &Option<OwnedFd>,
        descriptor: ResultDescriptor,
        mut meta: Vec<u8>,
    ) -> Result<Delivery> {
        let ResultDescriptor { seq, kind, place, meta_offset, meta_len, used, generation } = descriptor;
        let backing = match place {
            BatchPlace::Slot(slot) => {
                failpoint("drained-unheld");
                let held = HeldSlot::new(self.handles[worker as usize].clone(), slot);
                let start = self.control.window(worker, slot).start;
                self.control.segment().copy_out(start + meta_offset, meta_len, &mut meta)?;
                Backing::Slot(held)
            }
            BatchPlace::Own => {
                // It may wait for room, which this one took.
                self.handles[worker as usize].wake();
                let Some(socket) = socket else {
                    return Err(Error::Corrupt(format!("the memory of batch {generation} was not sent")));
                };
                let fd = fd_passing::receive(socket.as_fd(), generation)?;
                let segment = Segment::attach(fd.as_fd())?;
                segment.copy_out(meta_offset, meta_len, &mut meta)?;
                segment.pointer(0, used)?;
                Backing::Own(OwnSegment::new(segment))
            }
        };
        Ok(Delivery { worker, seq, kind, generation, used, meta, backing: Arc::new(backing) })
    }

    /// Sleeps until a result of `only` (of any worker, if `None`) may be there, a worker ends,
    /// [`wake`](Self::wake) is called, a signal comes, or `limit` or [`LONGEST_SLEEP`] is over. Look
    /// again after.
    ///
    /// # Errors
    /// [`Error::Corrupt`] from a ring, [`Error::Os`] when the system refuses.
    pub fn wait_for(&self, only: Option<u32>, limit: Duration) -> Result<()> {
        self.process.glance();
        let found = || self.has_any_of(only);
        let flag = match only {
            Some(worker) => self.control.worker(worker).parent_sleeps,
            None => self.control.parent_sleeps(),
        };
        let sleep = || sleep_unless(flag, found, || self.poller.sleep(limit.min(LONGEST_SLEEP)));
        if let Some(Some(ended)) = self.spin.before(limit, found, sleep)? {
            self.note_ended(&mut self.lock(), ended);
        }
        Ok(())
    }

    fn note_ended(&self, state: &mut EngineState, ended: Vec<u32>) {
        for worker in ended {
            if let Some(pidfd) = state.channels[worker as usize].pidfd.take() {
                self.poller.remove(pidfd.as_fd());
                // It may have committed without saying so.
                if !fault("ended_not_looked_at") {
                    state.ready.look_at(worker);
                }
                state.ended.push_back(worker);
            }
        }
        state.looked = Instant::now();
    }

    /// Ends the sleep of the thread that waits.
    pub fn wake(&self) {
        self.lock().woken = true;
        self.poller.eventfd().notify();
    }

    /// Whether [`wake`](Self::wake) was called and not yet taken.
    #[must_use]
    pub fn is_woken(&self) -> bool {
        self.lock().woken
    }

    /// Whether [`wake`](Self::wake) was called since.
    pub fn take_wake(&self) -> bool {
        std::mem::take(&mut self.lock().woken)
    }

    /// A worker whose process has ended since, each once. All it had committed was there before.
    pub fn take_ended(&self) -> Option<u32> {
        self.lock().ended.pop_front()
    }

    /// Results that are committed and not yet drained.
    ///
    /// # Errors
    /// [`Error::Corrupt`] from a ring.
    pub fn committed(&self) -> Result<u64> {
        // Under the lock the consumer's positions stand still, which `len` needs.
        let state = self.lock();
        let workers = 0..state.channels.len() as u32;
        workers.map(|worker| self.control.worker(worker).results.len()).sum()
    }

    /// Tells the workers that nothing more is wanted and wakes those that sleep.
    pub fn set_done(&self) {
        self.control.set_done();
        for handle in &self.handles {
            handle.eventfd.notify();
        }
    }

    /// Gives back all memory that the user does not hold, and no driver has; that of drivers at
    /// [`SlotMemory::clear_registered`]. To be called when the workers have ended;
    /// calling it again does nothing.
    pub fn close(&self) {
        if std::mem::replace(&mut self.lock().closed, true) {
            return;
        }
        self.set_done();
        self.wake();
        for handle in &self.handles {
            handle.close();
        }
        self.process.tidy();
    }

    /// For callers that take or put. A forked child has the rings, but what it moved on would be corrupt to the parent.
    fn lock_own(&self) -> Result<MutexGuard<'_, EngineState>> {
        if !self.process.is_current() {
            return Err(Error::Inherited { owner: self.process.pid() });
        }
        Ok(self.lock())
    }

    fn ends(&self) -> MutexGuard<'_, Vec<Option<Arc<OwnedFd>>>> {
        self.worker_ends.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> MutexGuard<'_, EngineState> {
        // Nothing in the state is left half-changed by a panic, so a poisoned lock is as good as any.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Transport for Engine {
    type Index = TaskIndex;
    type Delivery = Delivery;

    #[inline]
    fn answered(delivery: &Delivery) -> (u64, ResultKind) {
        (delivery.seq, delivery.kind)
    }

    #[inline]
    fn put_task(&self, worker: u32, seq: u64, (kind, bytes): TaskIndex) -> Result<()> {
        self.put_task(worker, Task { seq, kind, bytes })
    }

    #[inline]
    fn try_next(&self) -> Result<Option<Delivery>> {
        self.try_next()
    }

    #[inline]
    fn try_next_of(&self, worker: u32) -> Result<Option<Delivery>> {
        self.try_next_of(worker)
    }

    #[inline]
    fn peek_of(&self, worker: u32) -> Result<Option<(u64, ResultKind)>> {
        self.peek_of(worker)
    }

    #[inline]
    fn take_ended(&self) -> Option<u32> {
        self.take_ended()
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        // A forked child that inherits an engine must not disturb the parent's workers.
        if self.process.is_current() {
            self.close();
        }
    }
}
