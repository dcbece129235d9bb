//! The slots of an engine, and the windows that its workers share, as a Python class, for a driver.

use pyo3::prelude::*;
use ringloader_core::transport::slot_memory::{SlotMemory as CoreMemory, SlotWindow};

/// The slots of an engine, and of later engines that take over its memory, and the windows that the engine's workers
/// share, by their addresses.
///
/// Registered memory stays mapped, also when the engine is closed, until the caller says that nothing is registered.
#[pyclass(frozen, module = "ringloader._native")]
pub(crate) struct SlotMemory(pub(super) CoreMemory);

#[pymethods]
impl SlotMemory {
    /// Returns true if this process is a forked child of the one that has the memory.
    fn is_inherited(&self) -> bool {
        self.0.is_inherited()
    }

    /// Returns the start of the window that an address lies in, and the number of its bytes that are backed by memory.
    fn window_of(&self, address: usize) -> Option<(usize, u64)> {
        self.0.window_of(address).map(|SlotWindow { address, touched, .. }| (address, touched))
    }

    /// Notes that a driver is about to register `nbytes` bytes from a window's start, or has unregistered them (0).
    /// False where the driver must not: the window is not held, is smaller, or its worker would have too little left.
    fn set_registered(&self, address: usize, nbytes: u64) -> bool {
        self.0.set_registered(address, nbytes)
    }
}
