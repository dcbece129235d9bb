//! Tells the recorder of the batches that arrive.

use std::ops::Range;

use pyo3::prelude::*;
use ringloader_core::os::clock::monotonic;
use ringloader_core::timing::{MainWork, Stamps};
use ringloader_core::transport::message::TaskKind;
use ringloader_core::transport::run_times::TimedRun;

use super::parent_end::{DeliveryOf, IndexOf, ParentEnd};
use super::{EpochState, Scheduling};
use crate::sampling::codec::decode_index;
use crate::timing::Recorder;

/// The moments of a batch where it was made.
pub(super) struct Made {
    stamps: Option<(u32, Stamps)>,
    /// The runs of a batch that all workers make.
    runs: Vec<TimedRun>,
}

/// A batch that has arrived and is not yet unpacked.
pub(super) struct Timed {
    made: Made,
    begun: u64,
}

impl<E: ParentEnd> Scheduling<E> {
    /// Lets `recorder` note how long batches take from now on. `decodes`: a placement only decodes.
    pub(super) fn record(&self, py: Python<'_>, recorder: Py<Recorder>, decodes: bool) -> PyResult<()> {
        let work = if decodes { MainWork::Decode } else { MainWork::Place };
        let _ = self.recorder.set((recorder, work));
        // For the indices of the longest.
        self.lock(py)?.keeps_sent = true;
        Ok(())
    }

    /// Begins to note a batch that has arrived, where that is wanted.
    pub(super) fn begin_timed(&self, delivery: &DeliveryOf<E>) -> Option<Timed> {
        self.moments(delivery).map(|made| Timed { made, begun: monotonic() })
    }

    /// Returns the moments of a batch that has arrived, where they are wanted: also of one whose epoch has not begun, and
    /// whose decoding is of no epoch.
    pub(super) fn moments(&self, delivery: &DeliveryOf<E>) -> Option<Made> {
        self.recorder.get()?;
        let core = E::core(&self.engine);
        let runs = core.map_or_else(|_| Vec::new(), |core| E::take_runs(&core, delivery));
        Some(Made { stamps: E::stamps(delivery), runs })
    }

    /// Notes a batch, which is unpacked now.
    pub(super) fn end_timed(&self, py: Python<'_>, state: &EpochState<IndexOf<E>>, batch: u64, timed: Timed) {
        let Some((recorder, _)) = self.recorder.get() else { return };
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
    pub(super) fn note_early(&self, py: Python<'_>, state: &mut EpochState<IndexOf<E>>) {
        for (batch, made) in std::mem::take(&mut state.early) {
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
        let Some((recorder, _)) = self.recorder.get() else { return };
        let index = state.sent.get(batch);
        let numbers = index.and_then(E::numbers);
        let is_run = run.is_some();
        let of_run = run.and_then(|run| numbers?.get(8 * run.start as usize..8 * run.end as usize));
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
    pub(super) fn begin_placed(&self) -> Option<u64> {
        self.recorder.get().map(|_| monotonic())
    }

    /// Notes the end of that, for the batch at this position among those ahead.
    ///
    /// # Errors
    /// As [`lock`](Scheduling::lock).
    pub(super) fn end_placed(&self, py: Python<'_>, at: usize, begun: Option<u64>) -> PyResult<()> {
        let (Some((recorder, work)), Some(begun)) = (self.recorder.get(), begun) else { return Ok(()) };
        let batch = self.lock(py)?.taken.get(at).map_or(0, |taken| taken.seq);
        recorder.get().note_main(*work, batch, begun);
        Ok(())
    }
}
