//! The times of batches, as Python classes: the moments of each where it is made, and the figures of an iterator's
//! epochs.

use std::sync::{MutexGuard, OnceLock};

use pyo3::exceptions::PyStopIteration;
use pyo3::prelude::*;
use pyo3::types::{IntoPyDict, PyDict, PyTuple};
use pyo3::{PyTraverseError, PyVisit};
use ringloader_core::os::clock::{monotonic, thread_cpu};
use ringloader_core::sync::{AtomicU64, Lock, Ordering};
use ringloader_core::timing::{EpochTimes, Event, Fetch, MainWork, Stamps, WorkerClock as CoreClock};
use ringloader_core::transport::run_times::TimedRun;

use crate::strings;

/// Notes the moments of one batch after another, in the thread that makes them.
#[pyclass(frozen, module = "ringloader._native")]
pub(crate) struct WorkerClock(Lock<CoreClock>);

#[pymethods]
impl WorkerClock {
    #[new]
    fn new() -> Self {
        Self(Lock::default())
    }

    /// The worker waits for its next task from now on.
    fn begin(&self) {
        self.core().begin(monotonic(), thread_cpu);
    }
}

impl WorkerClock {
    fn core(&self) -> MutexGuard<'_, CoreClock> {
        self.0.lock()
    }

    pub(crate) fn note_task(&self) {
        self.core().record_task(monotonic());
    }

    pub(crate) fn note_made(&self) {
        self.core().record_made(monotonic());
    }

    pub(crate) fn note_room(&self, time: u64) {
        self.core().record_room(time);
    }

    /// A run is made and sent. Returns its stamps.
    pub(crate) fn run_sent(&self) -> Stamps {
        self.core().run_sent(monotonic(), thread_cpu)
    }

    /// A run is made, which this worker has read for its batch. Returns its stamps, if they were not taken before.
    pub(crate) fn run_read(&self) -> Option<Stamps> {
        let mut core = self.core();
        let stamps = core.has_made().then(|| core.run_sent(monotonic(), thread_cpu));
        core.record_last();
        stamps
    }

    /// The worker has sent a run, and continues with its batch.
    pub(crate) fn note_last(&self) {
        self.core().record_last();
    }

    pub(crate) fn note_sent(&self) -> Stamps {
        self.core().sent(monotonic(), thread_cpu)
    }

    /// A batch is begun without a worker. Returns when.
    pub(crate) fn begin_here(&self) -> u64 {
        let now = monotonic();
        self.core().begin_here(now, thread_cpu);
        now
    }

    pub(crate) fn made_here(&self) -> Stamps {
        self.core().made_here(monotonic(), thread_cpu)
    }
}

/// The moments of a batch that a thread has made, where they are noted.
#[derive(Default)]
pub(crate) struct BatchTimes {
    /// The worker, and the batch's moments there.
    pub(crate) stamps: Option<Box<(u32, Stamps)>>,
    /// The runs of a batch that all workers have made.
    pub(crate) runs: Vec<TimedRun>,
}

/// Notes the moments of the batches that threads make, where that is wanted.
pub(crate) struct ThreadClocks {
    /// By worker.
    clocks: OnceLock<Vec<Py<WorkerClock>>>,
    /// By worker: the runs of the batch that it collates.
    runs: Lock<Vec<Vec<TimedRun>>>,
}

impl ThreadClocks {
    pub(crate) fn new(workers: u32) -> Self {
        Self { clocks: OnceLock::new(), runs: Lock::new(vec![Vec::new(); workers as usize]) }
    }

    /// Lets `clocks` note the moments from now on.
    pub(crate) fn set(&self, clocks: Vec<Py<WorkerClock>>) {
        let _ = self.clocks.set(clocks);
    }

    pub(crate) fn of(&self, worker: u32) -> Option<&WorkerClock> {
        self.clocks.get()?.get(worker as usize).map(Py::get)
    }

    /// The worker has a task.
    pub(crate) fn note_task(&self, worker: u32) {
        if let Some(clock) = self.of(worker) {
            clock.note_task();
        }
    }

    /// Keeps the runs of the batch that the worker collates.
    pub(crate) fn keep_runs(&self, worker: u32, runs: Vec<TimedRun>) {
        self.runs.lock()[worker as usize] = runs;
    }

    /// The worker has made a batch and sends it. Returns its moments.
    pub(crate) fn sent(&self, worker: u32) -> BatchTimes {
        let Some(clock) = self.of(worker) else { return BatchTimes::default() };
        clock.note_made();
        let stamps = Some(Box::new((worker, clock.note_sent())));
        BatchTimes { stamps, runs: std::mem::take(&mut self.runs.lock()[worker as usize]) }
    }
}

