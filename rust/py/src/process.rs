//! This process: the calls of a program that forks, its identity, its memory, its descriptors.

use std::os::fd::{AsFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Duration;

use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use ringloader_core::os::parent_death;
use ringloader_core::process;

use crate::gil::exception;

/// Called before each fork, by the thread that forks.
#[pyfunction]
pub(crate) fn before_fork() {
    process::before_fork();
}

/// Called after the fork, by the same thread.
#[pyfunction]
pub(crate) fn after_fork_in_parent() {
    process::after_fork_in_parent();
}

/// Called in the child, after the fork.
#[pyfunction]
pub(crate) fn after_fork_in_child() {
    process::after_fork_in_child();
}

/// Makes the system kill this process half a second after the end of the parent, whose pidfd this is, unless the
/// process has ended by then. `OSError`: the system cannot do it.
#[pyfunction]
pub(crate) fn end_with_parent(pidfd: RawFd) -> PyResult<()> {
    parent_death::end_with(duplicate(pidfd)?.as_fd(), None, Duration::from_millis(500)).map_err(exception)
}

/// A number that is this process's alone, also where process ids are the same: in another pid namespace.
#[pyfunction]
pub(crate) fn process_identity() -> u64 {
    process::current().identity()
}

/// Bytes of memory that the machine and the control group have left.
#[pyfunction]
pub(crate) fn available_memory() -> u64 {
    ringloader_core::os::memory::MemoryProbe::new().available().bytes
}

/// Returns true if the system takes shared memory back before the process that made it ends.
#[pyfunction]
pub(crate) fn takes_shared_memory_back() -> bool {
    ringloader_core::os::segment::takes_pages_back()
}

/// Kills this process when a piece of its work takes longer than `seconds`, after the word 1 was written at `offset` of
/// the file `fd`. `OSError`: no thread can start.
#[pyclass(frozen, module = "ringloader._native")]
pub(crate) struct Deadline(process::deadline::Deadline);

#[pymethods]
impl Deadline {
    #[new]
    fn new(fd: RawFd, offset: u64, seconds: f64) -> PyResult<Self> {
        let limit =
            Duration::try_from_secs_f64(seconds).map_err(|error| PyValueError::new_err(error.to_string()))?;
        let made = process::deadline::Deadline::new(duplicate(fd)?, offset, limit);
        Ok(Self(made.map_err(exception)?))
    }

    /// A piece of work begins.
    fn begin(&self) {
        self.0.begin();
    }

    /// The piece of work that began last is done.
    fn end(&self) {
        self.0.end();
    }
}

/// A descriptor that is closed by `close`, or when nothing refers to it.
///
/// It is opened and owned in one call: a signal handler that raises runs before it or after it, so nothing is lost.
#[pyclass(frozen, weakref, module = "ringloader._native")]
pub(crate) struct OwnFd(AtomicI32);

const CLOSED: RawFd = -1;

#[pymethods]
impl OwnFd {
    /// A new file in memory, without a name but in `/proc`. Children do not inherit it over `exec`.
    ///
    /// # Errors
    /// `OSError` when the system refuses.
    #[staticmethod]
    fn memory(name: &str) -> PyResult<Self> {
        Ok(Self::from(ringloader_core::os::memfd(name).map_err(exception)?))
    }

    /// A descriptor of our own for `fd`, one of the caller's.
    #[staticmethod]
    fn duplicate(fd: RawFd) -> PyResult<Self> {
        Ok(Self::from(duplicate(fd)?))
    }

    /// The descriptor; -1 when it is closed.
    #[getter]
    fn fd(&self) -> RawFd {
        self.0.load(Ordering::Relaxed)
    }

    fn close(&self) {
        drop(self.take());
    }

    /// The descriptor, which is the caller's from now on; -1 when it is closed.
    fn detach(&self) -> RawFd {
        self.take().map_or(CLOSED, IntoRawFd::into_raw_fd)
    }
}

impl From<OwnedFd> for OwnFd {
    fn from(fd: OwnedFd) -> Self {
        Self(AtomicI32::new(fd.into_raw_fd()))
    }
}

impl OwnFd {
    fn take(&self) -> Option<OwnedFd> {
        // ORDERING: one word, and nothing goes with it. Who swaps the number out is the only one that has it.
        let fd = self.0.swap(CLOSED, Ordering::Relaxed);
        // SAFETY: the number came from an `OwnedFd`, and only one swap returns it.
        (fd != CLOSED).then(|| unsafe { OwnedFd::from_raw_fd(fd) })
    }
}

impl Drop for OwnFd {
    fn drop(&mut self) {
        self.close();
    }
}

/// A descriptor of our own for `fd`, one of the caller's.
///
/// # Errors
/// `RuntimeError` for a negative number; `OSError` when it is not open, or too many are.
pub(crate) fn duplicate(fd: RawFd) -> PyResult<OwnedFd> {
    if fd < 0 {
        return Err(PyRuntimeError::new_err(format!("{fd} is no file descriptor")));
    }
    // SAFETY: not -1, and only borrowed for the call, which fails for a number that is no open descriptor.
    Ok(unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned()?)
}
