//! The parent's end of the transport, as a Python class.

use std::os::fd::{AsFd, AsRawFd, RawFd};
use std::sync::OnceLock;

use pyo3::exceptions::{PyRuntimeError, PyTypeError};
use pyo3::prelude::*;
use ringloader_core::Error;
use ringloader_core::os::memory::MemoryProbe;
use ringloader_core::sync::{Arc, AtomicBool, AtomicU64, Lock, Ordering};
use ringloader_core::transport::engine::{CachedSegment as CoreSegment, Engine as Core};
use ringloader_core::transport::message::ResultKind;
use ringloader_core::transport::received::Received;
use ringloader_core::transport::{Control, Transport};

use super::event::{Unsent, message, stand_in};
use super::memory::SlotMemory;
use crate::batch::decode::{Decoded, decode};
use crate::batch::layout::{Layout, LayoutCache};
use crate::batch::template::TemplateCache;
use crate::caught::caught;
use crate::gil::{Deadline, exception, wait, without_interpreter};
use crate::process::duplicate;
use crate::python;
use crate::sampling::codec::{encode_call, encode_task};
use crate::torch::names::Torch;

/// The smallest memory of a table that is used again: malloc has smaller ones at hand.
const REUSED: usize = 1024;

/// Bytes whose copy takes longer than a probe for free memory.
const PROBED: u64 = 1 << 20;

/// The parent's end: tasks down, results up.
#[pyclass(frozen, module = "ringloader._native")]
pub(crate) struct Engine {
    /// `None` once it is closed: its descriptors are gone then, also where other objects still refer to it.
    core: Lock<Option<Arc<Core>>>,
    /// Epochs begun after the first one.
    epoch: AtomicU64,
    /// Batches copied out in the last epoch.
    copied_out: AtomicU64,
    oversize_logged: AtomicBool,
    templates: TemplateCache,
    layouts: LayoutCache,
    unsent: Unsent,
    /// The probe for free memory, before much is copied out.
    probe: OnceLock<MemoryProbe>,
    /// Bytes that were copied since the last probe.
    unprobed: AtomicU64,
}

#[pymethods]
impl Engine {
    #[new]
    fn new(py: Python<'_>, workers: u32, max_tasks: u32, share: u64) -> PyResult<Self> {
        // Before workers are forked: one that is forked while another thread looks it up would wait for that thread.
        Torch::get(py)?;
        python::load(py)?;
        Core::new(workers, max_tasks, share).map(Self::of).map_err(exception)
    }

    /// The descriptor of the shared memory, which stays the engine's.
    #[getter]
    fn segment(&self) -> PyResult<RawFd> {
        Ok(self.core()?.worker_fds(0).segment.as_raw_fd())
    }

    /// The descriptors that a worker needs, until its process is watched, in the order of `Port.attach`. They stay the
    /// engine's.
    fn worker_fds(&self, worker: u32) -> PyResult<[RawFd; 5]> {
        let core = self.core()?;
        let fds = core.worker_fds(worker);
        let socket = fds
            .socket
            .as_ref()
            .ok_or_else(|| PyRuntimeError::new_err(format!("worker {worker} has its descriptors already")))?;
        Ok([
            fds.segment.as_raw_fd(),
            fds.worker_eventfd.as_raw_fd(),
            fds.parent_eventfd.as_raw_fd(),
            fds.parent_pidfd.as_raw_fd(),
            socket.as_raw_fd(),
        ])
    }

    /// Watches the process with this id as a worker.
    fn watch_worker(&self, worker: u32, pid: u32) -> PyResult<()> {
        self.core()?.watch_worker(worker, pid).map_err(exception)
    }

    /// Returns true if no process is left that may write to the slots of a worker whose process has ended.
    fn is_deserted(&self, worker: u32) -> PyResult<bool> {
        self.core()?.is_deserted(worker).map_err(exception)
    }

    /// Returns true once it is known that a worker has ended.
    fn has_ended(&self, worker: u32) -> PyResult<bool> {
        self.core()?.has_ended(worker).map_err(exception)
    }

