//! The descriptors that a worker needs, as a Python class.

use std::os::fd::{AsRawFd, RawFd};

use pyo3::prelude::*;
use pyo3::types::PyDict;
use ringloader_core::transport::WorkerFds as CoreFds;

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
