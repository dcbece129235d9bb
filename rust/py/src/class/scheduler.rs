//! Native control of one iterator, as a Python class: one call for each batch.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, ThreadId};
use std::time::Duration;

use pyo3::exceptions::{PyAssertionError, PyRuntimeError, PyStopIteration};
use pyo3::intern;
use pyo3::prelude::*;
use ringloader_core::Error;
use ringloader_core::plan::Order;
use ringloader_core::process::{self, Process};
use ringloader_core::scheduler::Poll;
use ringloader_core::transport::message::TaskKind;

use super::engine::{Engine, stand_in};
use super::stream::Stream;
use crate::gil::{Deadline, detached, exception, exits_elsewhere, wait};
use crate::index::codec::encode_index_or_pickle;
use crate::torch::names::Torch;

type Core = ringloader_core::scheduler::Scheduler<Py<PyAny>>;

/// Reads indices, hands out tasks, takes results in order, waits.
///
/// Its methods are given the iterator, and call torch's own methods of it at torch's moments. While one
/// of them runs, another thread waits, and one below a signal handler cannot run.
#[pyclass(frozen, module = "ringloader._native")]
pub(crate) struct Scheduler {
    engine: Py<Engine>,
    core: Mutex<Home>,
    put_back: Condvar,
    /// The process that made it.
    process: &'static Process,
    iterable: bool,
    timeout: Option<f64>,
}

/// How long a thread waits for another one's method between two looks for signals.
const LOOK: Duration = Duration::from_millis(50);

/// Where the state is.
enum Home {
    In(Box<Core>),
    /// A method of this thread has it. `awaited`: somebody waits for it. To wake takes a system call, also where
    /// there is nobody.
    Out {
        holder: ThreadId,
        awaited: bool,
    },
}

/// The state, for one method; put back when dropped.
struct CheckedOut<'a> {
    home: &'a Scheduler,
    core: Option<Box<Core>>,
}

impl CheckedOut<'_> {
    fn core(&mut self) -> &mut Core {
        self.core.as_mut().expect("only taken when dropped")
    }
}

impl Drop for CheckedOut<'_> {
    fn drop(&mut self) {
        if let Some(core) = self.core.take() {
            let out = std::mem::replace(&mut *self.home.lock(), Home::In(core));
            if matches!(out, Home::Out { awaited: true, .. }) {
                self.home.put_back.notify_all();
            }
        }
    }
}

#[pymethods]
impl Scheduler {
    #[new]
    fn new(
        engine: Py<Engine>,
        workers: u32,
        prefetch_factor: u32,
        order: &str,
        iterable: bool,
        timeout: f64,
    ) -> PyResult<Self> {
        let order = match order {
            "in_order" => Order::InOrder,
            "as_completed" => Order::AsCompleted,
            "as_completed_round_robin" => Order::AsCompletedRoundRobin,
            other => return Err(PyRuntimeError::new_err(format!("{other:?} is no order"))),
        };
        let core = Mutex::new(Home::In(Box::new(Core::new(workers, prefetch_factor, order))));
        let timeout = (timeout > 0.0).then_some(timeout);
        Ok(Self { engine, core, put_back: Condvar::new(), process: process::current(), iterable, timeout })
    }

    /// Begins a new epoch. What comes from the one before is thrown away.
    fn reset(&self, py: Python<'_>) -> PyResult<()> {
        self.check_out(py)?.core().reset();
        Ok(())
    }

    /// Reads one index and sends it: torch's `_try_put_index`.
    fn put_index(&self, iterator: &Bound<'_, PyAny>) -> PyResult<()> {
        let mut state = self.check_out(iterator.py())?;
        self.send_one(state.core(), iterator)
    }

