//! Tasks that all worker processes share: the parent's end, as a Python class.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use pyo3::prelude::*;
use ringloader_core::sync::{Arc, Lock};
use ringloader_core::transport::Transport;
use ringloader_core::transport::engine::Engine as CoreEngine;
use ringloader_core::transport::joint::{Joint, JointMemory, JointTasks};
use ringloader_core::transport::message::{ResultKind, TaskIndex};
use ringloader_core::transport::received::Received;
use ringloader_core::{Error, Result};

use super::engine::{Engine, shut_down};
use crate::gil::exception;
use crate::sampling::places::samples_of;

/// The parent's end of an engine whose workers share all tasks.
#[pyclass(frozen, module = "ringloader._native")]
pub(crate) struct JointEngine {
    pub(crate) engine: Py<Engine>,
    /// The tasks, and the descriptor of their bytes, for workers. `None` once it is closed.
    tasks: Lock<Option<(Arc<JointTasks>, OwnedFd)>>,
}

#[pymethods]
impl JointEngine {
    /// `places`: batches that may be under way. `window`: bytes of one, at most. `keeps_whole`: each batch is made by
    /// one worker. `timed`: runs are timed.
    #[new]
    fn new(
        engine: Py<Engine>,
        workers: u32,
        places: u32,
        window: u64,
        keeps_whole: bool,
        timed: bool,
    ) -> PyResult<Self> {
        let (memory, windows, bytes) = JointMemory::create(places, window, timed).map_err(exception)?;
        let windows = Arc::new(windows);
        engine.get().core()?.share_windows(windows.clone());
        let tasks = Arc::new(JointTasks::new(memory, windows, workers, keeps_whole));
        Ok(Self { engine, tasks: Lock::new(Some((tasks, bytes))) })
    }

    /// The descriptors of the memory, which stay this object's.
    fn fds(&self) -> PyResult<(RawFd, RawFd)> {
        match &*self.tasks.lock() {
            Some((tasks, bytes)) => {
                let words = tasks.memory().words_fd().map_err(exception)?;
                Ok((words.as_raw_fd(), bytes.as_raw_fd()))
            }
            None => Err(shut_down()),
        }
    }

    /// Gives back all memory that no batch of the user's lies in. Calling it again does nothing.
    fn close(&self) {
        // Unmapped after the lock is released.
        let tasks = self.tasks.lock().take();
        if let Some((tasks, _fd)) = tasks {
            tasks.close();
        }
    }
}

impl JointEngine {
    /// # Errors
    /// Once the engine is closed.
    pub(crate) fn core(&self) -> PyResult<Arc<JointTransport>> {
        let tasks = self.tasks.lock().as_ref().map(|(tasks, _)| tasks.clone()).ok_or_else(shut_down)?;
        Ok(Arc::new(JointTransport { engine: self.engine.get().core()?, tasks }))
    }
}

/// An engine whose workers share all tasks, as the scheduler uses it.
pub(crate) struct JointTransport {
    pub(crate) engine: Arc<CoreEngine>,
    pub(crate) tasks: Arc<JointTasks>,
}

impl JointTransport {
    /// Wakes a worker for each of `runs`.
    fn wake(&self, runs: u32) {
        if runs > 0 {
            self.engine.wake_workers(runs as usize);
        }
    }

    fn taken(&self, found: Result<Option<Received>>) -> Result<Option<Received>> {
        let answered = match &found {
            Ok(Some(received)) if received.kind == ResultKind::Batch => {
                Some((received.seq, received.backing().is_shared()))
            }
            Err(Error::Arrival { task, .. }) => task.map(|seq| (seq, false)),
            _ => None,
        };
        if let Some((seq, in_window)) = answered {
            self.wake(self.tasks.answered(seq, in_window)?);
        }
        found
    }
}

impl Transport for JointTransport {
    type Index = TaskIndex;
    type Received = Received;

    fn answered(received: &Received) -> (u64, ResultKind) {
        (received.seq, received.kind)
    }

    fn put_task(&self, _worker: u32, seq: u64, index: TaskIndex) -> Result<()> {
        let samples = samples_of(&index);
        self.wake(self.tasks.put(seq, index, samples)?);
        Ok(())
    }

    fn try_next(&self) -> Result<Option<Received>> {
        self.taken(self.engine.try_next())
    }

    fn try_next_of(&self, worker: u32) -> Result<Option<Received>> {
        self.taken(self.engine.try_next_of(worker))
    }

    fn peek_of(&self, worker: u32) -> Result<Option<(u64, ResultKind)>> {
        self.engine.peek_of(worker)
    }

    fn there_of(&self, worker: u32) -> Result<u64> {
        self.engine.there_of(worker)
    }

    fn take_ended(&self) -> Option<u32> {
        self.engine.take_ended()
    }

    fn begin_epoch(&self, epoch: u64) {
        self.tasks.begin_epoch(epoch);
        self.engine.wake_workers(usize::MAX);
    }

    fn lose(&self, worker: u32) {
        self.tasks.lose(worker);
        self.engine.wake_workers(usize::MAX);
    }

    fn joint(&self) -> Option<&dyn Joint> {
        Some(&*self.tasks)
    }
}
