//! Native scheduling of one iterator: one call for each batch.
//!
//! | file | about |
//! |---|---|
//! | `classes.rs` | the Python classes, one for each transport |
//! | `advance.rs` | from one batch to the next |
//! | `parent_end.rs` | the parent's end of a transport |
//! | `ahead.rs` | batches that are prepared before their turn |
//! | `features/` | what features have here, and do at their hooks |

mod advance;
mod ahead;
mod classes;
mod features;
mod parent_end;

use std::sync::OnceLock;
use std::time::Duration;

use pyo3::exceptions::{PyAssertionError, PyException, PyRuntimeError};
use pyo3::prelude::*;
use pyo3::{PyTraverseError, PyVisit};
use ringloader_core::Error;
use ringloader_core::plan::ResultOrder as CoreOrder;
use ringloader_core::process::{self, Process};
use ringloader_core::scheduler::Poll;
use ringloader_core::sync::{AtomicU64, Ordering};
use ringloader_core::transport::Transport;

pub(crate) use self::classes::{JointScheduler, Order, Positions, Scheduler, ThreadScheduler};

use self::ahead::{Ahead, TakenBatches};
use self::features::{Features, ParentEnd, Recording};
use self::parent_end::IndexOf;
use crate::caught::caught;
use crate::gil::exception;
use crate::lock::{DetachedLock, Guard};
use crate::python::Callbacks;
use crate::sampling::source::IndexSource;
use crate::torch::names::Torch;
use crate::transport::event::stand_in;

type Core = ringloader_core::scheduler::Scheduler<Py<PyAny>>;

/// Reads indices, hands out tasks, takes results in order, waits: over the parent's end `E` of any transport.
///
/// The methods get the iterator, and call torch's own methods of it at torch's moments. While one of them runs, another
/// thread waits, and a call below a signal handler cannot run.
struct Scheduling<E: ParentEnd> {
    engine: Py<E>,
    state: DetachedLock<EpochState<IndexOf<E>>>,
    /// INVARIANT: a thread takes it before the state, and has it while it prepares batches.
    ahead: DetachedLock<Ahead>,
    /// The number of times that the batches ahead were closed without their lock, while a call in this thread or in
    /// another one had it.
    closes: AtomicU64,
    /// The nanoseconds for which calls have waited because no batch was there.
    waited: AtomicU64,
    /// The message of the error that every call raises since [`stop`](Self::stop).
    stopped: OnceLock<String>,
    /// The process that made it.
    process: &'static Process,
    workers: u32,
    iterable: bool,
    timeout: Option<f64>,
    recording: Recording,
}

/// The state of an epoch, which the scheduler has under one lock.
struct EpochState<I> {
    core: Core,
    source: Py<IndexSource>,
    /// True once the last read has found the sampler's end.
    at_end: bool,
    taken: TakenBatches,
    /// Workers whose end was taken and is stored until its turn.
    ends_stored: Vec<u32>,
    features: Features<I>,
}

impl<I> EpochState<I> {
    fn new(core: Core, source: Py<IndexSource>, features: Features<I>) -> Self {
        Self {
            core,
            source,
            at_end: false,
            taken: TakenBatches::default(),
            ends_stored: Vec::new(),
            features,
        }
    }

    /// Forgets the batches that this epoch has taken, and what features have of it. Returns the objects, for the caller
    /// to drop after the lock is released.
    fn forget(&mut self) -> impl Sized + use<I> {
        self.ends_stored.clear();
        self.taken.forget();
        self.features.forget()
    }

    /// Returns the number of tasks that were sent and whose batches were not handed out.
    fn outstanding(&self) -> u64 {
        self.core.positions().2 + self.taken.len()
    }
}

/// The end of a worker's iterable dataset.
#[derive(Clone, Copy)]
enum End {
    /// The answer to this task, which is still awaited.
    Answer(u64),
    /// The end of this worker, whose answer was stored until its turn.
    Stored(u32),
}