    /// The next batch: torch's `_next_data`.
    fn next<'py>(&self, py: Python<'py>, iterator: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let mut state = self.check_out(py)?;
        let core = state.core();
        let engine = self.engine.get().core().ok();
        let mut deadline = Deadline::after(self.timeout)?;
        loop {
            match core.poll(engine.as_deref()).map_err(exception)? {
                Poll::End => {
                    // Only an engine that nobody else uses can be kept for the next epoch.
                    drop(engine);
                    return Err(self.end(iterator)?);
                }
                Poll::Ready { worker, data } => {
                    return self.process(core, iterator, worker, data.into_bound(py));
                }
                Poll::Failed { seq, error } => {
                    if let Some((worker, data)) = self.fail(py, core, seq, exception(error))? {
                        return self.process(core, iterator, worker, data);
                    }
                    deadline = Deadline::after(self.timeout)?;
                }
                Poll::Arrived { seq, delivery } => {
                    let data = match self.engine.get().unpack(py, delivery) {
                        Ok(data) => data,
                        Err(error) => {
                            if let Some((worker, data)) = self.fail(py, core, seq, error)? {
                                return self.process(core, iterator, worker, data);
                            }
                            continue;
                        }
                    };
                    if self.iterable && is_end(&data)? {
                        let worker = core.end_worker(seq).map_err(exception)?;
                        iterator.call_method1(intern!(py, "_note_retired"), (worker,))?;
                        self.send_one(core, iterator)?;
                    } else if let Some((worker, data)) = core.accept(seq, data.unbind()).map_err(exception)? {
                        return self.process(core, iterator, worker, data.into_bound(py));
                    }
                    deadline = Deadline::after(self.timeout)?;
                }
                Poll::Lost { worker } => {
                    // Somebody, in another thread or in a signal handler, ends the workers.
                    if self.engine.get().is_done() {
                        return Err(invalid_state());
                    }
                    core.give_up(worker);
                    iterator.call_method1(intern!(py, "_raise_lost"), (worker,))?;
                    return Err(PyRuntimeError::new_err(format!(
                        "DataLoader worker {worker} exited unexpectedly"
                    )));
                }
                Poll::Wait { worker, limit } => {
                    let Some(engine) = &engine else { return Err(invalid_state()) };
                    let Some(left) = deadline.left() else {
                        iterator.call_method0(intern!(py, "_raise_timeout"))?;
                        return Err(PyRuntimeError::new_err("DataLoader timed out"));
                    };
                    wait(py, engine, worker, left.min(limit))?;
                    if self.engine.get().core().is_err() {
                        return Err(invalid_state());
                    }
                }
            }
        }
    }

    /// torch's `_send_idx`, `_rcvd_idx` and `_tasks_outstanding`.
    fn positions(&self, py: Python<'_>) -> PyResult<(u64, u64, u64)> {
        Ok(self.check_out(py)?.core().positions())
    }
}

fn invalid_state() -> PyErr {
    PyAssertionError::new_err(
        "Invalid iterator state: shutdown or no outstanding tasks when fetching next data",
    )
}

fn is_end(data: &Bound<'_, PyAny>) -> PyResult<bool> {
    Ok(data.get_type().is(&Torch::get(data.py())?.iterable_end))
}

