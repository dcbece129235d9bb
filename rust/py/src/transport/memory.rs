//! The memory of an engine, as Python classes: its descriptors, for a worker, and its slots, for a driver.

use std::os::fd::{AsRawFd, RawFd};

use pyo3::prelude::*;
use pyo3::types::PyDict;
use ringloader_core::transport::WorkerFds as CoreFds;
use ringloader_core::transport::slot_memory::{SlotMemory as CoreMemory, SlotWindow};

/// Numbers of descriptors, which stay those of the owner.
#[pyclass(frozen, get_all, module = "ringloader._native")]
pub(crate) struct WorkerFds {
    pub(super) segment: RawFd,
    pub(super) worker_eventfd: RawFd,
    pub(super) parent_eventfd: RawFd,
    pub(super) parent_pidfd: RawFd,
    pub(super) socket: RawFd,
}

#[pymethods]
impl WorkerFds {
    #[new]
    #[pyo3(signature = (*, segment, worker_eventfd, parent_eventfd, parent_pidfd, socket))]
    fn new(
        segment: RawFd,
        worker_eventfd: RawFd,
        parent_eventfd: RawFd,
        parent_pidfd: RawFd,
        socket: RawFd,
    ) -> Self {
        Self { segment, worker_eventfd, parent_eventfd, parent_pidfd, socket }
    }

    /// By name, as the constructor takes them.
    fn as_dict<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let fds = PyDict::new(py);
        fds.set_item("segment", self.segment)?;
        fds.set_item("worker_eventfd", self.worker_eventfd)?;
        fds.set_item("parent_eventfd", self.parent_eventfd)?;
        fds.set_item("parent_pidfd", self.parent_pidfd)?;
        fds.set_item("socket", self.socket)?;
        Ok(fds)
    }
}

impl WorkerFds {
    /// `None` once the worker has them.
    pub(super) fn of(fds: &CoreFds<'_>) -> Option<Self> {
        let socket = fds.socket.as_ref()?.as_raw_fd();
        Some(Self {
            segment: fds.segment.as_raw_fd(),
            worker_eventfd: fds.worker_eventfd.as_raw_fd(),
            parent_eventfd: fds.parent_eventfd.as_raw_fd(),
            parent_pidfd: fds.parent_pidfd.as_raw_fd(),
            socket,
        })
    }
}

/// The slots of an engine, and of later engines that take over its memory, by their addresses.
///
/// Registered memory stays mapped, also when the engine is closed, until the caller says that nothing is registered.
#[pyclass(frozen, module = "ringloader._native")]
pub(crate) struct SlotMemory(CoreMemory);

impl SlotMemory {
    pub(crate) fn new(core: CoreMemory) -> Self {
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
        self.0.window_of(address).map(|SlotWindow { address, touched, .. }| (address, touched))
    }

    /// Notes that a driver is about to register `nbytes` bytes from a window's start, or has unregistered them (0).
    /// False where the driver must not: the slot is not held, is smaller, or its worker would have too little left.
    fn set_registered(&self, address: usize, nbytes: u64) -> bool {
        self.0.set_registered(address, nbytes)
    }
}