    /// Makes the rings of a worker whose process has ended ready for a successor. Returns what the successor's port
    /// needs.
    fn succeed(&self, worker: u32) -> PyResult<Vec<u64>> {
        let core = self.core()?;
        let held = core.succeed(worker).map_err(exception)?;
        core.control().worker(worker).counters.succeed(self.epoch.load(Ordering::Relaxed));
        Ok(held)
    }

    /// Notes that a worker's process has left the memory and lives on.
    fn note_left(&self, worker: u32) -> PyResult<()> {
        self.core()?.unwatch_worker(worker);
        Ok(())
    }

    /// Sends one message of torch's protocol to a worker: `None`, `(index of the task, index)`, or any object.
    fn put(&self, worker: u32, message: &Bound<'_, PyAny>) -> PyResult<()> {
        let task = encode_task(message)?;
        self.core()?.put(worker, task).map_err(exception)
    }

    /// Sends what a worker calls between two tasks, in its turn among them: an object that is pickled.
    fn put_call(&self, worker: u32, callable: &Bound<'_, PyAny>) -> PyResult<()> {
        let task = encode_call(callable)?;
        self.core()?.put(worker, task).map_err(exception)
    }

    /// Sends a worker a descriptor, which stays the caller's, for a call that names `tag`. Tags ascend. False: there is
    /// no room now.
    fn send_fd(&self, worker: u32, fd: RawFd, tag: u64) -> PyResult<bool> {
        let sent = duplicate(fd)?;
        self.core()?.send_fd(worker, sent.as_fd(), tag).map_err(exception)
    }

    /// Waits for the next result: a message of torch's protocol, `(index of the task, batch)`.
    ///
    /// None when the time is over, and once when a worker has ended.
    fn next<'py>(&self, py: Python<'py>, timeout: Option<f64>) -> PyResult<Option<Bound<'py, PyAny>>> {
        let deadline = Deadline::after(timeout)?;
        let core = self.core()?;
        if let Some(message) = self.unsent.take(py)? {
            return Ok(Some(message));
        }
        loop {
            match core.try_next() {
                Ok(Some(delivery)) => return self.message(py, delivery).map(Some),
                Ok(None) => {}
                Err(Error::Arrival { task: Some(seq), error }) => {
                    return self.failed(py, seq as i64, exception(*error)).map(Some);
                }
                Err(error) => return Err(exception(error)),
            }
            let is_over = core.take_ended().is_some() || core.take_wake();
            let Some(left) = deadline.left().filter(|_| !is_over) else { return Ok(None) };
            wait(py, &core, None, left)?;
        }
    }

    /// Results that are committed and not yet taken, and one that was kept when `next` raised.
    fn committed(&self) -> PyResult<u64> {
        let committed = self.core()?.committed().map_err(exception)?;
        Ok(committed + u64::from(self.unsent.is_some()))
    }

    /// Tells the workers that nothing more is wanted.
    fn set_done(&self) -> PyResult<()> {
        self.core()?.set_done();
        Ok(())
    }

    /// Returns true if `set_done` or `close` was called.
    pub(crate) fn is_done(&self) -> bool {
        self.core().map_or(true, |core| core.control().is_done())
    }

    /// Gives back all memory that no tensor holds, and all descriptors; for after the workers have ended.
    /// Calling it again does nothing.
    fn close(&self, py: Python<'_>) {
        let core = self.core.lock().take();
        if let Some(core) = core {
            without_interpreter(py, || core.close());
            log_not_given_back(py, core.control());
        }
    }

    /// As `close`, but keeps up to `most` bytes of its memory for a later engine. None where it may not, or where the
    /// later one's batches would have to be copied out.
    fn store(&self, py: Python<'_>, most: u64) -> Option<CachedSegment> {
        let core = self.core.lock().take()?;
        let control = core.control().clone();
        let stored = without_interpreter(py, || match Arc::try_unwrap(core) {
            // Dropped, it closes.
            Ok(core) => (!core.is_half_leased()).then(|| core.store(most)).flatten(),
            // Another thread waits in it.
            Err(shared) => {
                shared.close();
                None
            }
        });
        log_not_given_back(py, &control);
        stored.map(|stored| CachedSegment(Lock::new(Some(stored))))
    }

    /// Returns the slots as memory that a driver may register.
    fn slot_memory(&self) -> PyResult<SlotMemory> {
        Ok(SlotMemory(self.core()?.slot_memory()))
    }

    /// Bytes of shared memory for each worker.
    #[getter]
    fn share(&self) -> PyResult<u64> {
        Ok(self.core()?.share())
    }

    /// Counts another epoch from now on, which each worker begins in its turn.
    fn begin_epoch(&self) {
        self.epoch.fetch_add(1, Ordering::Relaxed);
        self.copied_out.store(0, Ordering::Relaxed);
    }

    /// Sums of this epoch over the workers: batches committed, storages in place and copied, batches pickled and
    /// oversize, and batches that were copied out because the user held too much.
    fn counters<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        let core = self.core()?;
        let control = core.control();
        let epoch = self.epoch.load(Ordering::Relaxed);
        let mut sums = control.worker(0).counters.read(epoch).to_vec();
        for worker in 1..control.geometry().workers {
            for (sum, (_, count)) in sums.iter_mut().zip(control.worker(worker).counters.read(epoch)) {
                sum.1 += count;
            }
        }
        sums.push(("copied_out", self.copied_out.load(Ordering::Relaxed)));
        // The end of an epoch asks for them, where memory may be missing too.
        caught(py, || sums.into_pyobject(py))
    }
}

