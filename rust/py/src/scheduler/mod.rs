//! Native scheduling of one iterator: one call for each batch.
//!
//! | file | about |
//! |---|---|
//! | `classes.rs` | the Python classes, one for each transport |
//! | `advance.rs` | from one batch to the next |
//! | `parent_end.rs` | the parent's end of a transport |
//! | `ahead.rs` | batches that are prepared before their turn |
//! | `following.rs` | the epoch that follows |
//! | `late.rs` | tasks that are late |
//! | `timed.rs` | what the recorder is told |
//! | `varying.rs` | a number of workers that changes |
//! | `joint.rs` | tasks that all workers share |

mod advance;
mod ahead;
mod classes;
mod following;
mod joint;
mod late;
pub(crate) mod parent_end;
mod timed;
mod varying;

use std::collections::VecDeque;
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
use ringloader_core::timing::MainWork;
use ringloader_core::transport::Transport;

pub(crate) use self::classes::{JointScheduler, Order, Positions, Scheduler, ThreadScheduler};

use self::ahead::Ahead;
use self::following::{Following, Reading};
use self::late::SentTasks;
use self::parent_end::{IndexOf, ParentEnd};
use self::timed::Made;
use crate::caught::caught;
use crate::gil::exception;
use crate::lock::{DetachedLock, Guard};
use crate::python::Callbacks;
use crate::sampling::source::IndexSource;
use crate::timing::Recorder;
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
    /// Notes how long batches take, where that is wanted; and the work that is done for a batch ahead of its turn.
    recorder: OnceLock<(Py<Recorder>, MainWork)>,
}

/// The state of an epoch, which the scheduler has under one lock.
struct EpochState<I> {
    core: Core,
    source: Py<IndexSource>,
    reading: Reading,
    /// The epoch that follows, once its first tasks may go out.
    following: Option<Following<I>>,
    /// Batches that were taken and not yet handed out, in their order.
    taken: VecDeque<Taken>,
    /// A batch that was to be handed out when an interrupt came, with its task and its worker. It is the next.
    interrupted: Option<((u64, u32), Py<PyAny>)>,
    /// The batch that was taken next, if there was no memory to keep it with the others.
    unqueued: Option<(Taken, Py<PyAny>)>,
    /// The end of a worker's iterable dataset, where that was found ahead of its turn. To end the worker then would
    /// change which worker gets which of the tasks that are sent until its turn.
    end_ahead: Option<End>,
    /// Workers whose end was taken and is stored until its turn.
    ends_stored: Vec<u32>,
    /// True if the indices of tasks are kept until their results have come: for errors of lateness, and for successors.
    keeps_sent: bool,
    /// The indices that are kept.
    sent: SentTasks<I>,
    /// The moments of results that came before this epoch began, for the recorder.
    early: Vec<(u64, Made)>,
    /// The time after which a wait for a batch is reported.
    watch: Option<Duration>,
}

impl<I> EpochState<I> {
    fn new(core: Core, source: Py<IndexSource>, keeps_sent: bool) -> Self {
        Self {
            core,
            source,
            reading: Reading::Open,
            following: None,
            taken: VecDeque::new(),
            interrupted: None,
            unqueued: None,
            end_ahead: None,
            ends_stored: Vec::new(),
            keeps_sent,
            sent: SentTasks::default(),
            early: Vec::new(),
            watch: None,
        }
    }

    /// Forgets the batches that this epoch has taken, and the epoch that follows. Returns the objects, for the caller
    /// to drop after the lock is released.
    fn forget(&mut self) -> impl Sized + use<I> {
        self.taken.clear();
        self.end_ahead = None;
        self.ends_stored.clear();
        self.early.clear();
        (self.interrupted.take(), self.unqueued.take(), self.following.take())
    }

    /// Returns the number of tasks that were sent and whose batches were not handed out.
    fn outstanding(&self) -> u64 {
        let taken = self.taken.len() + usize::from(self.unqueued.is_some());
        self.core.positions().2 + taken as u64 + u64::from(self.interrupted.is_some())
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

/// A batch that was taken and not yet handed out.
struct Taken {
    seq: u64,
    worker: u32,
    /// torch's `_rcvd_idx` before it.
    received: u64,
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
        let state = DetachedLock::new(EpochState::new(core, source, timeout.is_some()));
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
            recorder: OnceLock::new(),
        }
    }

    /// Returns the seconds for which calls for a batch have waited because none was there, in all epochs.
    fn waited(&self) -> f64 {
        Duration::from_nanos(self.waited.load(Ordering::Relaxed)).as_secs_f64()
    }

    /// Keeps the indices of tasks from now on, until their results have come.
    fn keep_sent(&self, py: Python<'_>) -> PyResult<()> {
        self.lock(py)?.keeps_sent = true;
        Ok(())
    }

    /// Begins a new epoch, with indices from `source`. What comes from the one before is thrown away.
    fn reset(&self, py: Python<'_>, source: Py<IndexSource>) -> PyResult<()> {
        let mut state = self.lock(py)?;
        state.core.reset();
        if let Ok(engine) = E::core(&self.engine) {
            engine.begin_epoch(state.core.epoch());
        }
        state.core.begin_at(source.get().first_worker());
        state.reading = Reading::Open;
        state.sent = SentTasks::default();
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
        if let Some((of, data)) = state.interrupted.take() {
            return self.hand_out(state, callbacks, of, data.into_bound(py));
        }
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
                        self.store_early(py, state.following.as_mut(), seq, found, unpack)?;
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
                } else if let Some(timed) = timed {
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
        let unqueued = state.unqueued.as_ref().map(|(taken, _)| taken);
        let first = state.taken.front().or(unqueued);
        let interrupted = u64::from(state.interrupted.is_some());
        let received = first.map_or(received, |first| first.received).saturating_sub(interrupted);
        Ok(Positions { sent, received, outstanding: state.outstanding() })
    }

    fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        if !self.process.is_current() {
            // A thread of the parent may have had the lock at the fork.
            return Ok(());
        }
        self.state.traverse(|state| {
            visit.call(state.interrupted.as_ref().map(|(_, data)| data))?;
            visit.call(state.unqueued.as_ref().map(|(_, data)| data))?;
            visit.call(state.following.as_ref().map(|following| following.source()))?;
            visit.call(&state.source)
        })?;
        self.ahead.traverse(|ahead| ahead.traverse(visit))
    }
}

const BUSY: &str = "this iterator is being advanced elsewhere at this moment";

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
