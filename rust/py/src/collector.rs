//! Python's collector, off for a moment.

use std::marker::PhantomData;

use pyo3::ffi;
use pyo3::prelude::*;

/// Keeps the collector off, so that making an object runs no finalisers. Dropped, it leaves the collector as it was.
pub(crate) struct CollectorOff<'py> {
    was_on: bool,
    _attached: PhantomData<Python<'py>>,
}

impl<'py> CollectorOff<'py> {
    pub(crate) fn new(_py: Python<'py>) -> Self {
        // SAFETY: the interpreter is attached.
        let was_on = unsafe { ffi::PyGC_Disable() } != 0;
        Self { was_on, _attached: PhantomData }
    }
}

impl Drop for CollectorOff<'_> {
    fn drop(&mut self) {
        if self.was_on {
            // SAFETY: the interpreter is attached while `'py` lasts.
            unsafe { ffi::PyGC_Enable() };
        }
    }
}