/// A result whose turn it is.
struct Due<'py> {
    /// The task's number in the epoch.
    seq: u64,
    worker: u32,
    data: Bound<'py, PyAny>,
}

impl<E: ParentEnd> Scheduling<E> {
    fn new(
        engine: Py<E>,
        source: Py<IndexSource>,
        workers: u32,
        prefetch_factor: u32,
        order: Order,
        iterable: bool,
        timeout: f64,
    ) -> Self {
        let order = match order {
            Order::InOrder => CoreOrder::InOrder,
            Order::AsCompleted => CoreOrder::AsCompleted,
            Order::AsCompletedRoundRobin => CoreOrder::AsCompletedRoundRobin,
        };
        let mut core = Core::new(workers, prefetch_factor, order);
        core.begin_at(source.get().first_worker());
        let timeout = (timeout > 0.0).then_some(timeout);
        let state = DetachedLock::new(EpochState::new(core, source, Features::new(timeout.is_some())));
        Self {
            engine,
            state,
            ahead: DetachedLock::new(Ahead::default()),
            closes: AtomicU64::new(0),
            waited: AtomicU64::new(0),
            stopped: OnceLock::new(),
            process: process::current(),
            workers,
            iterable,
            timeout,
            recording: Recording::default(),
        }
    }

    /// Returns the seconds for which calls for a batch have waited because none was there, in all epochs.
    fn waited(&self) -> f64 {
        Duration::from_nanos(self.waited.load(Ordering::Relaxed)).as_secs_f64()
    }

    /// Begins a new epoch, with indices from `source`. What comes from the one before is thrown away.
    fn reset(&self, py: Python<'_>, source: Py<IndexSource>) -> PyResult<()> {
        let mut state = self.lock(py)?;
        state.core.reset();
        if let Ok(engine) = E::core(&self.engine) {
            engine.begin_epoch(state.core.epoch());
        }
        state.core.begin_at(source.get().first_worker());
        state.at_end = false;
        state.features.sent.reset();
        let before = std::mem::replace(&mut state.source, source);
        let left = state.forget();
        drop(state);
        // After the lock is released: the end of a sampler, or of a batch, may run any code.
        drop((left, before));
        Ok(())
    }

    /// Returns a number for the epoch that begins next, which its tasks then have in their numbers.
    fn number_next(&self, py: Python<'_>) -> PyResult<u64> {
        Ok(self.lock(py)?.core.number_next())
    }

    /// Reads one index and sends it: torch's `_try_put_index`.
    fn put_index(&self, callbacks: &Bound<'_, PyAny>) -> PyResult<()> {
        let mut state = self.lock(callbacks.py())?;
        self.send_one(&mut state, &Callbacks(callbacks))
    }

