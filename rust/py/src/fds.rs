//! Descriptors that Python names by number.

use std::os::fd::{BorrowedFd, OwnedFd, RawFd};

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

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
