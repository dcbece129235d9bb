//! A worker's end of the transport, as a Python class.

use std::ffi::CString;
use std::os::fd::{AsFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use pyo3::exceptions::{PyRuntimeError, PyRuntimeWarning};
use pyo3::prelude::*;
use pyo3::types::PyTuple;
use ringloader_core::batch::Dtype;
use ringloader_core::os::Segment;
use ringloader_core::os::clock::monotonic;
use ringloader_core::os::fd_passing::{SendOutcome, most_in_flight};
use ringloader_core::sync::{Arc, AtomicBool, Ordering};
use ringloader_core::timing::Stamps;
use ringloader_core::transport::message::{ResultKind, TaskKind};
use ringloader_core::transport::port::{Chunk, Commit, Port as Core, Room, Wake};
use ringloader_core::transport::relay::worker_end::{Ahead, Answer, WorkerRelay};
use ringloader_core::transport::{Control, PortFds};

use super::engine::Engine;
use super::joint_batch::{JointBatch, Reserved};
use super::memory::WorkerFds;
use crate::batch::encode::Encoded;
use crate::batch::write::Target;
use crate::gil::{Deadline, detached, exception};
use crate::process::{GRACE, duplicate};
use crate::sampling::codec::{decode_task, pair};
use crate::strings;
use crate::timing::WorkerClock;
use crate::torch::names::Torch;
use crate::torch::tensor::tensor_over_chunk;

/// The number of times that a batch is read if others change it meanwhile.
const MOST_LOOKS: u32 = 100;

/// The time for which a worker waits in silence for a limit that other processes may have filled.
const SILENT: Duration = Duration::from_secs(5);

/// A worker's end: tasks in, results out, memory for collate.
#[pyclass(frozen, weakref, module = "ringloader._native")]
pub(crate) struct Port {
    core: Core,
    parent_ended: AtomicBool,
    /// True once this worker has warned that the limit of descriptors in flight keeps it waiting.
    warned: AtomicBool,
    /// The last batch's memory, empty. A thread that puts a batch has it meanwhile.
    spare: Mutex<Option<Box<Encoded>>>,
    /// Notes the moments of each batch, where that is wanted.
    clock: OnceLock<Py<WorkerClock>>,
    /// Sends what lies in objects' memory, where a relay serves this worker.
    ahead: OnceLock<Ahead>,
}

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

    /// The end of a worker that was sent the descriptors, which stay the caller's. `busy`: as for `inherit`.
    #[staticmethod]
    #[pyo3(signature = (fds, worker, share, busy = None))]
    fn attach(fds: &WorkerFds, worker: u32, share: u64, busy: Option<Vec<u64>>) -> PyResult<Self> {
        let segment = Segment::attach(duplicate(fds.segment)?.as_fd()).map_err(exception)?;
        let control = Arc::new(Control::attach(segment).map_err(exception)?);
        let fds = PortFds {
            eventfd: duplicate(fds.worker_eventfd)?,
            parent_eventfd: duplicate(fds.parent_eventfd)?,
            parent_pidfd: duplicate(fds.parent_pidfd)?,
            socket: duplicate(fds.socket)?,
        };
        Self::attached(control, worker, share, fds, busy)
    }

    /// Makes the system kill this process half a second after the parent's end, unless the process has ended by then.
    /// `pipe`: in a process that a server has forked, the reading end of a pipe whose writing end only the parent has.
    /// `OSError`: the system cannot do it.
    fn end_with_parent(&self, pipe: Option<RawFd>) -> PyResult<()> {
        let pipe = pipe.map(duplicate).transpose()?;
        self.core.end_with_parent(pipe.as_ref().map(AsFd::as_fd), GRACE).map_err(exception)
    }

    /// Waits for the next task: a message of torch's protocol in a tuple of its own, which costs less than a class.
    /// None when the time is over or the parent has ended. Makes the calls that come before it.
    pub(super) fn get<'py>(
        &self,
        py: Python<'py>,
        timeout: Option<f64>,
    ) -> PyResult<Option<Bound<'py, PyTuple>>> {
        let deadline = Deadline::after(timeout)?;
        if !self.core.is_current() {
            // A process that the dataset forked has come back to the worker loop, which ends so.
            self.parent_ended.store(true, Ordering::Relaxed);
            return Ok(None);
        }
        loop {
            if let Some(task) = self.core.try_task().map_err(exception)? {
                let is_call = task.kind == TaskKind::Call;
                let message = decode_task(py, task)?;
                if is_call {
                    message.call0()?;
                    continue;
                }
                if let Some(clock) = self.clock() {
                    clock.note_task();
                }
                return Ok(Some((message,).into_pyobject(py)?));
            }
            let Some(left) = deadline.left().filter(|_| !self.parent_ended()) else { return Ok(None) };
            if detached(py, || self.core.wait(left))? == Wake::ParentEnded {
                self.parent_ended.store(true, Ordering::Relaxed);
            }
        }
    }

    /// Lets `clock` note the moments of each batch from now on. The moments are sent after the batch's bytes.
    fn time(&self, clock: Py<WorkerClock>) {
        let _ = self.clock.set(clock);
    }

    /// Commits one message of torch's protocol: `(index of the task, batch)` or any object. Waits for
    /// room if it must, unless the parent wants nothing more.
    fn put(&self, message: &Bound<'_, PyAny>) -> PyResult<()> {
        self.send(message, true, None).map(drop)
    }

    /// As `put`, without waiting for room. False: there is none, and nothing was sent.
    fn put_now(&self, message: &Bound<'_, PyAny>) -> PyResult<bool> {
        self.send(message, false, None)
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
        self.spare().take();
        self.core.detach()
    }

    /// Returns true if the parent wants nothing more.
    fn is_done(&self) -> bool {
        self.core.is_done() || self.parent_ended()
    }

    /// Returns true if the parent has ended.
    #[getter]
    pub(super) fn parent_ended(&self) -> bool {
        self.parent_ended.load(Ordering::Relaxed)
    }
}

