//! The owner that keeps memory that torch moves, as a Python class.

use pyo3::prelude::*;

use crate::torch::deferred::Deferred;

/// Memory that torch has taken out of a storage, for as long as views of it may be left.
#[pyclass(module = "ringloader._native")]
pub(crate) struct Kept(Deferred);

#[pymethods]
impl Kept {
    /// Begins to collect what this thread's deleters would drop.
    #[new]
    fn new() -> Self {
        Self(Deferred::begin())
    }

    /// Collects no more. Whether there is anything to keep.
    fn finish(&mut self) -> bool {
        self.0.finish();
        !self.0.is_empty()
    }
}
