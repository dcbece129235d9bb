//! Tasks that all worker processes share: a worker's end, as a Python class.

use std::os::fd::{AsFd, RawFd};
use std::time::Duration;

use pyo3::exceptions::{PyMemoryError, PyRuntimeError};
use pyo3::prelude::*;
use ringloader_core::batch::Meta;
use ringloader_core::batch::rows::Place;
use ringloader_core::joint::Part;
use ringloader_core::number::usize_from;
use ringloader_core::os::clock::monotonic;
use ringloader_core::os::memory::MemoryProbe;
use ringloader_core::sync::{Arc, Lock};
use ringloader_core::timing::Stamps;
use ringloader_core::transport::joint::{Claimed as CoreClaimed, JointMemory, Rows};
use ringloader_core::transport::queues::TaskRun;
use ringloader_core::transport::task_number::{epoch_of, is_before};

use super::claimed::{Claimed, Index};
use super::port::Port;
use super::port::sending::JointBatch;
use crate::batch::encode::{Encoded, Spare};
use crate::batch::write::Target;
use crate::batch::{decode, rows};
use crate::gil::{corrupt, exception, no_memory_for, run_copy};
use crate::process::duplicate;
use crate::sampling::codec::pair;
use crate::timing::WorkerClock;
use crate::torch::memory::Memory;
use crate::torch::source::Bytes;

/// The table of a part is compared with no slot's generation.
const GENERATION: u64 = 0;
/// Bytes at the start of a part, of which the first eight say where its table begins.
const HEADER: u64 = 64;
/// The first and the longest sleep of a worker that waits for the others, who cannot wake it, to begin an epoch.
const FIRST_NAP: Duration = Duration::from_millis(1);
const LONGEST_NAP: Duration = Duration::from_millis(50);

/// A worker's end of the tasks that all workers share. It has a port too, by which batches go.
#[pyclass(frozen, module = "ringloader._native")]
pub(crate) struct JointPort {
    port: Py<Port>,
    tasks: JointMemory,
    probe: MemoryProbe,
    spare: Spare,
    /// The batch of rows that was collated last, until it is sent, and where its rows end.
    joint: Lock<Option<(CoreClaimed, u64)>>,
}

#[pymethods]
impl JointPort {
    /// The end of the worker that has `port`, over the memory of `JointEngine.fds`, whose descriptors stay the caller's.
    #[new]
    fn new(
        port: Py<Port>,
        words: RawFd,
        bytes: RawFd,
        places: u32,
        window: u64,
        timed: bool,
    ) -> PyResult<Self> {
        let bytes = duplicate(bytes)?;
        let tasks = JointMemory::attach(duplicate(words)?, bytes.as_fd(), places, window, timed)
            .map_err(exception)?;
        Ok(Self { port, tasks, probe: MemoryProbe::new(), spare: Spare::default(), joint: Lock::default() })
    }

