//! The transport between threads, as a Python class: the parent's end, and the workers'.

use std::sync::{Mutex, PoisonError};

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use ringloader_core::sync::Arc;
use ringloader_core::transport::Transport;
use ringloader_core::transport::message::{ResultKind, TaskIndex};
use ringloader_core::transport::queues::{Queues, Reply, Request};

use super::messages::{Event, Unsaid, WorkerEnded};
use crate::gil::{Deadline, exception, in_thread, wait_for_request, wait_for_threads};
use crate::index::codec::{decode_index, encode_index, pair};
use crate::objects;
use crate::python;
use crate::torch::names::Torch;

pub(crate) type Core = Queues<Index, Py<PyAny>>;

/// What a task asks for.
pub(crate) enum Index {
    /// An index of plain numbers, or of `None`.
    Plain(TaskIndex),
    /// Any other: the sampler's own object. Or a whole message of torch's protocol.
    Object(Py<PyAny>),
}

/// Tasks to the threads that are workers, and their results back. The same object is both ends.
#[pyclass(frozen, module = "ringloader._native")]
pub(crate) struct ThreadQueues {
    /// `None` once it is closed.
    core: Mutex<Option<Arc<Core>>>,
    unsaid: Unsaid,
}

#[pymethods]
impl ThreadQueues {
    #[new]
    fn new(py: Python<'_>, workers: u32) -> PyResult<Self> {
        Torch::get(py)?;
        python::load(py)?;
        Ok(Self { core: Mutex::new(Some(Arc::new(Core::new(workers)))), unsaid: Unsaid::default() })
    }

    /// Sends one message of torch's protocol to a worker: `None`, `(index of the task, index)`, or any object.
    fn put(&self, worker: u32, message: &Bound<'_, PyAny>) -> PyResult<()> {
        let request = if message.is_none() {
            Request::End
        } else if let Some((seq, index)) = pair(message)? {
            let plain = encode_index(&index)?;
            let index = plain.map_or_else(|| Index::Object(index.unbind()), Index::Plain);
            Request::Task { seq: seq as u64, index }
        } else {
            Request::Object(Index::Object(message.clone().unbind()))
        };
        self.core()?.put(worker, request).map_err(exception)
    }

    /// Waits for the next result: a message of torch's protocol, `(index of the task, batch)`.
    ///
    /// None when the time is over or `wake` was called.
    fn next<'py>(&self, py: Python<'py>, timeout: Option<f64>) -> PyResult<Option<Event<'py>>> {
        let deadline = Deadline::after(timeout)?;
        let core = self.core()?;
        if let Some(message) = self.unsaid.take(py)? {
            return Ok(Some(Event::Message(message)));
        }
        loop {
            if let Some(Reply { seq, kind, content }) = core.try_next().map_err(exception)? {
                let content = content.into_bound(py);
                return Ok(Some(Event::Message(match kind {
                    ResultKind::Batch => self.unsaid.message(py, seq as i64, content)?,
                    ResultKind::Object => content,
                })));
            }
            if let Some(worker) = core.take_ended() {
                return Ok(Some(Event::WorkerEnded(WorkerEnded::new(worker))));
            }
            if core.take_wake().map_err(exception)? {
                return Ok(None);
            }
            let Some(left) = deadline.left() else { return Ok(None) };
            wait_for_threads(py, &core, None, left)?;
            // Closed meanwhile.
            self.core()?;
        }
    }

    /// Ends the wait of a thread that is in `next`.
    fn wake(&self) -> PyResult<()> {
        self.core()?.wake().map_err(exception)
    }

    /// Results that are there and not yet taken.
    fn committed(&self) -> PyResult<u64> {
        Ok(self.core()?.counts().map_err(exception)?.0 + u64::from(self.unsaid.is_some()))
    }

    /// Tells the workers that nothing more is wanted.
    fn set_done(&self) -> PyResult<()> {
        self.core()?.set_done().map_err(exception)
    }

    /// Whether `set_done` or `close` was called.
    pub(crate) fn is_done(&self) -> bool {
        self.core().map_or(true, |core| core.is_done().unwrap_or(true))
    }

    /// Drops what is in the queues. Workers find the end there. Calling it again does nothing.
    fn close(&self) -> PyResult<()> {
        let core = self.core.lock().unwrap_or_else(PoisonError::into_inner).take();
        // Behind the lock: what is dropped may run any code.
        core.map_or(Ok(()), |core| core.close().map(drop).map_err(exception))
    }

    /// Batches that the workers have made.
    fn counters(&self) -> PyResult<Vec<(&'static str, u64)>> {
        Ok(vec![("batches", self.core()?.counts().map_err(exception)?.1)])
    }

    /// In a worker: waits for its next message of torch's protocol. None is the end.
    fn get<'py>(&self, py: Python<'py>, worker: u32) -> PyResult<Option<Bound<'py, PyAny>>> {
        loop {
            // Not kept over the end of a wait: closed, it is gone.
            let Ok(core) = self.core() else { return Ok(None) };
            match core.take_request(worker).map_err(exception)? {
                Some(Request::End) => return Ok(None),
                Some(Request::Object(index)) => return index.decode(py).map(Some),
                Some(Request::Task { seq, index }) => {
                    // New objects may set off the collector, and that finalisers.
                    return in_thread(py, || {
                        let seq = objects::int(py, seq as i64)?.into_any();
                        Ok(Some(objects::arguments(py, [seq, index.decode(py)?])?.into_any()))
                    });
                }
                None => wait_for_request(py, &core, worker)?,
            }
        }
    }

    /// In a worker: sends a message of torch's protocol. After the end it goes nowhere.
    fn reply(&self, worker: u32, message: &Bound<'_, PyAny>) -> PyResult<()> {
        let reply = match pair(message)? {
            Some((seq, data)) => Reply { seq: seq as u64, kind: ResultKind::Batch, content: data.unbind() },
            None => Reply { seq: 0, kind: ResultKind::Object, content: message.clone().unbind() },
        };
        let Ok(core) = self.core() else { return Ok(()) };
        core.reply(worker, reply).map(drop).map_err(exception)
    }

    /// In a worker, at its end.
    fn note_end(&self, worker: u32) -> PyResult<()> {
        let Ok(core) = self.core() else { return Ok(()) };
        core.note_end(worker).map_err(exception)
    }
}

impl Index {
    pub(crate) fn decode<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        match self {
            Self::Plain((kind, bytes)) => decode_index(py, *kind, bytes),
            Self::Object(object) => Ok(object.bind(py).clone()),
        }
    }

    pub(crate) fn kept(&self, py: Python<'_>) -> Self {
        match self {
            Self::Plain(plain) => Self::Plain(plain.clone()),
            Self::Object(object) => Self::Object(object.clone_ref(py)),
        }
    }
}

impl ThreadQueues {
    pub(crate) fn core(&self) -> PyResult<Arc<Core>> {
        let core = self.core.lock().unwrap_or_else(PoisonError::into_inner).clone();
        core.ok_or_else(|| PyRuntimeError::new_err("this iterator was shut down"))
    }
}
