//! Batches that are prepared before their turn, by a `Placement` of the Python package.

use std::collections::VecDeque;
use std::time::Duration;

use pyo3::exceptions::{PyAssertionError, PyException};
use pyo3::prelude::*;
use pyo3::{PyTraverseError, PyVisit};
use ringloader_core::sync::Ordering;

use super::features::ParentEnd;
use super::{BUSY, Due, End, Scheduling, invalid_state};
use crate::caught::caught;
use crate::placement::arrival::Arrival;
use crate::python::Callbacks;
use crate::strings;

/// The time for which an end waits for the user's code that another thread runs in a call for a batch.
const PATIENCE: Duration = Duration::from_secs(5);

/// The batches that were taken and not yet handed out.
pub(super) struct Ahead {
    /// Each batch as it came, an [`Arrival`], until it is prepared.
    batches: VecDeque<Py<PyAny>>,
    /// False in the call after one in which a later batch failed: then only the first batch is handed out, so that it
    /// comes even if the later ones never do.
    looks: bool,
}

impl Default for Ahead {
    fn default() -> Self {
        Self { batches: VecDeque::new(), looks: true }
    }
}

impl Ahead {
    pub(super) fn traverse(&self, visit: &PyVisit<'_>) -> Result<(), PyTraverseError> {
        self.batches.iter().try_for_each(|batch| visit.call(batch))
    }
}

/// A batch that was taken and not yet handed out.
struct Taken {
    seq: u64,
    worker: u32,
    /// torch's `_rcvd_idx` before it.
    received: u64,
}

/// The batches of an epoch that were taken and not yet handed out, as the scheduler counts them.
#[derive(Default)]
pub(super) struct TakenBatches {
    /// In their order.
    queue: VecDeque<Taken>,
    /// The end of a worker's iterable dataset, where that was found ahead of its turn. To end the worker then would
    /// change which worker gets which of the tasks that are sent until its turn.
    pub(super) end: Option<End>,
}

impl TakenBatches {
    /// Forgets all.
    pub(super) fn forget(&mut self) {
        self.queue.clear();
        self.end = None;
    }

    /// Returns the number of batches.
    pub(super) fn len(&self) -> u64 {
        self.queue.len() as u64
    }

    /// Returns torch's `_rcvd_idx` before the first of them.
    pub(super) fn received(&self) -> Option<u64> {
        self.queue.front().map(|first| first.received)
    }

    /// Returns the task of the batch at this position; 0 if there is none.
    pub(super) fn seq_at(&self, at: usize) -> u64 {
        self.queue.get(at).map_or(0, |taken| taken.seq)
    }
}

