//! The transport between threads, as a Python class: the parent's end, and the workers'.

use std::sync::OnceLock;

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use ringloader_core::sync::{Arc, Lock};
use ringloader_core::timing::Stamps;
use ringloader_core::transport::message::ResultKind;
use ringloader_core::transport::queues::{Queues, Reply, Request};
use ringloader_core::transport::run_times::TimedRun;

use super::claimed::{Claimed, Index};
use crate::gil::{exception, in_thread, wait_for_request};
use crate::objects;
use crate::python;
use crate::sampling::codec::{encode_index, pair};
use crate::timing::WorkerClock;
use crate::torch::names::Torch;

pub(crate) type Core = Queues<Index, Made>;

/// The object that a worker has made.
pub(crate) struct Made {
    pub(crate) object: Py<PyAny>,
    /// The worker, and the batch's moments there, where they are noted.
    pub(crate) stamps: Option<Box<(u32, Stamps)>>,
    /// The runs of a batch that all workers have made, where their moments are noted.
    pub(crate) runs: Vec<TimedRun>,
}

impl Made {
    fn plain(object: Py<PyAny>) -> Self {
        Self { object, stamps: None, runs: Vec::new() }
    }
}

/// Tasks to the threads that are workers, and their results back. The same object is both ends.
#[pyclass(frozen, module = "ringloader._native")]
pub(crate) struct ThreadQueues {
    /// `None` once it is closed.
    core: Lock<Option<Arc<Core>>>,
    /// For each worker, notes the moments of each batch, where that is wanted.
    clocks: OnceLock<Vec<Py<WorkerClock>>>,
    /// By worker: the runs of the batch that it collates, where their moments are noted.
    runs: Lock<Vec<Vec<TimedRun>>>,
}

#[pymethods]
impl ThreadQueues {
    #[new]
    fn new(py: Python<'_>, workers: u32) -> PyResult<Self> {
        Torch::get(py)?;
        python::load(py)?;
        let core = Lock::new(Some(Arc::new(Core::new(workers))));
        Ok(Self { core, clocks: OnceLock::new(), runs: Lock::new(vec![Vec::new(); workers as usize]) })
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
        let _ = self.clocks.set(clocks);
    }

    /// Lets all workers share all tasks from now on, of which `places` are under way at a time. `cuts`: each makes some of
    /// a task's samples, of which `get` then gives a `Claimed`.
    fn share_tasks(&self, places: u32, cuts: bool) -> PyResult<()> {
        self.core()?.share_tasks(places, cuts.then_some(samples_of)).map_err(exception)
    }

    /// In a worker: notes the seconds that the samples of a run took.
    fn note_time(&self, run: &Claimed, seconds: f64) -> PyResult<()> {
        let Ok(core) = self.core() else { return Ok(()) };
        let samples = run.__len__().max(1) as f64;
        core.note_time((seconds * 1e9 / samples) as u64).map_err(exception)
    }

    /// In a worker: gives the run's samples to the thread that will collate; None: they are not for others. Returns
    /// whether the caller answers for the batch.
    fn finish(&self, worker: u32, run: &Claimed, samples: Option<Py<PyAny>>) -> PyResult<bool> {
        // A whole batch has moments of its own.
        let clock = self.clock(worker).filter(|_| !run.core.is_whole());
        let made = samples.map(|samples| {
            let stamps = clock.map(|clock| Box::new((worker, clock.run_sent())));
            Made { stamps, ..Made::plain(samples) }
        });
        let is_noted = made.is_some();
        let Ok(core) = self.core() else { return Ok(false) };
        let is_last = core.finish(worker, &run.core, made).map_err(exception)?;
        if let Some(clock) = clock.filter(|_| is_last && is_noted) {
            clock.note_last();
        }
        Ok(is_last)
    }

    /// In a worker: takes the samples of all runs of a batch, run by run; None if some are not there.
    fn parts(&self, worker: u32, run: &Claimed) -> PyResult<Option<Vec<Py<PyAny>>>> {
        let Ok(core) = self.core() else { return Ok(None) };
        let Some(made) = core.take_parts(&run.core).map_err(exception)? else { return Ok(None) };
        let mut runs = Vec::new();
        let mut parts = Vec::new();
        for (number, Made { object, stamps, .. }) in (0..).zip(made) {
            parts.push(object);
            runs.extend(stamps.map(|made| TimedRun {
                worker: made.0,
                stamps: made.1,
                samples: run.core.samples_of(number),
            }));
        }
        if !runs.is_empty() {
            self.runs_of(worker, |kept| *kept = runs);
        }
        Ok(Some(parts))
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
            match core.take_request(worker).map_err(exception)? {
                Some(Request::End) => return Ok(None),
                Some(Request::Object(index) | Request::Epoch { message: index, .. }) => {
                    return index.decode(py).map(Some);
                }
                Some(Request::Task { seq, index }) => {
                    if let Some(clock) = self.clock(worker) {
                        clock.note_task();
                    }
                    // New objects may set off the collector, and that finalisers.
                    return in_thread(py, || {
                        let seq = objects::int(py, seq as i64)?.into_any();
                        Ok(Some(objects::arguments(py, [seq, index.decode(py)?])?.into_any()))
                    });
                }
                None => {}
            }
            match core.take_run(worker).map_err(exception)? {
                Some(run) => {
                    if let Some(clock) = self.clock(worker) {
                        clock.note_task();
                    }
                    return in_thread(py, || Ok(Some(Bound::new(py, Claimed::new(run))?.into_any())));
                }
                None => wait_for_request(py, &core, worker)?,
            }
        }
    }

    /// In a worker: sends a message of torch's protocol. After the end it goes nowhere.
    fn reply(&self, worker: u32, message: &Bound<'_, PyAny>) -> PyResult<()> {
        let (reply, is_batch) = match pair(message)? {
            Some((seq, data)) => {
                let is_batch = !Torch::get(data.py())?.is_notice(&data)?;
                let stamps = self.clock(worker).map(|clock| {
                    clock.note_made();
                    Box::new((worker, clock.note_sent()))
                });
                let runs = stamps.as_ref().map(|_| self.runs_of(worker, std::mem::take)).unwrap_or_default();
                let content = Made { object: data.unbind(), stamps, runs };
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

fn samples_of(index: &Index) -> u64 {
    match index {
        Index::Placed(_, places) => places.len(),
        Index::Plain(_) | Index::Object(_) => 1,
    }
}

impl ThreadQueues {
    fn runs_of<T>(&self, worker: u32, with: impl FnOnce(&mut Vec<TimedRun>) -> T) -> T {
        with(&mut self.runs.lock()[worker as usize])
    }

    fn clock(&self, worker: u32) -> Option<&WorkerClock> {
        self.clocks.get()?.get(worker as usize).map(Py::get)
    }

    pub(crate) fn core(&self) -> PyResult<Arc<Core>> {
        let core = self.core.lock().clone();
        core.ok_or_else(|| PyRuntimeError::new_err("this iterator was shut down"))
    }
}