impl Scheduler {
    fn lock(&self) -> MutexGuard<'_, Home> {
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check_out(&self, py: Python<'_>) -> PyResult<CheckedOut<'_>> {
        if !self.process.is_current() {
            // Before the lock, which a thread may have had at the fork.
            return Err(exception(Error::Inherited { owner: self.process.pid() }));
        }
        let me = thread::current().id();
        loop {
            {
                let mut home = self.lock();
                match std::mem::replace(&mut *home, Home::Out { holder: me, awaited: false }) {
                    Home::In(core) => return Ok(CheckedOut { home: self, core: Some(core) }),
                    out => *home = out,
                }
                if matches!(*home, Home::Out { holder, .. } if holder == me) {
                    let text = "this iterator is being advanced elsewhere at this moment";
                    return Err(PyRuntimeError::new_err(text));
                }
            }
            // Without the interpreter, for the other thread needs it. As with torch's, each gets a batch.
            detached(py, || {
                self.wait_for_core();
                Ok(())
            })?;
        }
    }

    /// Until it is there, or for [`LOOK`]; for ever, once another thread ends the interpreter.
    fn wait_for_core(&self) {
        let mut home = self.lock();
        loop {
            match &mut *home {
                Home::Out { awaited, .. } => *awaited = true,
                Home::In(_) if !exits_elsewhere() => return,
                Home::In(_) => {}
            }
            home = self.put_back.wait_timeout(home, LOOK).unwrap_or_else(PoisonError::into_inner).0;
            if !exits_elsewhere() {
                return;
            }
        }
    }

    /// The epoch is over. Returns what to raise.
    fn end(&self, iterator: &Bound<'_, PyAny>) -> PyResult<PyErr> {
        let py = iterator.py();
        if !iterator.getattr(intern!(py, "_persistent_workers"))?.is_truthy()? {
            iterator.call_method0(intern!(py, "_shutdown_workers"))?;
        }
        Ok(PyStopIteration::new_err(()))
    }

    /// The result of `seq` has come and cannot be had: its error takes its place. As [`Core::accept`].
    ///
    /// # Errors
    /// What ends a program, and what interrupts it: at once. The batch's turn says so again.
    fn fail<'py>(
        &self,
        py: Python<'py>,
        core: &mut Core,
        seq: u64,
        error: PyErr,
    ) -> PyResult<Option<(u32, Bound<'py, PyAny>)>> {
        let (standing, interrupt) = stand_in(py, error)?;
        match interrupt {
            None => {
                let turn = core.accept(seq, standing.unbind()).map_err(exception)?;
                Ok(turn.map(|(worker, data)| (worker, data.into_bound(py))))
            }
            Some(interrupt) => {
                core.keep(seq, standing.unbind()).map_err(exception)?;
                Err(interrupt)
            }
        }
    }

    /// MIRRORS torch dataloader.py::_process_data. What reading the index raises replaces the batch.
    fn process<'py>(
        &self,
        core: &mut Core,
        iterator: &Bound<'py, PyAny>,
        worker: u32,
        data: Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = iterator.py();
        core.delivered(worker);
        self.send_one(core, iterator)?;
        // By its type: `isinstance` would ask every batch for `__class__` too, which a user's class may answer.
        if data.get_type().is_subclass(Torch::get(py)?.exception_wrapper.bind(py))? {
            data.call_method0(intern!(py, "reraise"))?;
        }
        Ok(data)
    }

    /// MIRRORS torch dataloader.py::_try_put_index.
    fn send_one(&self, core: &mut Core, iterator: &Bound<'_, PyAny>) -> PyResult<()> {
        if core.is_full() {
            return Err(PyAssertionError::new_err(
                "Number of outstanding tasks exceeded maximum allowed tasks",
            ));
        }
        let Some((kind, bytes)) = read_index(iterator)? else { return Ok(()) };
        // After shutdown there is no worker left, and as in torch the index is lost.
        let Ok(engine) = self.engine.get().core() else { return Ok(()) };
        core.send(&*engine, kind, bytes).map_err(exception)?;
        Ok(())
    }
}

/// The next index, natively or by torch's `_next_index`; `None` at the sampler's end.
fn read_index(iterator: &Bound<'_, PyAny>) -> PyResult<Option<(TaskKind, Vec<u8>)>> {
    let py = iterator.py();
    let stream = iterator.getattr(intern!(py, "_stream"))?;
    if !stream.is_none() {
        // Made at the first request, as torch's generators begin their bodies then.
        let mut native = stream.getattr(intern!(py, "native"))?;
        if native.is_none() {
            native = stream.call_method0(intern!(py, "open"))?;
        }
        if let Ok(native) = native.cast::<Stream>() {
            return native.get().read(&stream);
        }
        // torch refuses it too, in words of its own.
        iterator.setattr(intern!(py, "_stream"), py.None())?;
    }
    match iterator.call_method0(intern!(py, "_next_index")) {
        Ok(index) => encode_index_or_pickle(&index).map(Some),
        Err(error) if error.is_instance_of::<PyStopIteration>(py) => Ok(None),
        Err(error) => Err(error),
    }
}
