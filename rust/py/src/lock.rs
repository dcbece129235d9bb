//! A lock for what calls Python while it is held: threads wait for it without the interpreter.

use std::ops::{Deref, DerefMut};
use std::sync::Condvar;
use std::thread::{self, ThreadId};
use std::time::{Duration, Instant};

use pyo3::PyTraverseError;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use ringloader_core::sync::Lock;

use crate::gil::{LOOK, come_back, detached};

/// Takes its value out while it is held. The thread that holds it cannot take it again: below a signal handler, or a
/// finaliser, that is an error.
pub(crate) struct DetachedLock<T> {
    state: Lock<LockState<T>>,
    released: Condvar,
}

enum LockState<T> {
    Free(Box<T>),
    /// `awaited`: another thread waits for it. To wake takes a system call, also where no thread waits.
    Held {
        by: ThreadId,
        awaited: bool,
    },
}

/// The value, put back when dropped.
pub(crate) struct Guard<'a, T> {
    lock: &'a DetachedLock<T>,
    value: Option<Box<T>>,
}

impl<T: Send> DetachedLock<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { state: Lock::new(LockState::Free(Box::new(value))), released: Condvar::new() }
    }

    /// # Errors
    /// `RuntimeError` with the text `held` when this thread holds it; what a signal handler raises meanwhile.
    pub(crate) fn lock(&self, py: Python<'_>, held: &'static str) -> PyResult<Guard<'_, T>> {
        self.lock_unless_held(py)?.ok_or_else(|| PyRuntimeError::new_err(held))
    }

    /// `None` when this thread holds it.
    ///
    /// # Errors
    /// The error that a signal handler raises meanwhile.
    pub(crate) fn lock_unless_held(&self, py: Python<'_>) -> PyResult<Option<Guard<'_, T>>> {
        self.lock_until(py, None)
    }

    /// `None` when this thread holds it, and when another one does for so long.
    ///
    /// # Errors
    /// The error that a signal handler raises meanwhile.
    pub(crate) fn lock_within(&self, py: Python<'_>, limit: Duration) -> PyResult<Option<Guard<'_, T>>> {
        self.lock_until(py, Some(Instant::now() + limit))
    }

    fn lock_until(&self, py: Python<'_>, until: Option<Instant>) -> PyResult<Option<Guard<'_, T>>> {
        let me = thread::current().id();
        loop {
            {
                let mut state = self.state.lock();
                match std::mem::replace(&mut *state, LockState::Held { by: me, awaited: false }) {
                    LockState::Free(value) => return Ok(Some(Guard { lock: self, value: Some(value) })),
                    held => *state = held,
                }
                if matches!(*state, LockState::Held { by, .. } if by == me) {
                    return Ok(None);
                }
            }
            if until.is_some_and(|until| Instant::now() >= until) {
                return Ok(None);
            }
            // Without the interpreter, for the other thread needs it. As with torch's, each gets a batch.
            let back = detached(py, || {
                self.wait();
                Ok(come_back())
            })?;
            drop(back);
        }
    }

    /// Shows the value to the garbage collector, unless it is held: then it stays.
    ///
    /// INVARIANT: the collector gets the same answer each time that it asks in one collection. To hold and to release
    /// takes the interpreter, which the collector has. A thread that has the mutex does not wait for the interpreter.
    ///
    /// # Errors
    /// The error of `show`.
    pub(crate) fn traverse(
        &self,
        show: impl FnOnce(&T) -> Result<(), PyTraverseError>,
    ) -> Result<(), PyTraverseError> {
        match &*self.state.lock() {
            LockState::Free(value) => show(value),
            LockState::Held { .. } => Ok(()),
        }
    }

    /// Until it is free, or for [`LOOK`].
    fn wait(&self) {
        let mut state = self.state.lock();
        if let LockState::Held { awaited, .. } = &mut *state {
            *awaited = true;
            drop(self.released.wait_timeout(state, LOOK));
        }
    }
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        self.value.as_ref().expect("only taken when dropped")
    }
}

impl<T> DerefMut for Guard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        self.value.as_mut().expect("only taken when dropped")
    }
}

impl<T> Drop for Guard<'_, T> {
    fn drop(&mut self) {
        if let Some(value) = self.value.take() {
            let held = std::mem::replace(&mut *self.lock.state.lock(), LockState::Free(value));
            if matches!(held, LockState::Held { awaited: true, .. }) {
                self.lock.released.notify_all();
            }
        }
    }
}