impl Port {
    fn attached(
        control: Arc<Control>,
        worker: u32,
        share: u64,
        fds: PortFds,
        busy: Option<Vec<u64>>,
    ) -> PyResult<Self> {
        let core = match busy {
            None => Core::attach(control, worker, share, fds),
            Some(busy) => Core::take_over(control, worker, share, fds, &busy),
        }
        .map_err(exception)?;
        Ok(Self::of(core))
    }

    pub(super) fn of(core: Core) -> Self {
        let (parent_ended, warned) = (AtomicBool::new(false), AtomicBool::new(false));
        Self {
            core,
            parent_ended,
            warned,
            spare: Mutex::default(),
            clock: OnceLock::new(),
            ahead: OnceLock::new(),
        }
    }

    /// Memory in the slot that is being filled; `None` where the caller's own memory serves better.
    ///
    /// # Errors
    /// `OSError` when pages cannot be had.
    pub(crate) fn allocate(&self, nbytes: u64) -> PyResult<Option<Chunk>> {
        self.core.allocate(nbytes).map_err(exception)
    }

    /// Returns whether the message was committed, or is wanted no more. The rows of a batch that all workers have made
    /// stay in their window.
    pub(super) fn send(
        &self,
        message: &Bound<'_, PyAny>,
        waits: bool,
        joint: Option<&JointBatch<'_>>,
    ) -> PyResult<bool> {
        if !self.core.is_current() {
            // The rings are the worker's, which answers for itself.
            self.parent_ended.store(true, Ordering::Relaxed);
            return Ok(true);
        }
        let (kind, seq, object) = match pair(message)? {
            Some((seq, data)) => (ResultKind::Batch, seq, data),
            None => (ResultKind::Object, 0, message.clone()),
        };
        // Only batches have stamps.
        let clock = self.clock().filter(|_| kind == ResultKind::Batch);
        if let Some(clock) = clock {
            clock.note_made();
        }
        let mut encoded = self.spare().take().unwrap_or_default();
        encoded.encode(&object)?;
        let committed = self.commit(&object, (kind, seq as u64), &mut encoded, waits, clock, joint);
        if encoded.clear() {
            *self.spare() = Some(encoded);
        }
        committed
    }

