//! The slots of an engine as memory that a driver may register, as a Python class.

use pyo3::prelude::*;
use ringloader_core::transport::slot_memory::{SlotMemory as Core, Window};

/// The slots of an engine, and of those that have its memory after it, by their addresses.
///
/// What is registered stays mapped, also when the engine is closed, until it is said that nothing is.
#[pyclass(frozen, module = "ringloader._native")]
pub(crate) struct SlotMemory(Core);

impl SlotMemory {
    pub(crate) fn new(core: Core) -> Self {
        Self(core)
    }
}

#[pymethods]
impl SlotMemory {
    /// Whether this process is a forked child of the one that has the memory.
    fn is_inherited(&self) -> bool {
        self.0.is_inherited()
    }

    /// Where the window begins that an address lies in, and how many bytes of it are backed by memory.
    fn window_of(&self, address: usize) -> Option<(usize, u64)> {
        self.0.window_of(address).map(|Window { address, touched, .. }| (address, touched))
    }

    /// Says that a driver is about to register so many bytes from a window's start, or has unregistered them (0). False
    /// where it must not: the slot is not held, does not have so many, or its worker would have too few left.
    fn set_registered(&self, address: usize, nbytes: u64) -> bool {
        self.0.set_registered(address, nbytes)
    }

    /// Where windows begin that are registered, with the bytes that are.
    fn registered_windows(&self) -> Vec<(usize, u64)> {
        let windows = self.0.registered_windows();
        windows.into_iter().map(|Window { address, registered, .. }| (address, registered)).collect()
    }
}
