//! Detaches threads from the interpreter, checks signals, and turns errors into exceptions.

use std::sync::OnceLock;
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use pyo3::exceptions::{
    PyAssertionError, PyMemoryError, PyOSError, PyOverflowError, PyRuntimeError, PyValueError,
};
use pyo3::prelude::*;
use ringloader_core::Error;
use ringloader_core::process::{self, Process};
use ringloader_core::sync::{AtomicU64, Awaited};
use ringloader_core::transport::copier::stop_copies;
use ringloader_core::transport::engine::Engine;
use ringloader_core::transport::queues::Queues;

/// The exception for an error of the core.
pub(crate) fn exception(error: Error) -> PyErr {
    match error {
        Error::Os { errno, ref call, ref message } => {
            PyOSError::new_err((errno, format!("{call}: {message}")))
        }
        Error::Memory(what) => PyMemoryError::new_err(what),
        Error::Config(what) => PyValueError::new_err(what),
        Error::Inherited { .. } => PyAssertionError::new_err(error.to_string()),
        Error::Arrival { error, .. } => exception(*error),
        _ => PyRuntimeError::new_err(error.to_string()),
    }
}

/// The exception for bytes in shared memory that no correct peer writes.
#[cold]
pub(crate) fn corrupt(what: &str) -> PyErr {
    exception(Error::Corrupt(what.into()))
}

/// The exception where the process has no private memory for `len` bytes.
#[cold]
pub(crate) fn no_memory_for(len: u64) -> PyErr {
    exception(Error::allocation(len))
}

/// Runs `work` without the interpreter, then lets signal handlers run.
///
/// # Errors
/// The error of `work`, or the one that a signal handler raises: `KeyboardInterrupt`, usually.
pub(crate) fn detached<T: Send>(
    py: Python<'_>,
    work: impl FnOnce() -> ringloader_core::Result<T> + Send,
) -> PyResult<T> {
    let done = py.detach(work).map_err(exception)?;
    py.check_signals()?;
    Ok(done)
}

/// The fewest bytes whose copy is made without the interpreter.
pub(crate) const DETACH: usize = 1 << 20;

/// Returns true if other threads may run while `len` bytes are copied, so that their memory must be held. A copy of a few
/// keeps the interpreter lock; a free-threaded interpreter has none.
pub(crate) const fn runs_others(len: usize) -> bool {
    cfg!(Py_GIL_DISABLED) || len >= DETACH
}

/// Runs `work` without the interpreter. Short work only: nothing looks for signals, and the exit of the
/// interpreter waits for it.
pub(crate) fn without_interpreter<T: Send>(py: Python<'_>, work: impl FnOnce() -> T + Send) -> T {
    match Expected::new() {
        Some(_expected) => py.detach(work),
        None => work(),
    }
}

/// Runs a copy of `len` bytes, without the interpreter if that takes a while.
pub(crate) fn run_copy<T: Send>(py: Python<'_>, len: usize, copy: impl FnOnce() -> T + Send) -> T {
    if len < DETACH { copy() } else { without_interpreter(py, copy) }
}

/// Runs native `work` of a worker's thread that calls Python, but no code of the user's that may take long: the exit of
/// the interpreter waits for it. Once another thread ends the interpreter, this thread parks instead and never returns.
pub(crate) fn in_thread<T>(py: Python<'_>, work: impl FnOnce() -> T) -> T {
    let _expected = loop {
        match Expected::new() {
            Some(expected) => break expected,
            None => py.detach(park),
        }
    };
    work()
}

/// Never returns, where another thread ends the interpreter.
fn park() {
    while exits_elsewhere() {
        thread::sleep(LOOK);
    }
}

/// Counts this thread as one that the exit of the interpreter waits for. Take the count before the thread comes back to
/// the interpreter, and keep it until it has. If the exit has begun, the thread parks and never returns.
pub(crate) fn come_back() -> Expected {
    loop {
        match Expected::new() {
            Some(expected) => return expected,
            None => park(),
        }
    }
}

/// Our threads that the exit of the interpreter must wait for.
static EXPECTED: Awaited = Awaited::over(AtomicU64::new(0));

/// One of these threads, for as long as this lives.
#[must_use]
pub(crate) struct Expected(());

