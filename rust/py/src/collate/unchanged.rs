//! Compares the parts of torch's `default_collate` with what they were.

use pyo3::prelude::*;
use pyo3::types::PyDict;

use super::fallback::{Part, are_in_place};

/// The parts of `default_collate`, kept to check that it still does what torch has made it do.
pub(super) struct Unchanged {
    parts: Vec<Part>,
    /// Functions that return how many modes of torch's have a say in what its other functions do.
    modes: Vec<Py<PyAny>>,
    /// The map that `default_collate` passes, which users may change, and what was in it.
    pub(super) fn_map: Py<PyDict>,
    torchs_fn_map: Py<PyDict>,
}

impl Unchanged {
    /// Keeps the parts as they are now.
    ///
    /// # Errors
    /// The error that copying the map raises.
    pub(super) fn new(parts: Vec<Part>, modes: Vec<Py<PyAny>>, fn_map: &Bound<'_, PyDict>) -> PyResult<Self> {
        Ok(Self { parts, modes, fn_map: fn_map.clone().unbind(), torchs_fn_map: fn_map.copy()?.unbind() })
    }

    /// Returns true if no part has changed, and no mode has a say.
    ///
    /// # Errors
    /// The error that asking raises.
    pub(super) fn holds(&self, py: Python<'_>) -> PyResult<bool> {
        for mode in &self.modes {
            if mode.bind(py).call0()?.is_truthy()? {
                return Ok(false);
            }
        }
        Ok(are_in_place(py, &self.parts)? && self.fn_map.bind(py).eq(&self.torchs_fn_map)?)
    }
}