    /// Waits for a message of `Port.get`, which comes in a tuple, and for tasks of `epoch` and those before, of which a
    /// `Claimed` comes. `next`: the epoch that the worker was told to begin. None once it may: no batch that anybody wants
    /// is left to be made of the epochs before.
    fn get<'py>(&self, py: Python<'py>, epoch: u64, next: Option<u64>) -> PyResult<Bound<'py, PyAny>> {
        let port = self.port.get();
        let is_wanted = |seq: u64| !is_before(epoch, epoch_of(seq));
        let may_begin = || next.is_some_and(|next| self.tasks.claims().are_over_before(next));
        let mut nap = FIRST_NAP;
        loop {
            let message = port.next(py, true)?;
            if message.is_some() || port.knows_end() {
                return Ok((message,).into_pyobject(py)?.into_any());
            }
            if let Some(claimed) = self.tasks.claims().claim(port.core().worker(), is_wanted) {
                port.begin_task(py)?;
                let index = Index::of_task(self.tasks.index(&claimed).map_err(exception)?)?;
                let is_stale = self.tasks.claims().is_stale(claimed.plan.seq);
                let claimed = Claimed::new(TaskRun { claimed, index: Arc::new(index), is_stale });
                return Ok(Bound::new(py, claimed)?.into_any());
            }
            if may_begin() {
                return Ok(py.None().into_bound(py));
            }
            let limit = if next.is_some() { nap } else { Duration::MAX };
            nap = LONGEST_NAP.min(2 * nap);
            port.wait(py, limit, || self.tasks.claims().is_open(is_wanted) || may_begin())?;
        }
    }

    /// Says that the batch's result was sent by this worker, which has collated it.
    fn note_sent(&self, claimed: &Claimed) {
        self.tasks.claims().of(&claimed.core).note_sent(claimed.core.claim);
    }

    /// Takes the collation of a batch if the samples of all other runs are there. The caller then collates.
    fn begin_last(&self, claimed: &Claimed) -> bool {
        let is_last =
            self.has_claims() && self.tasks.claims().of(&claimed.core).begin_last(claimed.core.claim);
        if is_last {
            self.note_made(claimed);
        }
        is_last
    }

    /// Says that the run's samples lie in rows of the batch. Returns whether the caller is the worker that collates.
    fn finish_rows(&self, claimed: &Claimed) -> bool {
        // The copy is the batch's own.
        self.tasks.claims().note_sending(0);
        self.finish(claimed, Part::Rows)
    }

    /// Sends the run's samples to the worker that will collate. Returns whether that is the caller.
    ///
    /// # Errors
    /// The error that pickling raises; `MemoryError` if there is no room. Nothing was sent then.
    fn put(&self, claimed: &Claimed, samples: &Bound<'_, PyAny>) -> PyResult<bool> {
        if !self.has_claims() {
            return Ok(false);
        }
        let begun = monotonic();
        self.note_made(claimed);
        let (offset, len) = self.spare.with(Encoded::exact, |encoded| {
            encoded.encode(samples)?;
            self.written(claimed, samples, encoded)
        })?;
        // To read them takes about as long.
        let each = 2 * monotonic().saturating_sub(begun) / (claimed.__len__().max(1) as u64);
        self.tasks.claims().note_sending(each);
        Ok(self.finish(claimed, Part::Bytes { offset, len }))
    }

    /// Says that the run's samples cannot be sent. Returns whether the caller is the worker that makes the batch whole.
    fn put_nothing(&self, claimed: &Claimed) -> bool {
        self.finish(claimed, Part::Unsent)
    }

    /// Sends a message that may have the batch which was collated last, as `Port.put` does. False: there is none.
    ///
    /// # Errors
    /// As `Port.put`.
    fn put_collated(&self, message: &Bound<'_, PyAny>) -> PyResult<bool> {
        let Some((claimed, end)) = self.joint.lock().take() else { return Ok(false) };
        if pair(message)?.is_none_or(|(seq, _)| seq as u64 != claimed.plan.seq) {
            return Ok(false);
        }
        let batch = JointBatch { tasks: &self.tasks, claimed: &claimed, end, probe: &self.probe };
        self.port.get().send(message, Some(&batch)).map(|()| true)
    }

    /// The samples of all runs, run by run, with `own` for the one that was claimed; `None` if some could not be sent.
    ///
    /// # Errors
    /// The error that unpickling raises; `MemoryError`.
    fn parts<'py>(
        &self,
        py: Python<'py>,
        claimed: &Claimed,
        own: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Option<Vec<Bound<'py, PyAny>>>> {
        let parts = self.read_all(py, claimed, own);
        self.note_read(claimed);
        parts
    }

    /// Notes the seconds that the run's samples took, by which later batches are cut.
    #[expect(clippy::cast_possible_truncation, reason = "no run takes so many nanoseconds")]
    fn note_time(&self, claimed: &Claimed, seconds: f64) {
        let samples = claimed.__len__().max(1) as f64;
        self.tasks.claims().note_making((seconds * 1e9 / samples) as u64);
    }

    /// Notes that samples could not be sent. Returns true when it has happened so often that batches are cut no more.
    fn note_unsent(&self) -> bool {
        self.tasks.claims().note_unsent()
    }
}

impl JointPort {
    /// Returns true in the worker, and false in a process that its dataset forked, which may come back with samples:
    /// the worker itself makes what it has claimed, and nobody else may write there.
    pub(crate) fn has_claims(&self) -> bool {
        self.port.get().core().is_current()
    }

    /// The worker's clock, for a run that is not a whole batch.
    fn clock_of_run(&self, claimed: &Claimed) -> Option<&WorkerClock> {
        let is_run = claimed.core.claim.run.is_some() && !claimed.is_whole();
        self.port.get().clock().filter(|_| is_run)
    }

    /// Notes that the samples of a run are made, where that is timed.
    pub(crate) fn note_made(&self, claimed: &Claimed) {
        if let Some(clock) = self.clock_of_run(claimed) {
            clock.note_made();
        }
    }

    /// Notes that this worker has all samples of the batch, where that is timed.
    pub(crate) fn note_read(&self, claimed: &Claimed) {
        if let Some(clock) = self.clock_of_run(claimed)
            && let Some(stamps) = clock.run_read()
        {
            self.note_times(claimed, &stamps);
        }
    }

    fn note_times(&self, claimed: &Claimed, stamps: &Stamps) {
        self.tasks.note_times(&claimed.core, self.port.get().core().worker(), stamps);
    }

    fn finish(&self, claimed: &Claimed, part: Part) -> bool {
        if !self.has_claims() {
            return false;
        }
        let clock = self.clock_of_run(claimed);
        if let Some(clock) = clock {
            self.note_times(claimed, &clock.run_sent());
        }
        let is_last = self.tasks.claims().of(&claimed.core).finish(claimed.core.claim, part);
        if let Some(clock) = clock.filter(|_| is_last) {
            clock.note_last();
        }
        is_last
    }

