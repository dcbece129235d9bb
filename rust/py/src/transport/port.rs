//! A worker's end of the transport, as a Python class.

pub(super) mod sending;

use std::os::fd::{AsFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::OnceLock;
use std::time::Duration;

use pyo3::prelude::*;
use pyo3::types::PyTuple;
use ringloader_core::batch::Dtype;
use ringloader_core::os::Segment;
use ringloader_core::sync::{Arc, AtomicBool, AtomicU32, AtomicU64, Ordering};
use ringloader_core::transport::message::TaskKind;
use ringloader_core::transport::port::{Chunk, Port as Core, Wake};
use ringloader_core::transport::{Control, PortFds};

use super::engine::Engine;
use crate::batch::encode::Spare;
use crate::gil::{detached, exception};
use crate::process::duplicate;
use crate::sampling::codec::decode_task;
use crate::strings;
use crate::timing::WorkerClock;
use crate::torch::tensor::tensor_over_chunk;

/// A worker's end: tasks in, results out, memory for collate.
#[pyclass(frozen, weakref, module = "ringloader._native")]
pub(crate) struct Port {
    core: Core,
    parent_ended: AtomicBool,
    /// True once this worker has warned that the limit of descriptors in flight keeps it waiting.
    warned: AtomicBool,
    /// The last batch's memory, empty. A thread that puts a batch has it meanwhile.
    spare: Spare,
    /// Notes the moments of each batch, where that is wanted.
    clock: OnceLock<Py<WorkerClock>>,
    /// Gives back memory that the allocator keeps.
    trim: OnceLock<Py<PyAny>>,
    tasks: AtomicU64,
    /// Waits since the last task that have shown the worker idle.
    idle_waits: AtomicU32,
}

/// The first task before which the allocator's memory is given back.
const FIRST_TRIM: u64 = 8;
/// The idle waits before that: a second. Then the page faults that follow cost little.
const IDLE_WAITS: u32 = 10;

#[pymethods]
impl Port {
    /// The end of a worker that was forked: it has the parent's mapping and descriptors. `busy`: of a successor, what
    /// `Engine.succeed` has returned.
    #[staticmethod]
    #[pyo3(signature = (engine, worker, busy = None))]
    fn inherit(engine: &Engine, worker: u32, busy: Option<Vec<u64>>) -> PyResult<Self> {
        let engine = engine.core()?;
        let fds = engine.inherited_fds(worker)?;
        Self::attached(engine.control().clone(), worker, engine.share(), fds, busy)
    }

    /// The end of a worker that was sent the descriptors of `Engine.worker_fds`, which stay the caller's. `busy`: as for
    /// `inherit`.
    #[staticmethod]
    #[pyo3(signature = (fds, worker, share, busy = None))]
    fn attach(fds: [RawFd; 5], worker: u32, share: u64, busy: Option<Vec<u64>>) -> PyResult<Self> {
        let [segment, eventfd, parent_eventfd, parent_pidfd, socket] = fds;
        let segment = Segment::attach(duplicate(segment)?.as_fd()).map_err(exception)?;
        let control = Arc::new(Control::attach(segment).map_err(exception)?);
        let fds = PortFds {
            eventfd: duplicate(eventfd)?,
            parent_eventfd: duplicate(parent_eventfd)?,
            parent_pidfd: duplicate(parent_pidfd)?,
            socket: duplicate(socket)?,
        };
        Self::attached(control, worker, share, fds, busy)
    }

    /// Makes the system kill this process `grace` seconds after the parent's end, unless the process has ended by then.
    /// `pipe`: in a process that a server has forked, the reading end of a pipe whose writing end only the parent has.
    /// `OSError`: the system cannot do it.
    fn end_with_parent(&self, pipe: Option<RawFd>, grace: f64) -> PyResult<()> {
        let (pipe, grace) = (pipe.map(duplicate).transpose()?, Duration::from_secs_f64(grace));
        self.core.end_with_parent(pipe.as_ref().map(AsFd::as_fd), grace).map_err(exception)
    }

    /// Waits for the next message of torch's protocol, and makes the calls that come before it. None: the worker is to
    /// end, or the parent has ended.
    fn get<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyAny>>> {
        loop {
            if let Some(message) = self.next(py, true)? {
                return Ok(Some(message));
            }
            if self.knows_end() {
                return Ok(None);
            }
            self.wait(py, Duration::MAX, || false)?;
        }
    }

    /// As `get`, for a message that is taken before its turn, in a tuple. Never waits. `begin_task` notes the turn of a
    /// task.
    fn ahead<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyTuple>>> {
        let message = self.next(py, false)?;
        let is_there = message.is_some() || self.parent_ended()?;
        is_there.then(|| (message,).into_pyobject(py)).transpose()
    }

    /// Begins a task that was taken before its turn: from now on its batch may lie in a slot.
    pub(super) fn begin_task(&self, py: Python<'_>) -> PyResult<()> {
        self.core.begin_task();
        self.note_task(py)
    }

    /// Lets `trim`, which gives back memory of the allocator, be called at the 8th task, the 16th, the 32nd and so on, and
    /// when the worker is idle.
    fn trim_by(&self, trim: Py<PyAny>) {
        let _ = self.trim.set(trim);
    }

    /// Lets `clock` note the moments of each batch from now on. The moments are sent after the batch's bytes.
    fn time(&self, clock: Py<WorkerClock>) {
        let _ = self.clock.set(clock);
    }

    /// Commits one message of torch's protocol: `(index of the task, batch)` or any object. Waits for
    /// room if it must, unless the parent wants nothing more.
    fn put(&self, message: &Bound<'_, PyAny>) -> PyResult<()> {
        self.send(message, None)
    }

    /// Takes the descriptor that the main process sent for a call that names `tag`. It is the caller's to close.
    fn receive_fd(&self, tag: u64) -> PyResult<RawFd> {
        self.core.receive_fd(tag).map(OwnedFd::into_raw_fd).map_err(exception)
    }

    /// Memory for `nbytes` in the slot that is being filled, as a `torch.UntypedStorage`; None where the
    /// caller's own memory serves better.
    fn new_storage<'py>(&self, py: Python<'py>, nbytes: u64) -> PyResult<Option<Bound<'py, PyAny>>> {
        let Some(chunk) = self.allocate(nbytes)? else { return Ok(None) };
        let bytes = tensor_over_chunk(py, chunk, Dtype::U8, &[nbytes as i64])?;
        bytes.call_method0(strings::untyped_storage(py)).map(Some)
    }

    /// Ends what the worker does with this memory. False: collation's results are still in it, so that it stays mapped
    /// for as long as the process lives. Else it is unmapped as soon as this object goes.
    fn leave(&self) -> bool {
        // The spare is empty, and goes together with what it may still refer to.
        self.spare.free();
        self.core.detach()
    }

    /// Returns true if the parent wants nothing more.
    fn is_done(&self) -> bool {
        self.core.is_done() || self.knows_end()
    }

    /// Returns true if the parent has ended, which it looks for.
    #[getter]
    fn parent_ended(&self) -> PyResult<bool> {
        if self.core.is_current() {
            self.note(self.core.wait(Duration::ZERO).map_err(exception)?);
        }
        Ok(self.knows_end())
    }
}