impl<E: ParentEnd> Scheduling<E> {
    /// Returns the next batch, from where `placement` brings it. Also prepares the batches after it that have come.
    ///
    /// The sampler is read when a batch is handed out, as in [`next`](Self::next). Errors, deaths of workers and the
    /// end of the epoch wait for their turn. If a call is interrupted before it hands a batch out, the next call continues
    /// with what it has left.
    pub(super) fn next_placed<'py>(
        &self,
        placement: &Bound<'py, PyAny>,
        prepare: &Bound<'py, PyAny>,
        callbacks: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = callbacks.py();
        self.check_process()?;
        let mut ahead = self.ahead.lock(py, BUSY)?;
        let closes = self.closes.load(Ordering::Relaxed);
        let found =
            caught(py, || self.next_of_ahead(&mut ahead, placement, prepare, &Callbacks(callbacks), closes));
        drop(ahead);
        // After the lock is released: see `close_placed`.
        if self.closes.load(Ordering::Relaxed) != closes {
            // Without the lock, so what this call has begun is still to be ended.
            self.close_placed(placement)?;
        }
        self.unless_stopped(py, found)
    }

    fn next_of_ahead<'py>(
        &self,
        ahead: &mut Ahead,
        placement: &Bound<'py, PyAny>,
        prepare: &Bound<'py, PyAny>,
        callbacks: &Callbacks<'_, 'py>,
        closes: u64,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = callbacks.py();
        let depth: usize = placement.getattr(strings::depth(py))?.extract()?;
        self.lock(py)?.source.get().begin_call();
        if ahead.batches.is_empty() {
            self.take(ahead, callbacks)?;
        }
        self.prepare_at(ahead, 0, prepare)?;
        let looks = std::mem::replace(&mut ahead.looks, false);
        while looks && ahead.batches.len() <= depth && self.take(ahead, callbacks)? {
            self.prepare_at(ahead, ahead.batches.len() - 1, prepare)?;
        }
        ahead.looks = true;
        let first = ahead.batches.front().ok_or_else(invalid_state)?;
        let begun = self.begin_placed();
        let data = first.bind(py).call_method0(strings::result(py))?;
        self.end_placed(py, 0, begun)?;
        if self.closes.load(Ordering::Relaxed) != closes {
            return Err(PyAssertionError::new_err("Invalid iterator state: it was shut down meanwhile"));
        }
        let mut state = self.lock(py)?;
        let Taken { seq, worker, .. } = state.taken.queue.pop_front().ok_or_else(invalid_state)?;
        state.core.record_delivered(worker);
        let prepared = ahead.batches.pop_front();
        let found = self.hand_out(&mut state, callbacks, (seq, worker), data);
        drop(state);
        drop(prepared);
        found
    }

    /// Prepares the batch at this position. The prepared batch decides from then on how long it needs the slot.
    fn prepare_at(&self, ahead: &mut Ahead, at: usize, prepare: &Bound<'_, PyAny>) -> PyResult<()> {
        let found = ahead.batches[at].bind(prepare.py());
        if found.is_exact_instance_of::<Arrival>() {
            let begun = self.begin_placed();
            ahead.batches[at] = prepare.call1((found,))?.unbind();
            self.end_placed(prepare.py(), at, begun)?;
        }
        Ok(())
    }

    /// Takes the next batch, and reads no index for it. False if there is none now. It waits for one if there is no
    /// other.
    ///
    /// The scheduler's counts and the batches ahead change together: a signal handler that raises runs before or after.
    fn take(&self, ahead: &mut Ahead, callbacks: &Callbacks<'_, '_>) -> PyResult<bool> {
        let py = callbacks.py();
        let mut state = self.lock(py)?;
        let state = &mut *state;
        let wait = ahead.batches.is_empty();
        if wait {
            // Batches that are no longer ahead were given up.
            state.taken.queue.clear();
        }
        if let Some(end) = state.taken.end {
            if !wait {
                return Ok(false);
            }
            state.taken.end = None;
            self.end_worker(state, callbacks, end)?;
        }
        let (_, received, _) = state.core.positions();
        let arrival = |delivery| E::arrival(&self.engine, py, delivery, self.iterable);
        let found = self.advance(state, callbacks, wait, arrival)?;
        let Some(Due { seq, worker, data }) = found else { return Ok(false) };
        let arrival = match data.cast_into::<Arrival>() {
            Ok(arrival) => arrival,
            Err(other) => Bound::new(py, Arrival::of_object(other.into_inner().unbind()))?,
        };
        ahead.batches.push_back(arrival.into_any().unbind());
        state.taken.queue.push_back(Taken { seq, worker, received });
        Ok(true)
    }

    /// Gives up what is ahead, for another epoch.
    pub(super) fn forget_placed(&self, placement: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = placement.py();
        self.check_process()?;
        let mut ahead = self.ahead.lock(py, BUSY)?;
        placement.call_method0(strings::abandon(py))?;
        let left = std::mem::take(&mut ahead.batches);
        drop(ahead);
        drop(left);
        Ok(())
    }

    /// Gives up what is ahead, and ends `placement`, after a call for a batch in another thread has come back. If that
    /// call does not come back soon, or this thread is inside such a call, this ends `placement` at once, and the call
    /// for a batch ends it again when it comes back.
    ///
    /// INVARIANT: this counts, and then tries the lock. A call for a batch releases the lock, and then looks at the
    /// count. The lock's own mutex orders the two: either this gets the lock, or that call finds the count changed.
    pub(super) fn close_placed(&self, placement: &Bound<'_, PyAny>) -> PyResult<()> {
        self.check_process()?;
        let held = self.ahead.lock_within(placement.py(), PATIENCE);
        let (mut ahead, interrupted) = match held {
            Ok(ahead) => (ahead, Ok(())),
            Err(interrupt) => (None, Err(interrupt)),
        };
        if ahead.is_none() {
            self.closes.fetch_add(1, Ordering::Relaxed);
            ahead = self.ahead.lock_within(placement.py(), Duration::ZERO).unwrap_or(None);
        }
        let ended = end(placement);
        let left = ahead.as_mut().map(|ahead| std::mem::take(&mut ahead.batches));
        drop(ahead);
        drop(left);
        interrupted.and(ended)
    }
}

/// Ends a placement, also where an interrupt comes meanwhile: what waits for copies in it must not be left out.
fn end(placement: &Bound<'_, PyAny>) -> PyResult<()> {
    let py = placement.py();
    let mut ended = Ok(());
    for name in [strings::abandon(py), strings::close(py)] {
        let mut called = placement.call_method0(name);
        if let Err(interrupt) = &called
            && !interrupt.is_instance_of::<PyException>(py)
        {
            ended = ended.and(called.map(drop));
            called = placement.call_method0(name);
        }
        ended = ended.and(called.map(drop));
    }
    ended
}