    fn read_all<'py>(
        &self,
        py: Python<'py>,
        claimed: &Claimed,
        own: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Option<Vec<Bound<'py, PyAny>>>> {
        let mut parts = Vec::new();
        for run in 0..claimed.core.plan.runs() {
            if claimed.core.claim.run == Some(run)
                && let Some(own) = &own
            {
                parts.push(own.clone());
                continue;
            }
            match self.tasks.claims().of(&claimed.core).part(run) {
                Some(Part::Bytes { offset, len }) => parts.push(self.read(py, claimed, offset, len)?),
                Some(Part::Rows) => parts.push(self.read_rows(py, claimed, run)?),
                Some(Part::Unsent) | None => return Ok(None),
            }
        }
        Ok(Some(parts))
    }

    pub(crate) fn tasks(&self) -> &JointMemory {
        &self.tasks
    }

    pub(crate) fn probe(&self) -> &MemoryProbe {
        &self.probe
    }

    /// Notes that the message which is sent next has a batch over rows, which end at `end`.
    pub(crate) fn note_collated(&self, claimed: &Claimed, end: u64) {
        *self.joint.lock() = Some((claimed.core, end));
    }

    /// The samples of a run that lie in rows, in private memory.
    fn read_rows<'py>(&self, py: Python<'py>, claimed: &Claimed, run: u32) -> PyResult<Bound<'py, PyAny>> {
        let found = self.tasks.rows(&claimed.core).map_err(exception)?;
        let Rows { form, columns, .. } = found.ok_or_else(|| corrupt("no rows"))?;
        let samples = claimed.core.samples_of(run);
        let count = samples.end - samples.start;
        let (mut memory, places) = rows::memory_for(&form, count)?;
        let into = memory.uninit();
        for (from, Place { offset, row_len }) in columns.iter().zip(&places) {
            let into = &mut into[usize_from(*offset)..][..usize_from(row_len * count)];
            let from = from.offset + row_len * samples.start;
            self.tasks.fill(&claimed.core, from, into).map_err(exception)?;
        }
        rows::samples(py, &form, &places, count, &Arc::new(memory))
    }

    fn written(
        &self,
        claimed: &Claimed,
        samples: &Bound<'_, PyAny>,
        encoded: &mut Encoded,
    ) -> PyResult<(u64, u64)> {
        let py = samples.py();
        let mut reserved = None;
        let found = encoded.settle(samples, "list of samples was", |encoded| {
            encoded.form(py, 0..0)?;
            let table = encoded.lay_out(Some(HEADER));
            let len = table + encoded.meta.encoded_len() as u64;
            let (start, _) = match reserved.filter(|&(_, room)| room >= len) {
                Some(reserved) => reserved,
                None => {
                    let start = self.tasks.reserve(&claimed.core, len, &self.probe).map_err(exception)?;
                    let start = start.ok_or_else(|| {
                        PyMemoryError::new_err(format!("no room for samples of {len} bytes"))
                    })?;
                    *reserved.insert((start, len))
                }
            };
            Ok(Some((start, table, len)))
        })?;
        let (start, table, len) = found.ok_or_else(|| PyRuntimeError::new_err("no room"))?;
        let Encoded { meta, drafts, groups, .. } = encoded;
        let block = meta.finish(GENERATION);
        let target = Target::Part { tasks: &self.tasks, claimed: &claimed.core, start };
        target.write(py, &[], &[], 0, &table.to_le_bytes())?;
        target.write(py, groups.copies(), &drafts.held, table, block)?;
        Ok((start, len))
    }

    /// The samples of a part, in private memory.
    fn read<'py>(
        &self,
        py: Python<'py>,
        claimed: &Claimed,
        offset: u64,
        len: u64,
    ) -> PyResult<Bound<'py, PyAny>> {
        let Self { tasks, .. } = self;
        let mut table = Vec::new();
        tasks.copy_out(&claimed.core, offset, 8, &mut table).map_err(exception)?;
        let table = table.first_chunk().map(|first| u64::from_le_bytes(*first)).filter(|&at| at <= len);
        let table = table.ok_or_else(|| corrupt("a part"))?;
        let mut block = Vec::new();
        tasks.copy_out(&claimed.core, offset + table, len - table, &mut block).map_err(exception)?;
        let mut memory = Memory::new(usize_from(table)).ok_or_else(|| no_memory_for(len))?;
        let into = &mut memory.uninit()[..usize_from(table)];
        run_copy(py, usize_from(table), || tasks.fill(&claimed.core, offset, into)).map_err(exception)?;
        let meta = Meta::parse(&block, GENERATION, table).map_err(exception)?;
        decode::read(py, Bytes::Sample(&Arc::new(memory)), &meta, true)
    }
}