/// The memory of an engine that was closed, for one to come.
#[pyclass(frozen, module = "ringloader._native")]
pub(crate) struct CachedSegment(Lock<Option<CoreSegment>>);

#[pymethods]
impl CachedSegment {
    /// The engine over this memory, for new workers. Once.
    fn take(&self) -> PyResult<Engine> {
        let stored = self.0.lock().take().ok_or_else(taken)?;
        stored.take().map(Engine::of).map_err(exception)
    }

    /// Bytes that are kept; none once another engine has them.
    #[getter]
    fn resident(&self) -> u64 {
        self.0.lock().as_ref().map_or(0, CoreSegment::resident)
    }

    /// Bytes of shared memory for each worker.
    #[getter]
    fn share(&self) -> PyResult<u64> {
        self.0.lock().as_ref().map(CoreSegment::share).ok_or_else(taken)
    }
}

impl Drop for CachedSegment {
    fn drop(&mut self) {
        let Some(stored) = self.0.lock().take() else { return };
        let control = stored.control().clone();
        drop(stored);
        // Without an interpreter, or while it looks for garbage, nothing is logged.
        let _ = Python::try_attach(|py| log_not_given_back(py, &control));
    }
}

fn taken() -> PyErr {
    PyRuntimeError::new_err("another engine has this memory")
}

pub(super) fn shut_down() -> PyErr {
    PyRuntimeError::new_err("this iterator was shut down; call iter(loader) for another")
}

/// Logs why memory that is needed no more was not given back, if it was not.
fn log_not_given_back(py: Python<'_>, control: &Control) {
    if let Some(refused) = control.take_refusal() {
        // The segment stays closed, even where the interpreter is on its way out and has no logger.
        let _ = python::log_not_given_back(py, &refused.to_string());
    }
}

impl Engine {
    fn of(core: Core) -> Self {
        Self {
            core: Lock::new(Some(Arc::new(core))),
            epoch: AtomicU64::new(0),
            copied_out: AtomicU64::new(0),
            oversize_logged: AtomicBool::new(false),
            templates: TemplateCache::default(),
            layouts: LayoutCache::default(),
            unsent: Unsent::default(),
            probe: OnceLock::new(),
            unprobed: AtomicU64::new(0),
        }
    }

    pub(crate) fn core(&self) -> PyResult<Arc<Core>> {
        let core = self.core.lock().clone();
        core.ok_or_else(shut_down)
    }

    pub(crate) fn templates(&self) -> &TemplateCache {
        &self.templates
    }

