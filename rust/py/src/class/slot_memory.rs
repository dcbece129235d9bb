//! The slots of an engine as memory that a driver may register, as a Python class.

use pyo3::prelude::*;
use ringloader_core::transport::slot_memory::{SlotMemory as Core, Window};

/// The slots of an engine, and of later engines that take over its memory, by their addresses.
///
/// Registered memory stays mapped, also when the engine is closed, until the caller says that nothing is registered.
#[pyclass(frozen, module = "ringloader._native")]
pub(crate) struct SlotMemory(Core);

impl SlotMemory {
    pub(crate) fn new(core: Core) -> Self {
        Self(core)
    }
}

#[pymethods]
impl SlotMemory {
    /// Returns true if this process is a forked child of the one that has the memory.
    fn is_inherited(&self) -> bool {
        self.0.is_inherited()
    }

    /// Returns the start of the window that an address lies in, and the number of its bytes that are backed by memory.
    fn window_of(&self, address: usize) -> Option<(usize, u64)> {
        self.0.window_of(address).map(|Window { address, touched, .. }| (address, touched))
    }

    /// Says that a driver is about to register so many bytes from a window's start, or has unregistered them (0). False
    /// where it must not: the slot is not held, does not have so many, or its worker would have too few left.
    fn set_registered(&self, address: usize, nbytes: u64) -> bool {
        self.0.set_registered(address, nbytes)
    }

    /// Returns the starts of the windows with registered bytes, and the numbers of these bytes.
    fn registered_windows(&self) -> Vec<(usize, u64)> {
        let windows = self.0.registered_windows();
        windows.into_iter().map(|Window { address, registered, .. }| (address, registered)).collect()
    }
}