/// Stands in front of a `collate_fn`, and has a clock note how long it takes.
#[pyclass(frozen, module = "ringloader._native")]
pub(crate) struct TimedCollate {
    clock: Py<WorkerClock>,
    collate: Py<PyAny>,
}

#[pymethods]
impl TimedCollate {
    #[new]
    fn new(clock: Py<WorkerClock>, collate: Py<PyAny>) -> Self {
        Self { clock, collate }
    }

    fn __call__<'py>(&self, batch: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let begun = monotonic();
        let made = self.collate.bind(batch.py()).call1((batch,));
        self.clock.get().core().record_collation(begun, monotonic());
        made
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.clock)?;
        visit.call(&self.collate)
    }
}

type Core = EpochTimes<Option<Py<PyAny>>>;

/// The times of the epoch that runs, or ran last.
#[pyclass(frozen, module = "ringloader._native")]
pub(crate) struct Recorder {
    workers: u32,
    epoch: Lock<Core>,
    /// Without workers: until when the main process has done what is known by now.
    known: AtomicU64,
}

#[pymethods]
impl Recorder {
    /// The times of `workers` workers. The first epoch begins now.
    #[new]
    fn new(workers: u32) -> Self {
        Self { workers, epoch: Lock::new(Core::new(workers, monotonic())), known: AtomicU64::new(0) }
    }

    /// Begins another epoch.
    fn begin(&self) {
        let before = std::mem::replace(&mut *self.core(), Core::new(self.workers, monotonic()));
        // After the lock is released: the end of an index may run any code.
        drop(before);
    }

    /// Notes that a batch was brought to where it is needed, from this moment until now.
    fn note_place(&self, begun: u64) {
        let ended = monotonic();
        let mut core = self.core();
        let batch = core.returned;
        core.record_main(MainWork::Place, batch, begun, ended);
    }

    /// Returns the figures of the epoch, in nanoseconds of the monotonic clock.
    fn read<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let core = self.core();
        let workers: Vec<_> = core
            .workers
            .iter()
            .map(|sums| [sums.batches, sums.idle, sums.dataset, sums.collate, sums.send, sums.room, sums.cpu])
            .collect();
        let slowest: Vec<_> = core
            .slowest
            .iter()
            .map(|(fetch, index)| {
                let index = index.as_ref().map(|index| index.clone_ref(py));
                (fetch.stamps.dataset(), fetch.worker, fetch.batch, index)
            })
            .collect();
        let figures = [
            ("begun", core.begun),
            ("last", core.last),
            ("batches", core.returned),
            ("waiting", core.waiting),
        ];
        let (first, first_made, main) = (core.first, core.first_made.unwrap_or(0), core.main);
        drop(core);
        let read = figures.into_py_dict(py)?;
        read.set_item("first", first)?;
        read.set_item("first_made", first_made)?;
        read.set_item("main", main)?;
        read.set_item("workers", workers)?;
        read.set_item("slowest", slowest)?;
        Ok(read)
    }

    /// Returns the last events of the epoch.
    fn trace(&self) -> Trace {
        let core = self.core();
        let fetches = core.fetches.iter().cloned().collect();
        Trace { begun: core.begun, first: core.first, fetches, events: core.events.iter().copied().collect() }
    }
}

/// The last events of an epoch, in nanoseconds of the monotonic clock.
#[pyclass(frozen, module = "ringloader._native")]
pub(crate) struct Trace {
    #[pyo3(get)]
    begun: u64,
    #[pyo3(get)]
    first: Option<u64>,
    fetches: Vec<Fetch>,
    events: Vec<Event>,
}

#[pymethods]
impl Trace {
    /// Returns the batches that workers have made: batch, worker, the moments `got`, `collating`, `made` and `sent`,
    /// the times of `collate` and `room`, and the first indices.
    #[expect(clippy::type_complexity, reason = "a row of a table")]
    fn fetches(&self) -> Vec<(u64, u32, [u64; 4], [u64; 2], Vec<i64>)> {
        let row = |fetch: &Fetch| {
            let Stamps { got, collating, collate, made, room, sent, .. } = fetch.stamps;
            (fetch.batch, fetch.worker, [got, collating, made, sent], [collate, room], fetch.indices.to_vec())
        };
        self.fetches.iter().map(row).collect()
    }

    /// Returns itself: nothing of it changes.
    fn __deepcopy__<'py>(slf: Bound<'py, Self>, _memo: Bound<'py, PyAny>) -> Bound<'py, Self> {
        slf
    }

