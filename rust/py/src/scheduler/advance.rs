//! From one batch to the next: waiting, what ended workers left, errors in their turn, the next task.

use std::time::Duration;

use pyo3::exceptions::{PyException, PyRuntimeError, PyStopIteration};
use pyo3::prelude::*;
use ringloader_core::os::clock::monotonic;
use ringloader_core::scheduler::Poll;
use ringloader_core::sync::Ordering;
use ringloader_core::transport::Transport;

use super::features::{ParentEnd, Watched};
use super::parent_end::{DeliveryOf, IndexOf};
use super::{Core, Due, End, EpochState, Scheduling, invalid_state, is_end};
use crate::gil::{Deadline, exception};
use crate::python::Callbacks;
use crate::strings;
use crate::torch::names::Torch;
use crate::transport::event::stand_in;

/// The outcome of one step towards the next batch.
enum Step<'py> {
    /// A result whose turn it is.
    Due(Due<'py>),
    /// There is nothing now, or it is kept for its turn.
    Nothing,
    /// Something has come that is no batch, or whose turn it is not.
    Again,
}

impl<E: ParentEnd> Scheduling<E> {
    /// Returns the next result whose turn it is, as `unpack` makes it. `None` if there is none now and `wait` is not
    /// given. Without `wait`, anything that must be raised in its turn is left for its turn.
    pub(super) fn advance<'py>(
        &self,
        state: &mut EpochState<IndexOf<E>>,
        callbacks: &Callbacks<'_, 'py>,
        wait: bool,
        unpack: impl Fn(DeliveryOf<E>) -> PyResult<Bound<'py, PyAny>>,
    ) -> PyResult<Option<Due<'py>>> {
        let engine = E::core(&self.engine).ok();
        let mut deadline = Deadline::after(self.timeout)?;
        let mut watched = None;
        loop {
            self.check_stopped()?;
            let step = match state.core.poll(engine.as_deref()).map_err(exception)? {
                Poll::End | Poll::Lost { .. } | Poll::Wait { .. } if !wait => Step::Nothing,
                Poll::End => {
                    // Only an engine that has no other user can be kept for the next epoch.
                    drop(engine);
                    return Err(self.end(callbacks)?);
                }
                Poll::Ready { seq, worker, data } => {
                    let data = data.into_bound(callbacks.py());
                    if self.iterable && is_end(&data)? {
                        self.reach_end(state, callbacks, wait, End::Stored(worker))?
                    } else {
                        Step::Due(Due { seq, worker, data })
                    }
                }
                Poll::Failed { seq, error } => {
                    self.fail(callbacks.py(), &mut state.core, seq, exception(error))?
                }
                Poll::Early { seq, found } => {
                    self.store_early(callbacks.py(), state, seq, found, &unpack)?;
                    continue;
                }
                Poll::Arrived { seq, received } => {
                    self.arrived(state, callbacks, wait, seq, received, &unpack)?
                }
                Poll::Lost { worker } => self.lost(state, callbacks, engine.as_deref(), worker)?,
                Poll::Wait { worker, limit } => {
                    let engine = engine.as_deref().ok_or_else(invalid_state)?;
                    self.wait(state, callbacks, engine, (worker, limit), deadline, &mut watched)?;
                    continue;
                }
            };
            match step {
                Step::Due(due) => return Ok(Some(due)),
                Step::Nothing => return Ok(None),
                Step::Again => deadline = Deadline::after(self.timeout)?,
            }
        }
    }

    /// The result of `seq` has come.
    fn arrived<'py>(
        &self,
        state: &mut EpochState<IndexOf<E>>,
        callbacks: &Callbacks<'_, 'py>,
        wait: bool,
        seq: u64,
        delivery: DeliveryOf<E>,
        unpack: impl Fn(DeliveryOf<E>) -> PyResult<Bound<'py, PyAny>>,
    ) -> PyResult<Step<'py>> {
        let py = callbacks.py();
        let timed = self.begin_timed(&delivery);
        match unpack(delivery) {
            Err(error) => self.fail(py, &mut state.core, seq, error),
            Ok(data) if self.iterable && is_end(&data)? => {
                self.reach_end(state, callbacks, wait, End::Answer(seq))
            }
            Ok(data) => {
                self.end_timed(py, state, seq, timed);
                accept(&mut state.core, seq, data)
            }
        }
    }

    /// A worker has ended before its tasks.
    fn lost<'py>(
        &self,
        state: &mut EpochState<IndexOf<E>>,
        callbacks: &Callbacks<'_, 'py>,
        engine: Option<&E::Core>,
        worker: u32,
    ) -> PyResult<Step<'py>> {
        // Another thread, or a signal handler, ends the workers.
        let engine = engine.filter(|_| !E::is_done(&self.engine)).ok_or_else(invalid_state)?;
        self.replace_lost(state, callbacks, engine, worker)?;
        Ok(Step::Again)
    }

    /// Waits for a result of the worker, or of any, for no longer than the limit and until the deadline.
    fn wait(
        &self,
        state: &mut EpochState<IndexOf<E>>,
        callbacks: &Callbacks<'_, '_>,
        engine: &E::Core,
        (worker, limit): (Option<u32>, Duration),
        deadline: Deadline,
        watched: &mut Option<Watched>,
    ) -> PyResult<()> {
        let py = callbacks.py();
        let Some(left) = deadline.left() else {
            callbacks.raise_timeout(Self::late(py, state, engine, worker))?;
            return Err(PyRuntimeError::new_err("DataLoader timed out"));
        };
        let Some(until_told) = Self::report_wait(watched, state, callbacks, engine, worker)? else {
            return Ok(());
        };
        let begun = monotonic();
        let woken = E::wait(py, engine, worker, left.min(limit).min(until_told));
        self.waited.fetch_add(monotonic().saturating_sub(begun), Ordering::Relaxed);
        woken?;
        E::core(&self.engine).map(drop).map_err(|_| invalid_state())
    }

    /// The end of a worker's iterable dataset has come. Without `wait` it is kept for its turn.
    fn reach_end<'py>(
        &self,
        state: &mut EpochState<IndexOf<E>>,
        callbacks: &Callbacks<'_, 'py>,
        wait: bool,
        end: End,
    ) -> PyResult<Step<'py>> {
        if wait {
            self.end_worker(state, callbacks, end)?;
            return Ok(Step::Again);
        }
        state.taken.end = Some(end);
        Ok(Step::Nothing)
    }

    /// A worker has nothing more of its iterable dataset.
    pub(super) fn end_worker(
        &self,
        state: &mut EpochState<IndexOf<E>>,
        callbacks: &Callbacks<'_, '_>,
        end: End,
    ) -> PyResult<()> {
        let worker = match end {
            End::Answer(seq) => state.core.end_worker(seq).map_err(exception)?,
            End::Stored(worker) => {
                state.core.give_up(worker);
                state.ends_stored.retain(|&stored| stored != worker);
                worker
            }
        };
        callbacks.note_exhausted(worker)?;
        self.send_one(state, callbacks)
    }

    /// The epoch is over. Returns what to raise.
    fn end(&self, callbacks: &Callbacks<'_, '_>) -> PyResult<PyErr> {
        callbacks.end_epoch()?;
        Ok(PyStopIteration::new_err(()))
    }

    /// The result of `seq` has come and cannot be read: its error takes its place. As [`Core::accept`].
    ///
    /// # Errors
    /// An error that ends or interrupts the program is raised at once, and reported again in the batch's turn.
    fn fail<'py>(&self, py: Python<'py>, core: &mut Core, seq: u64, error: PyErr) -> PyResult<Step<'py>> {
        let (standing, interrupt) = stand_in(py, error)?;
        match interrupt {
            None => accept(core, seq, standing),
            Some(interrupt) => {
                core.buffer(seq, standing.unbind()).map_err(exception)?;
                Err(interrupt)
            }
        }
    }

    /// MIRRORS torch dataloader.py::_process_data. What reading the index raises replaces the batch.
    pub(super) fn hand_out<'py>(
        &self,
        state: &mut EpochState<IndexOf<E>>,
        callbacks: &Callbacks<'_, 'py>,
        of: (u64, u32),
        data: Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = callbacks.py();
        self.note_early(py, state);
        let sent = self.send_one(state, callbacks);
        // A batch that an interrupt takes from the caller is not passed.
        if sent.as_ref().err().is_none_or(|error| error.is_instance_of::<PyException>(py)) {
            state.source.get().record_got(of.0, of.1);
        }
        sent?;
        // By its type: `isinstance` would ask every batch for `__class__` too, which a user's class may answer.
        if data.get_type().is_subclass(Torch::get(py)?.exception_wrapper.bind(py))? {
            data.call_method0(strings::reraise(py)).inspect_err(|error| forget_locals(py, error))?;
        }
        Ok(data)
    }

    /// MIRRORS torch dataloader.py::_try_put_index.
    pub(super) fn send_one(
        &self,
        state: &mut EpochState<IndexOf<E>>,
        callbacks: &Callbacks<'_, '_>,
    ) -> PyResult<()> {
        self.send_one_by(state, callbacks, |engine, worker, seq, index| engine.put_task(worker, seq, index))
    }

    /// As [`send_one`](Self::send_one), with a way to send the task to a worker.
    pub(super) fn send_one_by(
        &self,
        state: &mut EpochState<IndexOf<E>>,
        callbacks: &Callbacks<'_, '_>,
        put: impl FnOnce(&E::Core, u32, u64, IndexOf<E>) -> ringloader_core::Result<()>,
    ) -> PyResult<()> {
        if state.core.is_full() {
            return Self::pass_limit(state);
        }
        if self.sends_next(state) {
            return Ok(());
        }
        let begun = self.begin_index(state.source.get().is_native());
        let Some(index) = E::read(state.source.get(), callbacks, state.features.sent.keeps())? else {
            state.at_end = true;
            return Ok(());
        };
        self.end_index(begun);
        // After shutdown there is no worker left, and as in torch the index is lost.
        let Ok(engine) = E::core(&self.engine) else {
            state.source.get().lose_last();
            return Ok(());
        };
        if state.features.sent.keeps() {
            state.features.sent.insert(&state.core, E::clone_index(&index, callbacks.py()));
        }
        let put = |worker, seq| put(&engine, worker, seq, index);
        let sent = state.core.send_by(&*engine, put).map_err(exception);
        match sent {
            Ok(Some(worker)) => state.source.get().record_sent(worker),
            _ => state.source.get().lose_last(),
        }
        sent.map(drop)
    }
}

/// As [`Core::accept`].
fn accept<'py>(core: &mut Core, seq: u64, data: Bound<'py, PyAny>) -> PyResult<Step<'py>> {
    let py = data.py();
    let due = core.accept(seq, data.unbind()).map_err(exception)?;
    Ok(due.map_or(Step::Again, |(worker, data)| Step::Due(Due { seq, worker, data: data.into_bound(py) })))
}

/// Clears the frame of torch's `reraise`. It has the error in a local variable, and the error has the frame in its
/// traceback: in this cycle the caller's frames, and so the iterator with its workers, would wait for the collector.
fn forget_locals(py: Python<'_>, error: &PyErr) {
    if let Some(traceback) = error.traceback(py) {
        let cleared =
            traceback.getattr(strings::tb_frame(py)).and_then(|frame| frame.call_method0(strings::clear(py)));
        // Only the error that was raised matters, and not a failure to clear the frame.
        drop(cleared);
    }
}
