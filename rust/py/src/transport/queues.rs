//! The transport between threads, as a Python class: the parent's end, and the workers'.

use pyo3::prelude::*;
use pyo3::types::PyTuple;
use ringloader_core::sync::{Arc, Lock};
use ringloader_core::transport::message::ResultKind;
use ringloader_core::transport::queues::{Reply, Request};

use super::claimed::{Claimed, Core, Index, Made};
use super::engine::shut_down;
use crate::gil::{exception, in_thread, wait_for_request};
use crate::python;
use crate::sampling::codec::{encode_index, pair};
use crate::timing::{ThreadClocks, WorkerClock};
use crate::torch::names::Torch;

/// Tasks to the threads that are workers, and their results back. The same object is both ends.
#[pyclass(frozen, module = "ringloader._native")]
pub(crate) struct ThreadQueues {
    /// `None` once it is closed.
    core: Lock<Option<Arc<Core>>>,
    times: ThreadClocks,
}

#[pymethods]
impl ThreadQueues {
    #[new]
    fn new(py: Python<'_>, workers: u32) -> PyResult<Self> {
        Torch::get(py)?;
        python::load(py)?;
        let core = Lock::new(Some(Arc::new(Core::new(workers))));
        Ok(Self { core, times: ThreadClocks::new(workers) })
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

    /// Sends a worker the message that begins an epoch, where all workers share all tasks. `number`: the epoch in the
    /// numbers of its tasks.
    fn begin(&self, worker: u32, message: Py<PyAny>, number: u64) -> PyResult<()> {
        let message = Index::Object(message);
        self.core()?.put(worker, Request::Epoch { number, message }).map_err(exception)
    }

    /// Lets `clocks`, one for each worker, note the moments of each batch from now on. The moments travel with the
    /// batch.
    fn time(&self, clocks: Vec<Py<WorkerClock>>) {
        self.times.set(clocks);
    }

    /// Lets all workers share all tasks from now on, of which `places` are under way at a time. `cuts`: each makes some of
    /// a task's samples, of which `get` then gives a `Claimed`.
    fn share_tasks(&self, places: u32, cuts: bool) -> PyResult<()> {
        self.core()?.share_tasks(places, cuts.then_some(Index::samples)).map_err(exception)
    }

    /// In a worker: notes the seconds that the samples of a run took.
    fn note_time(&self, run: &Claimed, seconds: f64) -> PyResult<()> {
        let Ok(core) = self.core() else { return Ok(()) };
        run.note_time(&core, seconds)
    }

    /// In a worker: gives the run's samples to the thread that will collate; None: they are not for others. Returns
    /// whether the caller answers for the batch.
    fn finish(&self, worker: u32, run: &Claimed, samples: Option<Py<PyAny>>) -> PyResult<bool> {
        let Ok(core) = self.core() else { return Ok(false) };
        run.finish(&core, &self.times, worker, samples)
    }

    /// In a worker: takes the samples of all runs of a batch, run by run; None if some are not there.
    fn parts(&self, worker: u32, run: &Claimed) -> PyResult<Option<Vec<Py<PyAny>>>> {
        let Ok(core) = self.core() else { return Ok(None) };
        run.parts(&core, &self.times, worker)
    }

    /// Tells the workers that nothing more is wanted.
    fn set_done(&self) -> PyResult<()> {
        self.core()?.set_done().map_err(exception)
    }

    /// Returns true if `set_done` or `close` was called.
    pub(crate) fn is_done(&self) -> bool {
        self.core().map_or(true, |core| core.is_done().unwrap_or(true))
    }

    /// Drops what is in the queues. Workers find the end there. Calling it again does nothing.
    fn close(&self) -> PyResult<()> {
        let core = self.core.lock().take();
        // After the lock is released, because the drop may run any code.
        core.map_or(Ok(()), |core| core.close().map(drop).map_err(exception))
    }

    /// Counts the batches of another epoch from now on.
    fn begin_epoch(&self) -> PyResult<()> {
        self.core()?.begin_epoch().map_err(exception)
    }

    /// Batches that the workers have made in this epoch.
    fn counters(&self) -> PyResult<Vec<(&'static str, u64)>> {
        Ok(vec![("batches", self.core()?.counts().map_err(exception)?.1)])
    }

    /// In a worker: waits for its next message of torch's protocol. None is the end.
    fn get<'py>(&self, py: Python<'py>, worker: u32) -> PyResult<Option<Bound<'py, PyAny>>> {
        loop {
            // Looked up after each wait, because the queues may have been closed meanwhile.
            let Ok(core) = self.core() else { return Ok(None) };
            if let Some(message) = message_of(py, &core, worker, || self.begin_task(worker))? {
                return Ok(Some(message).filter(|message| !message.is_none()));
            }
            match core.take_run(worker).map_err(exception)? {
                Some(run) => {
                    self.times.note_task(worker);
                    return in_thread(py, || Ok(Some(Bound::new(py, Claimed::new(run))?.into_any())));
                }
                None => wait_for_request(py, &core, worker)?,
            }
        }
    }

    /// As `get`, for a message that is taken before its turn, in a tuple. Never waits. `begin_task` notes its turn.
    fn ahead<'py>(&self, py: Python<'py>, worker: u32) -> PyResult<Option<Bound<'py, PyTuple>>> {
        let found = match self.core() {
            Ok(core) => message_of(py, &core, worker, || ())?,
            Err(_) => Some(py.None().into_bound(py)),
        };
        found.map(|message| PyTuple::new(py, [message])).transpose()
    }

    /// In a worker: notes that the turn of a task has come.
    fn begin_task(&self, worker: u32) {
        self.times.note_task(worker);
    }

    /// In a worker: sends a message of torch's protocol. After the end it goes nowhere.
    fn reply(&self, worker: u32, message: &Bound<'_, PyAny>) -> PyResult<()> {
        let (reply, is_batch) = match pair(message)? {
            Some((seq, data)) => {
                let is_batch = !Torch::get(data.py())?.is_notice(&data)?;
                let content = Made { object: data.unbind(), times: self.times.sent(worker) };
                (Reply { seq: seq as u64, kind: ResultKind::Batch, content }, is_batch)
            }
            None => {
                let content = Made::plain(message.clone().unbind());
                (Reply { seq: 0, kind: ResultKind::Object, content }, false)
            }
        };
        let Ok(core) = self.core() else { return Ok(()) };
        core.reply(worker, reply, is_batch).map(drop).map_err(exception)
    }

    /// Notes that another thread is to run as a worker that has ended and owed nothing. `epoch`: the one that it begins
    /// with, in the numbers of its tasks.
    fn begin_worker(&self, worker: u32, epoch: u64) -> PyResult<()> {
        self.core()?.begin_worker(worker, epoch).map_err(exception)
    }

    /// In a worker: notes that the worker ends.
    fn note_end(&self, worker: u32) -> PyResult<()> {
        let Ok(core) = self.core() else { return Ok(()) };
        core.record_end(worker).map_err(exception)
    }
}

/// Returns a worker's next message, if one has come; `None` of Python's at the end. Calls `note` for a task.
fn message_of<'py>(
    py: Python<'py>,
    core: &Core,
    worker: u32,
    note: impl FnOnce(),
) -> PyResult<Option<Bound<'py, PyAny>>> {
    match core.take_request(worker).map_err(exception)? {
        Some(Request::End) => Ok(Some(py.None().into_bound(py))),
        Some(Request::Object(index) | Request::Epoch { message: index, .. }) => index.decode(py).map(Some),
        Some(Request::Task { seq, index }) => {
            note();
            // New objects may set off the collector, and that finalisers.
            in_thread(py, || Ok(Some((seq, index.decode(py)?).into_pyobject(py)?.into_any())))
        }
        None => Ok(None),
    }
}

impl ThreadQueues {
    pub(crate) fn core(&self) -> PyResult<Arc<Core>> {
        let core = self.core.lock().clone();
        core.ok_or_else(shut_down)
    }
}
