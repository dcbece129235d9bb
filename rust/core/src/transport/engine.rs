//! The parent's side: hands out tasks, takes results, waits. Composition only.

mod channel;
mod joint;
mod relayed;
mod results;
mod segment_cache;
mod successors;
mod tasks;
mod workers;

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::MutexGuard;
use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::os::eventfd::EventFd;
use crate::os::fd_passing;
use crate::os::poller::Poller;
use crate::os::process::pidfd;
use crate::pool::Leases;
use crate::process::{self, Process};
use crate::ring::{ByteFifo, Consumer, Producer};
use crate::sync::adaptive_spin::AdaptiveSpin;
use crate::sync::doorbell::sleep_unless;
use crate::sync::ready::Ready;
use crate::sync::{Arc, Lock};
use crate::transport::LONGEST_SLEEP;
use crate::transport::layout::{Control, Geometry};
use crate::transport::slot_memory::SlotMemory;
use crate::transport::worker_handle::WorkerHandle;

use channel::WorkerChannel;
use joint::JointBatches;
pub use segment_cache::CachedSegment;

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
    /// The ends of the socket pairs that are the workers', until each has its own. Outside of the state: a forked
    /// worker looks here, and what held the state's lock at the fork never gives it back there.
    worker_ends: Lock<Vec<Option<Arc<OwnedFd>>>>,
    state: Lock<EngineState>,
    joint: JointBatches,
    spin: AdaptiveSpin,
    /// The process that made it. A forked child has all of it too.
    process: &'static Process,
}

#[derive(Debug)]
struct EngineState {
    channels: Vec<WorkerChannel>,
    ready: Ready,
    /// True if tasks may be pending for any worker.
    behind: bool,
    ended: VecDeque<u32>,
    /// When the poller was last asked for ended workers.
    looked: Instant,
    woken: bool,
    closed: bool,
    /// Memory for the table of the next received result.
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
            worker_ends: Lock::default(),
            state: Lock::new(EngineState::new(workers)),
            joint: JointBatches::default(),
            memfd,
            control,
            spin: AdaptiveSpin::default(),
            process,
        };
        for worker in 0..workers {
            let view = engine.control.worker(worker);
            let (socket, theirs) = fd_passing::pair()?;
            engine.worker_ends.lock().push(Some(Arc::new(theirs)));
            engine.state.lock().channels.push(WorkerChannel {
                tasks: Producer::attach(view.tasks)?,
                arena: ByteFifo::new(engine.control.geometry().arena),
                pending: VecDeque::new(),
                results: Consumer::attach(view.results)?,
                pidfd: None,
                is_relayed: false,
                socket: Some(socket),
            });
            let leases = Leases::new(limits, view.slots.slots());
            engine.handles.push(WorkerHandle::new(engine.control.clone(), worker, EventFd::new()?, leases));
        }
        Ok(engine)
    }

    /// The segment and its geometry.
    #[must_use]
    pub fn control(&self) -> &Arc<Control> {
        &self.control
    }

    /// Returns the slots, and the windows that workers share by now, as memory that a driver can register.
    #[must_use]
    pub fn slot_memory(&self) -> SlotMemory {
        SlotMemory::new(&self.handles, self.windows())
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
            self.record_ended(&mut self.state.lock(), ended);
        }
        Ok(())
    }

    /// Ends the sleep of the thread that waits.
    pub fn wake(&self) {
        self.state.lock().woken = true;
        self.poller.eventfd().notify();
    }

    /// Returns true if [`wake`](Self::wake) was called and not yet taken.
    #[must_use]
    pub fn is_woken(&self) -> bool {
        self.state.lock().woken
    }

    /// Returns true if [`wake`](Self::wake) was called since the last call of this.
    pub fn take_wake(&self) -> bool {
        std::mem::take(&mut self.state.lock().woken)
    }

    /// Tells the workers that nothing more is wanted and wakes sleeping workers.
    pub fn set_done(&self) {
        self.control.set_done();
        for handle in &self.handles {
            handle.eventfd.notify();
        }
    }

    /// Gives back all memory that the user does not hold, and no driver has; that of drivers at
    /// [`SlotMemory::set_registered`] with 0. To be called when the workers have ended;
    /// calling it again does nothing.
    pub fn close(&self) {
        if std::mem::replace(&mut self.state.lock().closed, true) {
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
        Ok(self.state.lock())
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