impl Port {
    /// Returns true if the parent's end was noted.
    pub(super) fn knows_end(&self) -> bool {
        self.parent_ended.load(Ordering::Relaxed)
    }

    fn attached(
        control: Arc<Control>,
        worker: u32,
        share: u64,
        fds: PortFds,
        busy: Option<Vec<u64>>,
    ) -> PyResult<Self> {
        Core::attach(control, worker, share, fds, busy.as_deref()).map(Self::of).map_err(exception)
    }

    pub(super) fn of(core: Core) -> Self {
        let (parent_ended, warned, spare, clock, trim, tasks, idle_waits) = Default::default();
        Self { core, parent_ended, warned, spare, clock, trim, tasks, idle_waits }
    }

    /// Returns the next message, if one has come, after it has made the calls that come before. Never waits. A task
    /// begins now, if `begins`.
    pub(super) fn next<'py>(&self, py: Python<'py>, begins: bool) -> PyResult<Option<Bound<'py, PyAny>>> {
        if !self.core.is_current() {
            // A process that the dataset forked has come back to the worker loop, which ends so.
            self.parent_ended.store(true, Ordering::Relaxed);
            return Ok(None);
        }
        while let Some(task) = self.core.try_task().map_err(exception)? {
            let is_call = task.kind == TaskKind::Call;
            let message = decode_task(py, task)?;
            if !is_call {
                if begins {
                    self.note_task(py)?;
                }
                return Ok(Some(message));
            }
            message.call0()?;
        }
        Ok(None)
    }

    /// Waits for a message, for what `is_there` finds, or until `limit` is over. Gives memory back if the worker is idle.
    pub(super) fn wait(
        &self,
        py: Python<'_>,
        limit: Duration,
        is_there: impl Fn() -> bool + Send,
    ) -> PyResult<()> {
        let wake = detached(py, || self.core.wait_for_any(limit, is_there))?;
        self.note(wake);
        let is_idle = wake == Wake::Idle;
        self.trim_if(py, is_idle && self.idle_waits.fetch_add(1, Ordering::Relaxed) + 1 == IDLE_WAITS)
    }

    fn note_task(&self, py: Python<'_>) -> PyResult<()> {
        if let Some(clock) = self.clock() {
            clock.note_task();
        }
        self.idle_waits.store(0, Ordering::Relaxed);
        let tasks = self.tasks.fetch_add(1, Ordering::Relaxed) + 1;
        self.trim_if(py, tasks >= FIRST_TRIM && tasks.is_power_of_two())
    }

    fn trim_if(&self, py: Python<'_>, is_due: bool) -> PyResult<()> {
        self.trim.get().filter(|_| is_due).map_or(Ok(()), |trim| trim.call0(py).map(drop))
    }

    /// Memory in the slot that is being filled; `None` where the caller's own memory serves better.
    ///
    /// # Errors
    /// `OSError` when no pages are left.
    pub(crate) fn allocate(&self, nbytes: u64) -> PyResult<Option<Chunk>> {
        self.core.allocate(nbytes).map_err(exception)
    }

    pub(super) fn core(&self) -> &Core {
        &self.core
    }

    /// Notes the parent's end, if it ended a wait.
    fn note(&self, wake: Wake) {
        if wake == Wake::ParentEnded {
            self.parent_ended.store(true, Ordering::Relaxed);
        }
    }

    pub(super) fn clock(&self) -> Option<&WorkerClock> {
        self.clock.get().map(Py::get)
    }
}
