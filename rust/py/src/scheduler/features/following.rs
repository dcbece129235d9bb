//! The epoch that follows: its first tasks go out while batches of this one still come.

use std::collections::{BTreeMap, VecDeque};

use pyo3::prelude::*;
use ringloader_core::transport::Transport;

use super::timed::Made;
use super::{Features, ParentEnd};
use crate::gil::exception;
use crate::python::Callbacks;
use crate::sampling::source::IndexSource;
use crate::scheduler::parent_end::{DeliveryOf, IndexOf};
use crate::scheduler::{Core, EpochState, Scheduling};
use crate::transport::event::stand_in;

/// The epoch that follows the one of a [`EpochState`].
pub(super) struct Following<I> {
    core: Core,
    source: Py<IndexSource>,
    sent: BTreeMap<u64, I>,
    at_end: bool,
    /// Tasks that are sent as batches of the epoch before are handed out: each with its worker and its number. So no more
    /// are out than in the middle of an epoch. Only where all workers share all tasks.
    held: VecDeque<(u32, u64, I)>,
    /// The moments of results that have come.
    early: Vec<(u64, Made)>,
    /// True once a worker was lost with some of its tasks: then this epoch never begins.
    is_lost: bool,
}

impl<I> Following<I> {
    pub(super) fn source(&self) -> &Py<IndexSource> {
        &self.source
    }

    /// Exchanges the parts of this epoch and of the epoch in `state`.
    fn swap(&mut self, state: &mut EpochState<I>) {
        std::mem::swap(&mut self.core, &mut state.core);
        std::mem::swap(&mut self.source, &mut state.source);
        state.features.sent.swap(&mut self.sent);
        std::mem::swap(&mut self.at_end, &mut state.at_end);
    }

    /// Sends the next task that was held. The error of one that cannot be sent comes again
    /// when this epoch begins again.
    fn send_held(&mut self, transport: &impl Transport<Index = I>) {
        if let Some((worker, seq, index)) = self.held.pop_front()
            && transport.put_task(worker, seq, index).is_err()
        {
            self.is_lost = true;
        }
    }
}

impl<I> Features<I> {
    /// A worker is lost. If workers share tasks, the others make the tasks of this one.
    pub(super) fn lose_next(&mut self, core: &Core) {
        if let Some(following) = self.following.as_mut().filter(|_| !core.shares()) {
            following.is_lost = true;
        }
    }
}

impl<E: ParentEnd> Scheduling<E> {
    /// Returns true if another epoch's indices are read instead of this one's. Then sends the next of its tasks, if some
    /// were held.
    pub(in super::super) fn sends_next(&self, state: &mut EpochState<IndexOf<E>>) -> bool {
        let Some(following) = &mut state.features.following else { return false };
        if let Ok(engine) = E::core(&self.engine) {
            following.send_held(&*engine);
        }
        true
    }

    /// Returns true if the last read found the sampler's end, and no other epoch follows.
    pub(in super::super) fn is_at_end(&self, py: Python<'_>) -> PyResult<bool> {
        let state = self.lock(py)?;
        Ok(state.at_end && state.features.following.is_none())
    }

    /// Prepares the epoch that follows, with indices from `source`. This epoch reads no more indices.
    pub(in super::super) fn follow(&self, py: Python<'_>, source: Py<IndexSource>) -> PyResult<()> {
        let mut state = self.lock(py)?;
        let mut core = state.core.follow();
        core.begin_at(source.get().first_worker());
        let following = Following {
            core,
            source,
            sent: BTreeMap::new(),
            at_end: false,
            held: VecDeque::new(),
            early: Vec::new(),
            is_lost: false,
        };
        let before = state.features.following.replace(following);
        drop(state);
        drop(before);
        Ok(())
    }

    /// Reads one index of the epoch that follows and sends it, or holds it.
    pub(in super::super) fn put_following(&self, callbacks: &Bound<'_, PyAny>) -> PyResult<()> {
        let mut state = self.lock(callbacks.py())?;
        let Some(mut following) = state.features.following.take_if(|following| !following.is_lost) else {
            return Ok(());
        };
        let out = state.outstanding() + following.core.positions().2;
        let is_held = state.core.shares() && out >= state.core.most_tasks();
        following.swap(&mut state);
        let held = &mut following.held;
        let sent = self.send_one_by(&mut state, &Callbacks(callbacks), |engine, worker, seq, index| {
            if is_held {
                held.push_back((worker, seq, index));
                return Ok(());
            }
            engine.put_task(worker, seq, index)
        });
        following.swap(&mut state);
        state.features.following = Some(following);
        sent
    }

    /// Begins the epoch that follows; false if there is none, or it has lost a worker. What still comes from the one
    /// before is thrown away.
    pub(in super::super) fn take_over(&self, py: Python<'_>) -> PyResult<bool> {
        let mut state = self.lock(py)?;
        let Some(mut following) = state.features.following.take_if(|following| !following.is_lost) else {
            return Ok(false);
        };
        if let Ok(engine) = E::core(&self.engine) {
            engine.begin_epoch(following.core.epoch());
            while !following.held.is_empty() {
                following.send_held(&*engine);
            }
        }
        if following.is_lost {
            // The tasks of the next epoch that are out count as thrown away.
            state.features.following = Some(following);
            return Ok(false);
        }
        following.core.continue_from(&mut state.core);
        following.swap(&mut state);
        let left = state.forget();
        state.features.early = std::mem::take(&mut following.early);
        drop(state);
        drop((left, following));
        Ok(true)
    }

    /// Keeps a result of the epoch that follows, as `unpack` makes it, until its turn. One of an epoch that was given
    /// up is dropped.
    ///
    /// # Errors
    /// An error that ends or interrupts the program is raised at once, and reported again in the batch's turn.
    pub(in super::super) fn store_early<'py>(
        &self,
        py: Python<'py>,
        state: &mut EpochState<IndexOf<E>>,
        seq: u64,
        found: ringloader_core::Result<DeliveryOf<E>>,
        unpack: impl FnOnce(DeliveryOf<E>) -> PyResult<Bound<'py, PyAny>>,
    ) -> PyResult<()> {
        let following = state.features.following.as_mut().filter(|following| !following.is_lost);
        let Some(following) = following else { return Ok(()) };
        if let Ok(delivery) = &found
            && let Some(made) = self.moments(delivery)
        {
            following.early.push((seq, made));
        }
        let (data, interrupt) = match found.map_err(exception).and_then(unpack) {
            Ok(data) => (data, None),
            Err(error) => stand_in(py, error)?,
        };
        following.core.buffer(seq, data.unbind()).map_err(exception)?;
        interrupt.map_or(Ok(()), Err)
    }
}