impl Expected {
    /// `None` once another thread ends the interpreter.
    fn new() -> Option<Self> {
        EXPECTED.enter(std::process::id(), exits_elsewhere).then_some(Self(()))
    }
}

impl Drop for Expected {
    fn drop(&mut self) {
        EXPECTED.leave(std::process::id());
    }
}

/// Waits for the engine's next event without the interpreter, then lets signal handlers run.
///
/// Once the interpreter is on its way out, a thread that asks for it back is ended in the middle of
/// this code, which aborts the process. So from then on only a [`wake`](Engine::wake), which
/// comes from a thread that still runs Python, ends the wait of another thread.
///
/// # Errors
/// The error of the engine, or the one that a signal handler raises.
pub(crate) fn wait(py: Python<'_>, engine: &Engine, only: Option<u32>, limit: Duration) -> PyResult<()> {
    detached(py, || {
        loop {
            engine.wait_for(only, limit)?;
            if !exits_elsewhere() || engine.is_woken() {
                return Ok(());
            }
        }
    })
}

/// The time for which a wait for another thread of this process may last without a check for signals.
pub(crate) const LOOK: Duration = Duration::from_millis(50);

/// Does what [`wait`] does, for replies that threads of this process send. Ends after [`LOOK`], even before `limit` and
/// with nothing there. Never returns once another thread ends the interpreter.
///
/// # Errors
/// As [`wait`].
pub(crate) fn wait_for_threads<I: Send + Sync, R: Send>(
    py: Python<'_>,
    queues: &Queues<I, R>,
    only: Option<u32>,
    limit: Duration,
) -> PyResult<()> {
    detached(py, || {
        queues.wait_for(only, limit.min(LOOK))?;
        Ok(come_back())
    })
    .map(drop)
}

/// Waits in a worker's thread for a request. Never returns once another thread ends the interpreter.
///
/// # Errors
/// The error of the queues.
pub(crate) fn wait_for_request<I: Send + Sync, R: Send>(
    py: Python<'_>,
    queues: &Queues<I, R>,
    worker: u32,
) -> PyResult<()> {
    let wait = || {
        queues.wait_for_request(worker, Duration::MAX)?;
        Ok(come_back())
    };
    py.detach(wait).map(drop).map_err(exception)
}

/// The thread that ends the interpreter, once it has begun to, and its process: a child that is forked meanwhile goes
/// on.
static EXITING: OnceLock<(&Process, ThreadId)> = OnceLock::new();

pub(crate) fn exits_elsewhere() -> bool {
    let elsewhere =
        |&(process, thread): &(&Process, ThreadId)| thread != thread::current().id() && process.is_current();
    EXITING.get().is_some_and(elsewhere)
}

/// Called when the interpreter begins to exit, by the thread that ends it. Returns once no other thread is in native
/// code of ours from which it has to come back to the interpreter, and no thread of ours writes to memory that goes
/// with the process.
#[pyfunction]
pub(crate) fn note_exit(py: Python<'_>) {
    let _ = EXITING.set((process::current(), thread::current().id()));
    while EXPECTED.count(std::process::id()) > 0 {
        py.detach(|| thread::sleep(Duration::from_millis(1)));
    }
    py.detach(stop_copies);
}

/// A moment that may never come.
#[derive(Clone, Copy)]
pub(crate) struct Deadline(Option<Instant>);

impl Deadline {
    /// `timeout` seconds from now; never for `None`.
    ///
    /// # Errors
    /// `ValueError` when it is negative or not a number; `OverflowError` when it is too large.
    pub(crate) fn after(timeout: Option<f64>) -> PyResult<Self> {
        let Some(seconds) = timeout else { return Ok(Self(None)) };
        let duration = Duration::try_from_secs_f64(seconds).map_err(|_| {
            if seconds > 0.0 {
                PyOverflowError::new_err(format!(
                    "'timeout' is more seconds than can be counted: {seconds}; leave it out to wait without a limit"
                ))
            } else {
                PyValueError::new_err(format!("'timeout' must be a non-negative number, not {seconds}"))
            }
        })?;
        Ok(Self(Instant::now().checked_add(duration)))
    }

    /// Returns the time that is left; `None` once the moment has passed.
    pub(crate) fn left(self) -> Option<Duration> {
        match self.0 {
            None => Some(Duration::MAX),
            Some(at) => at.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()),
        }
    }
}