    /// The next batch: torch's `_next_data`.
    fn next<'py>(&self, callbacks: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let py = callbacks.py();
        let callbacks = &Callbacks(callbacks);
        let found = caught(py, || self.next_of(&mut *self.lock(py)?, callbacks));
        self.unless_stopped(py, found)
    }

    fn next_of<'py>(
        &self,
        state: &mut EpochState<IndexOf<E>>,
        callbacks: &Callbacks<'_, 'py>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = callbacks.py();
        state.source.get().begin_call();
        let unpack = |delivery| E::unpack(&self.engine, py, delivery);
        let Some(Due { seq, worker, data }) = self.advance(state, callbacks, true, unpack)? else {
            return Err(invalid_state());
        };
        state.core.record_delivered(worker);
        self.hand_out(state, callbacks, (seq, worker), data)
    }

    /// Makes every call for a batch raise `RuntimeError` with this text from now on, also one that waits in another
    /// thread.
    fn stop(&self, message: String) -> PyResult<()> {
        let _ = self.stopped.set(message);
        E::end_wait(&self.engine)
    }

    /// # Errors
    /// Once it is stopped.
    fn check_stopped(&self) -> PyResult<()> {
        match self.stopped.get() {
            None => Ok(()),
            Some(message) => Err(PyRuntimeError::new_err(message.clone())),
        }
    }

    /// Returns `found`, or the scheduler's error once it is stopped. That error replaces a batch, and also an error
    /// that the end of the workers has raised, but no interrupt.
    fn unless_stopped<T>(&self, py: Python<'_>, found: PyResult<T>) -> PyResult<T> {
        match found {
            Err(interrupt) if !interrupt.is_instance_of::<PyException>(py) => Err(interrupt),
            found => self.check_stopped().and(found),
        }
    }

    /// Takes what all workers have committed, and keeps it until its turn: for a caller that waits for something else
    /// from them. So no worker waits for room for long.
    fn take_committed(&self, py: Python<'_>) -> PyResult<()> {
        let mut state = self.lock(py)?;
        let state = &mut *state;
        let Ok(engine) = E::core(&self.engine) else { return Ok(()) };
        for worker in 0..self.workers {
            while !state.ends_stored.contains(&worker)
                && let Some(poll) = state.core.poll_of(&*engine, worker).map_err(exception)?
            {
                let mut timed = None;
                let (seq, found) = match poll {
                    Poll::Arrived { seq, received: delivery } => {
                        timed = self.begin_timed(&delivery);
                        (seq, E::unpack(&self.engine, py, delivery))
                    }
                    Poll::Failed { seq, error } => (seq, Err(exception(error))),
                    Poll::Early { seq, found } => {
                        let unpack = |delivery| E::unpack(&self.engine, py, delivery);
                        self.store_early(py, state, seq, found, unpack)?;
                        continue;
                    }
                    _ => break,
                };
                let (data, interrupt) = match found {
                    Ok(data) => (data, None),
                    Err(error) => stand_in(py, error)?,
                };
                if self.iterable && is_end(&data)? {
                    state.ends_stored.push(worker);
                } else {
                    self.end_timed(py, state, seq, timed);
                }
                state.core.buffer(seq, data.unbind()).map_err(exception)?;
                if let Some(interrupt) = interrupt {
                    return Err(interrupt);
                }
            }
        }
        Ok(())
    }

    /// torch's `_send_idx`, `_rcvd_idx` and `_tasks_outstanding`.
    fn positions(&self, py: Python<'_>) -> PyResult<Positions> {
        let state = self.lock(py)?;
        let (sent, received, _) = state.core.positions();
        let received = state.taken.received().unwrap_or(received);
        Ok(Positions { sent, received, outstanding: state.outstanding() })
    }

    fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        if !self.process.is_current() {
            // A thread of the parent may have had the lock at the fork.
            return Ok(());
        }
        self.state.traverse(|state| {
            state.features.traverse(visit)?;
            visit.call(&state.source)
        })?;
        self.ahead.traverse(|ahead| ahead.traverse(visit))
    }
}

const BUSY: &str = "this iterator is being advanced elsewhere; wait until that call of next has returned";

fn invalid_state() -> PyErr {
    PyAssertionError::new_err(
        "Invalid iterator state: shutdown or no outstanding tasks when fetching next data",
    )
}

fn is_end(data: &Bound<'_, PyAny>) -> PyResult<bool> {
    Ok(data.get_type().is(&Torch::get(data.py())?.iterable_end))
}

impl<E: ParentEnd> Scheduling<E> {
    fn lock(&self, py: Python<'_>) -> PyResult<Guard<'_, EpochState<IndexOf<E>>>> {
        self.check_process()?;
        self.state.lock(py, BUSY)
    }

    /// # Errors
    /// In a forked child. To be called before a lock, which a thread may have had at the fork.
    fn check_process(&self) -> PyResult<()> {
        if self.process.is_current() {
            return Ok(());
        }
        Err(exception(Error::Inherited { owner: self.process.pid() }))
    }
}