    /// The worker's end, which a relay serves.
    pub(super) fn of_relay(relay: &WorkerRelay) -> PyResult<Self> {
        let port = Self::of(relay.port().map_err(exception)?);
        let _ = port.ahead.set(relay.ahead());
        Ok(port)
    }

    pub(super) fn core(&self) -> &Core {
        &self.core
    }

    pub(super) fn note_parent_ended(&self) {
        self.parent_ended.store(true, Ordering::Relaxed);
    }

    pub(super) fn clock(&self) -> Option<&WorkerClock> {
        self.clock.get().map(Py::get)
    }

    fn spare(&self) -> MutexGuard<'_, Option<Box<Encoded>>> {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn commit(
        &self,
        object: &Bound<'_, PyAny>,
        (kind, seq): (ResultKind, u64),
        encoded: &mut Encoded,
        waits: bool,
        clock: Option<&WorkerClock>,
        mut joint: Option<&JointBatch<'_>>,
    ) -> PyResult<bool> {
        let py = object.py();
        let extra = if clock.is_some() { Stamps::BYTES } else { 0 };
        let mut commit = self.core.begin_commit();
        let generation = commit.generation();
        let mut found = None;
        for _ in 0..MOST_LOOKS {
            let Encoded { meta, drafts, groups, .. } = encoded;
            let filled = joint.map_or_else(|| Ok(commit.filled()), JointBatch::filled)?;
            groups.form(py, drafts, filled, meta)?;
            let reserved = match joint {
                Some(batch) => batch.reserve(encoded, extra)?,
                None => self.reserve(py, &mut commit, encoded, extra, waits)?,
            };
            let Some(reserved) = reserved else {
                if joint.take().is_some() {
                    // The window has no room for the rest: all goes to a slot.
                    encoded.clear();
                    encoded.encode(object)?;
                    continue;
                }
                return Ok(waits || self.is_done());
            };
            if encoded.verify(object)? {
                found = Some(reserved);
                break;
            }
        }
        let Some(Reserved { own, meta_at, meta_end, end }) = found else {
            let text = format!(
                "the batch was changed by another thread each time that it was read, {MOST_LOOKS} times"
            );
            return Err(PyRuntimeError::new_err(text));
        };
        let Encoded { meta, drafts, groups, pickled, .. } = encoded;
        let block = meta.finish(generation);
        let target = match (&own, joint) {
            (Some((segment, _)), _) => Target::Own(segment),
            (None, Some(batch)) => batch.target(),
            (None, None) => Target::Slot(&commit),
        };
        // Before anything is sent: the parent finds a batch counted that it has taken.
        let counters = self.core.counters();
        let count =
            |counter: &ringloader_core::sync::AtomicU64, by: u64| counter.fetch_add(by, Ordering::Relaxed);
        let counts = counters.now();
        if kind == ResultKind::Object {
            counters.begin_epoch();
        } else if pickled.is_none() || !Torch::get(py)?.is_notice(object)? {
            count(&counts.batches, 1);
            count(&counts.in_place, if own.is_some() { 0 } else { groups.in_place() });
            count(&counts.copied, groups.copies().len() as u64);
            count(&counts.pickled, pickled.is_some().into());
            count(&counts.oversize, own.is_some().into());
        }
        let begun = match (&target, self.ahead.get()) {
            (Target::Slot(commit), Some(ahead)) if groups.has_held() => {
                let meta = (meta_at, block.len() as u64);
                ahead.begin(commit.committed(), &Answer { seq, kind, len: end, meta, generation })
            }
            _ => None,
        };
        target.write_or_send(py, groups.copies(), &drafts.held, meta_at, block, begun)?;
        if let Some((_, fd)) = &own {
            let begun = Instant::now();
            loop {
                match commit.send(fd).map_err(exception)? {
                    SendOutcome::Yes => break,
                    SendOutcome::TooManyInFlight if begun.elapsed() > SILENT => {
                        self.warn_of_many_in_flight(py)?
                    }
                    SendOutcome::TooManyInFlight | SendOutcome::Full => {}
                }
                if self.rest(py)? {
                    return Ok(true);
                }
            }
        }
        if let Some(clock) = clock {
            target.write(py, &[], &[], meta_end, &clock.note_sent().to_bytes(generation))?;
        }
        let mut finish = || match joint {
            Some(batch) => commit.finish_shared(seq, kind, meta_at..meta_end, end, batch.window()),
            None => commit.finish(seq, kind, meta_at..meta_end, end, own.is_some()),
        };
        while !finish().map_err(exception)? {
            if self.rest(py)? {
                return Ok(true);
            }
        }
        Ok(true)
    }

    /// Reserves memory for the batch, and for `extra` bytes after it. `None` when the parent wants nothing more, or
    /// when there is no room and `waits` is false.
    fn reserve(
        &self,
        py: Python<'_>,
        commit: &mut Commit<&Core>,
        encoded: &mut Encoded,
        extra: u64,
        waits: bool,
    ) -> PyResult<Option<Reserved>> {
        let Encoded { meta, drafts, groups, .. } = encoded;
        let len = meta.encoded_len() as u64;
        loop {
            let meta_at = groups.lay_out(meta, Some(commit.bump()));
            let meta_end = meta_at + len;
            let end = meta_end + extra;
            match commit.reserve(end).map_err(exception)? {
                Room::Ready => return Ok(Some(Reserved { own: None, meta_at, meta_end, end })),
                Room::Later => {
                    drafts.disturb();
                    if !waits || self.rest(py)? {
                        return Ok(None);
                    }
                }
                Room::Oversize => {
                    let meta_at = groups.lay_out(meta, None);
                    let meta_end = meta_at + len;
                    let end = meta_end + extra;
                    let own = commit.own_segment(end).map_err(exception)?;
                    if own.is_some() {
                        return Ok(Some(Reserved { own, meta_at, meta_end, end }));
                    }
                    drafts.disturb();
                    if !waits || self.rest(py)? {
                        return Ok(None);
                    }
                }
            }
        }
    }

    /// Says once that another program, or a loader that nobody reads, keeps this worker from sending.
    fn warn_of_many_in_flight(&self, py: Python<'_>) -> PyResult<()> {
        if self.warned.swap(true, Ordering::Relaxed) {
            return Ok(());
        }
        let text = format!(
            "ringloader: worker {} cannot send a large batch yet, and waits: as many descriptors as RLIMIT_NOFILE \
             allows ({}) were sent over sockets by this user's processes and not received. Take batches from the \
             loaders that have some ready, or raise the limit: ulimit -n",
            self.core.worker(),
            most_in_flight().map_or_else(|| "no limit".to_owned(), |most| most.to_string()),
        );
        PyErr::warn(py, &py.get_type::<PyRuntimeWarning>(), &CString::new(text)?, 1)
    }

    /// Waits a moment for room. Returns whether the parent wants nothing more.
    fn rest(&self, py: Python<'_>) -> PyResult<bool> {
        let begun = self.clock().map(|clock| (clock, monotonic()));
        if detached(py, || self.core.wait_for_room())? == Wake::ParentEnded {
            self.parent_ended.store(true, Ordering::Relaxed);
        }
        if let Some((clock, begun)) = begun {
            clock.note_room(monotonic().saturating_sub(begun));
        }
        Ok(self.is_done())
    }
}
