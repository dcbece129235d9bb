//! Tells the recorder of the batches that arrive.

use std::ops::Range;
use std::sync::OnceLock;

use pyo3::prelude::*;
use ringloader_core::number::usize_from;
use ringloader_core::os::clock::monotonic;
use ringloader_core::timing::{MainWork, Stamps};
use ringloader_core::transport::message::{TaskIndex, TaskKind};
use ringloader_core::transport::queues::Reply;
use ringloader_core::transport::received::Received;
use ringloader_core::transport::run_times::TimedRun;

use super::ParentEnd;
use crate::sampling::codec::decode_index;
use crate::sampling::places;
use crate::scheduler::parent_end::{DeliveryOf, IndexOf, RingEnd, TransportEnd};
use crate::scheduler::{EpochState, Scheduling};
use crate::timing::Recorder;
use crate::transport::claimed::{Core as CoreQueues, Index, Made as MadeInThread};
use crate::transport::queues::ThreadQueues;

/// What the parent's end knows of how long batches took.
pub(crate) trait TimedEnd: TransportEnd {
    /// Returns the worker that has made a delivery, and the batch's moments there, if they were noted.
    fn stamps(delivery: &DeliveryOf<Self>) -> Option<(u32, Stamps)>;

    /// Takes the runs of a delivery that all workers have made, if they are timed.
    fn take_runs(core: &Self::Core, delivery: &DeliveryOf<Self>) -> Vec<TimedRun>;

    /// Returns the numbers that an index consists of, as little-endian int64; `None` for an index of any other kind.
    fn numbers(index: &IndexOf<Self>) -> Option<&[u8]>;
}

impl<R: RingEnd> TimedEnd for R {
    fn stamps(delivery: &Received) -> Option<(u32, Stamps)> {
        Some((delivery.worker, delivery.stamps()?))
    }

    fn take_runs(core: &R::Core, delivery: &Received) -> Vec<TimedRun> {
        R::joint(core).map_or_else(Vec::new, |joint| joint.take_timed(delivery.seq))
    }

    fn numbers(index: &TaskIndex) -> Option<&[u8]> {
        numbers(index)
    }
}

impl TimedEnd for ThreadQueues {
    fn stamps(reply: &Reply<MadeInThread>) -> Option<(u32, Stamps)> {
        reply.content.times.stamps.as_deref().copied()
    }

    fn take_runs(_core: &CoreQueues, reply: &Reply<MadeInThread>) -> Vec<TimedRun> {
        reply.content.times.runs.clone()
    }

    fn numbers(index: &Index) -> Option<&[u8]> {
        match index {
            Index::Plain(plain) => numbers(plain),
            Index::Placed(index, _) => Self::numbers(index),
            Index::Object(_) => None,
        }
    }
}

fn numbers((kind, bytes): &TaskIndex) -> Option<&[u8]> {
    match kind {
        TaskKind::Indices | TaskKind::Index => Some(bytes),
        TaskKind::Seeded => match places::split(bytes).ok()? {
            (_, TaskKind::Indices | TaskKind::Index, bytes) => Some(bytes),
            _ => None,
        },
        _ => None,
    }
}

/// Notes how long batches take, where that is wanted; and the work that is done for a batch ahead of its turn.
#[derive(Default)]
pub(in super::super) struct Recording(OnceLock<(Py<Recorder>, MainWork)>);

/// The moments of a batch where it was made.
pub(super) struct Made {
    stamps: Option<(u32, Stamps)>,
    /// The runs of a batch that all workers make.
    runs: Vec<TimedRun>,
}

/// A batch that has arrived and is not yet unpacked.
pub(in super::super) struct Timed {
    made: Made,
    begun: u64,
}

impl<E: ParentEnd> Scheduling<E> {
    /// Lets `recorder` note how long batches take from now on. `decodes`: a placement only decodes.
    pub(in super::super) fn record(
        &self,
        py: Python<'_>,
        recorder: Py<Recorder>,
        decodes: bool,
    ) -> PyResult<()> {
        let work = if decodes { MainWork::Decode } else { MainWork::Place };
        let _ = self.recording.0.set((recorder, work));
        // For the indices of the longest.
        self.lock(py)?.features.sent.keep();
        Ok(())
    }