    /// The layout of a delivery, as [`LayoutCache::of`] has it.
    pub(crate) fn layout(&self, py: Python<'_>, delivery: &Received) -> PyResult<Option<Py<Layout>>> {
        self.layouts.of(py, &self.templates, delivery)
    }

    fn message<'py>(&self, py: Python<'py>, delivery: Received) -> PyResult<Bound<'py, PyAny>> {
        let (seq, kind) = (delivery.seq as i64, delivery.kind);
        match (kind, self.unpack_unregistered(py, delivery)) {
            (ResultKind::Batch, Ok(object)) => message(py, seq, object),
            (ResultKind::Batch, Err(error)) => self.failed(py, seq, error),
            // torch's iterator would fail to unpack it.
            (ResultKind::Object, Ok(object)) if object.is_none() => {
                Err(PyTypeError::new_err("cannot unpack non-iterable NoneType object"))
            }
            (ResultKind::Object, object) => object,
        }
    }

    /// The message that stands for a batch whose arrival has failed. torch raises it in its turn.
    ///
    /// # Errors
    /// An error that ends or interrupts the program is raised at once. The next call of `next` returns the message.
    fn failed<'py>(&self, py: Python<'py>, seq: i64, error: PyErr) -> PyResult<Bound<'py, PyAny>> {
        let (standing, interrupt) = stand_in(py, error)?;
        let Some(interrupt) = interrupt else { return message(py, seq, standing) };
        self.unsent.keep(seq, standing.unbind());
        Err(interrupt)
    }

    /// The object that a delivery carries.
    pub(crate) fn unpack<'py>(&self, py: Python<'py>, delivery: Received) -> PyResult<Bound<'py, PyAny>> {
        self.unpack_leased(py, delivery, true)
    }

    /// Logs, once, that a batch came in a segment of its own.
    pub(crate) fn log_if_oversize(&self, py: Python<'_>, delivery: &Received) -> PyResult<()> {
        if delivery.is_oversize() && !self.oversize_logged.swap(true, Ordering::Relaxed) {
            let core = self.core()?;
            let workers = core.control().geometry().workers;
            python::log_oversize(py, delivery.len(), core.share(), core.largest(), workers)?;
        }
        Ok(())
    }

    /// As [`unpack`](Self::unpack), where slots may be registered with a driver. Of those nothing becomes the user's: a
    /// copy of his to a device would still read it after he has dropped it.
    pub(crate) fn unpack_unregistered<'py>(
        &self,
        py: Python<'py>,
        delivery: Received,
    ) -> PyResult<Bound<'py, PyAny>> {
        let may_lease = delivery.backing().window().is_none_or(|window| window.registered == 0);
        self.unpack_leased(py, delivery, may_lease)
    }

    /// Checks that there is memory for a copy, once for every [`PROBED`] bytes that are copied.
    fn require(&self, bytes: u64) -> PyResult<()> {
        if self.unprobed.fetch_add(bytes, Ordering::Relaxed) + bytes < PROBED {
            return Ok(());
        }
        self.unprobed.store(0, Ordering::Relaxed);
        self.probe.get_or_init(MemoryProbe::new).require(bytes).map_err(exception)
    }

    /// As [`unpack`](Self::unpack). Unless `may_lease`, nothing of it lies where the worker wrote it.
    ///
    /// # Errors
    /// The reason why the batch is lost, also a panic: the caller that waits for the batch must hear of it.
    fn unpack_leased<'py>(
        &self,
        py: Python<'py>,
        delivery: Received,
        may_lease: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        let Decoded { object, copied_out, table } = caught(py, || {
            self.log_if_oversize(py, &delivery)?;
            let require = |bytes| self.require(bytes);
            decode(py, &self.templates, delivery, may_lease, require)
        })?;
        if table.capacity() >= REUSED
            && let Ok(core) = self.core()
        {
            core.reuse(table);
        }
        self.copied_out.fetch_add(copied_out.into(), Ordering::Relaxed);
        Ok(object)
    }
}