    /// Returns the events of the main process: their names, batches, beginnings and ends.
    fn events(&self) -> Vec<(&'static str, u64, u64, u64)> {
        let name = |work| match work {
            None => "wait",
            Some(MainWork::Decode) => "decode",
            Some(MainWork::Place) => "place",
            Some(MainWork::Index) => "index",
        };
        self.events.iter().map(|event| (name(event.work), event.batch, event.begun, event.ended)).collect()
    }
}

impl Recorder {
    fn core(&self) -> MutexGuard<'_, Core> {
        self.epoch.lock()
    }

    /// Notes that the sampler was read. Returns how many batches were made before, without workers.
    fn note_index(&self, begun: u64, ended: u64) -> u64 {
        let mut core = self.core();
        core.record_main(MainWork::Index, 0, begun, ended);
        core.workers.first().map_or(0, |sums| sums.batches)
    }

    /// As [`EpochTimes::record_main`], for work that ends now.
    pub(crate) fn note_main(&self, work: MainWork, batch: u64, begun: u64) {
        self.core().record_main(work, batch, begun, monotonic());
    }

    /// As [`EpochTimes::record_fetch`], or `record_run` of a run, whose indices `bytes` are then.
    pub(crate) fn note_fetch(
        &self,
        batch: u64,
        (worker, stamps): (u32, Stamps),
        is_run: bool,
        bytes: &[u8],
        index: impl FnOnce() -> Option<Py<PyAny>>,
    ) {
        // Without the lock: a new object may set off the collector, and that any code.
        let is_long = self.core().is_long(stamps.dataset());
        let index = is_long.then(index);
        let record = if is_run { Core::record_run } else { Core::record_fetch };
        let dropped = record(&mut self.core(), batch, worker, stamps, bytes, index);
        drop(dropped);
    }
}

/// Stands in front of what gives an iterator its next batch, and has a recorder note how long it takes.
#[pyclass(frozen, module = "ringloader._native")]
pub(crate) struct TimedNext {
    recorder: Py<Recorder>,
    take: Py<PyAny>,
    /// True if what follows a fetch brings the batch to where it is needed.
    places: bool,
}

#[pymethods]
impl TimedNext {
    #[new]
    fn new(recorder: Py<Recorder>, take: Py<PyAny>, places: bool) -> Self {
        Self { recorder, take, places }
    }

    fn __call__<'py>(&self, iterator: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let py = iterator.py();
        let begun = monotonic();
        let recorder = self.recorder.get();
        recorder.known.store(begun, Ordering::Relaxed);
        let taken = self.take.bind(py).call1((iterator,));
        let ended = monotonic();
        let mut core = recorder.core();
        let known = recorder.known.load(Ordering::Relaxed);
        // On torch's own path no fetch is seen, so the time after a fetch is not known.
        if self.places && taken.is_ok() && known != begun {
            let batch = core.returned;
            core.record_main(MainWork::Place, batch, known, ended);
        }
        core.record_next(begun, ended, taken.is_ok());
        taken
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.recorder)?;
        visit.call(&self.take)
    }
}

/// Stands in front of the fetcher of a loader without workers, and has a recorder note how long a batch takes.
#[pyclass(frozen, module = "ringloader._native")]
pub(crate) struct TimedFetch {
    recorder: Py<Recorder>,
    clock: Py<WorkerClock>,
    fetcher: Py<PyAny>,
    /// True for an iterable dataset: its samples have no indices.
    iterable: bool,
}

#[pymethods]
impl TimedFetch {
    #[new]
    fn new(recorder: Py<Recorder>, clock: Py<WorkerClock>, fetcher: Py<PyAny>, iterable: bool) -> Self {
        Self { recorder, clock, fetcher, iterable }
    }

    /// Begins a batch that is to be fetched, with what the fetcher is given for it.
    #[pyo3(signature = (*given))]
    fn begin<'py>(&self, given: &Bound<'py, PyTuple>) -> PyResult<Bound<'py, PyAny>> {
        self.fetcher.bind(given.py()).call_method1("begin", given)
    }

    fn fetch<'py>(&self, index: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let py = index.py();
        let (recorder, clock) = (self.recorder.get(), self.clock.get());
        let begun = clock.begin_here();
        let made = self.fetcher.bind(py).call_method1(strings::fetch(py), (index,));
        if self.iterable && made.as_ref().is_err_and(|error| error.is_instance_of::<PyStopIteration>(py)) {
            // The end of the samples is no batch.
            return made;
        }
        let stamps = clock.made_here();
        let known = recorder.known.swap(stamps.sent, Ordering::Relaxed);
        let batch = recorder.note_index(known, begun);
        recorder
            .note_fetch(batch, (0, stamps), false, &[], || (!self.iterable).then(|| index.clone().unbind()));
        made
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.recorder)?;
        visit.call(&self.clock)?;
        visit.call(&self.fetcher)
    }
}