    /// Returns when the read of an index begins, where that is noted. Two looks at the clock take longer than to read from
    /// a native stream, so that is not noted.
    pub(in super::super) fn begin_index(&self, is_native: bool) -> Option<u64> {
        (!is_native && self.recording.0.get().is_some()).then(monotonic)
    }

    /// Notes the end of that read.
    pub(in super::super) fn end_index(&self, begun: Option<u64>) {
        if let (Some((recorder, _)), Some(begun)) = (self.recording.0.get(), begun) {
            recorder.get().note_main(MainWork::Index, 0, begun);
        }
    }

    /// Begins to note a batch that has arrived, where that is wanted.
    pub(in super::super) fn begin_timed(&self, delivery: &DeliveryOf<E>) -> Option<Timed> {
        self.moments(delivery).map(|made| Timed { made, begun: monotonic() })
    }

    /// Returns the moments of a batch that has arrived, where they are wanted: also of one whose epoch has not begun, and
    /// whose decoding is of no epoch.
    pub(super) fn moments(&self, delivery: &DeliveryOf<E>) -> Option<Made> {
        self.recording.0.get()?;
        let core = E::core(&self.engine);
        let runs = core.map_or_else(|_| Vec::new(), |core| E::take_runs(&core, delivery));
        Some(Made { stamps: E::stamps(delivery), runs })
    }

    /// Notes a batch, which is unpacked now.
    pub(in super::super) fn end_timed(
        &self,
        py: Python<'_>,
        state: &EpochState<IndexOf<E>>,
        batch: u64,
        timed: Option<Timed>,
    ) {
        let (Some((recorder, _)), Some(timed)) = (self.recording.0.get(), timed) else { return };
        recorder.get().note_main(MainWork::Decode, batch, timed.begun);
        self.note_made(py, state, batch, timed.made);
    }

    fn note_made(&self, py: Python<'_>, state: &EpochState<IndexOf<E>>, batch: u64, made: Made) {
        for run in made.runs {
            self.note_fetch(py, state, batch, (run.worker, run.stamps), Some(run.samples));
        }
        if let Some(stamps) = made.stamps {
            self.note_fetch(py, state, batch, stamps, None);
        }
    }

    /// Notes the batches that had arrived before their epoch began.
    pub(in super::super) fn note_early(&self, py: Python<'_>, state: &mut EpochState<IndexOf<E>>) {
        for (batch, made) in std::mem::take(&mut state.features.early) {
            self.note_made(py, state, batch, made);
        }
    }

    /// Notes a batch that a worker has made, or the samples of a run of it.
    fn note_fetch(
        &self,
        py: Python<'_>,
        state: &EpochState<IndexOf<E>>,
        batch: u64,
        made: (u32, Stamps),
        run: Option<Range<u64>>,
    ) {
        let Some((recorder, _)) = self.recording.0.get() else { return };
        let index = state.features.sent.get(batch);
        let numbers = index.and_then(E::numbers);
        let is_run = run.is_some();
        let of_run = run.and_then(|run| numbers?.get(8 * usize_from(run.start)..8 * usize_from(run.end)));
        let bytes = if is_run { of_run } else { numbers };
        recorder.get().note_fetch(batch, made, is_run, bytes.unwrap_or_default(), || {
            let index = match of_run {
                Some(bytes) => decode_index(py, TaskKind::Indices, bytes).ok(),
                None => index.filter(|_| !self.iterable).and_then(|index| E::index(py, index).ok()),
            };
            index.map(Bound::unbind)
        });
    }

    /// Begins to note that a batch is brought to where it is needed, where that is wanted.
    pub(in super::super) fn begin_placed(&self) -> Option<u64> {
        self.recording.0.get().map(|_| monotonic())
    }

    /// Notes the end of that, for the batch at this position among those ahead.
    ///
    /// # Errors
    /// As [`lock`](Scheduling::lock).
    pub(in super::super) fn end_placed(&self, py: Python<'_>, at: usize, begun: Option<u64>) -> PyResult<()> {
        let (Some((recorder, work)), Some(begun)) = (self.recording.0.get(), begun) else { return Ok(()) };
        let batch = self.lock(py)?.taken.seq_at(at);
        recorder.get().note_main(*work, batch, begun);
        Ok(())
    }
}
