//! From one batch to the next: waiting, what ended workers left, errors in their turn, the next task.

use pyo3::exceptions::{PyException, PyRuntimeError, PyStopIteration};
use pyo3::prelude::*;
use ringloader_core::os::clock::monotonic;
use ringloader_core::scheduler::Poll;
use ringloader_core::sync::Ordering;
use ringloader_core::transport::Transport;

use super::features::ParentEnd;
use super::parent_end::{DeliveryOf, IndexOf};
use super::{Core, Due, End, EpochState, Scheduling, invalid_state, is_end};
use crate::gil::{Deadline, exception};
use crate::python::Callbacks;
use crate::strings;
use crate::torch::names::Torch;
use crate::transport::event::stand_in;

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
        let py = callbacks.py();
        let engine = E::core(&self.engine).ok();
        let mut deadline = Deadline::after(self.timeout)?;
        let mut watched = None;
        loop {
            self.check_stopped()?;
            let due = match state.core.poll(engine.as_deref()).map_err(exception)? {
                Poll::End | Poll::Lost { .. } | Poll::Wait { .. } if !wait => return Ok(None),
                Poll::End => {
                    // Only an engine that has no other user can be kept for the next epoch.
                    drop(engine);
                    return Err(self.end(callbacks)?);
                }
                Poll::Ready { seq, worker, data } => {
                    let data = data.into_bound(py);
                    if !self.iterable || !is_end(&data)? {
                        return Ok(Some(Due { seq, worker, data }));
                    }
                    if !self.reach_end(state, callbacks, wait, End::Stored(worker))? {
                        return Ok(None);
                    }
                    None
                }
                Poll::Failed { seq, error } => self.fail(py, &mut state.core, seq, exception(error))?,
                Poll::Early { seq, found } => {
                    self.store_early(py, state, seq, found, &unpack)?;
                    continue;
                }
                Poll::Arrived { seq, received: delivery } => {
                    let timed = self.begin_timed(&delivery);
                    match unpack(delivery) {
                        Err(error) => self.fail(py, &mut state.core, seq, error)?,
                        Ok(data) if self.iterable && is_end(&data)? => {
                            if !self.reach_end(state, callbacks, wait, End::Answer(seq))? {
                                return Ok(None);
                            }
                            None
                        }
                        Ok(data) => {
                            self.end_timed(py, state, seq, timed);
                            accept(&mut state.core, seq, data)?
                        }
                    }
                }
                Poll::Lost { worker } => {
                    // Another thread, or a signal handler, ends the workers.
                    if E::is_done(&self.engine) {
                        return Err(invalid_state());
                    }
                    let Some(core) = &engine else { return Err(invalid_state()) };
                    self.replace_lost(state, callbacks, core, worker)?;
                    None
                }
                Poll::Wait { worker, limit } => {
                    let Some(engine) = &engine else { return Err(invalid_state()) };
                    let Some(left) = deadline.left() else {
                        callbacks.raise_timeout(Self::late(py, state, engine, worker))?;
                        return Err(PyRuntimeError::new_err("DataLoader timed out"));
                    };
                    let told = Self::report_wait(&mut watched, state, callbacks, engine, worker)?;
                    let Some(until_told) = told else { continue };
                    let begun = monotonic();
                    let woken = E::wait(py, engine, worker, left.min(limit).min(until_told));
                    self.waited.fetch_add(monotonic().saturating_sub(begun), Ordering::Relaxed);
                    woken?;
                    if E::core(&self.engine).is_err() {
                        return Err(invalid_state());
                    }
                    continue;
                }
            };
            if due.is_some() {
                return Ok(due);
            }
            deadline = Deadline::after(self.timeout)?;
        }
    }

    /// The end of a worker's iterable dataset has come. Returns false if it is kept for its turn, without `wait`.
    fn reach_end(
        &self,
        state: &mut EpochState<IndexOf<E>>,
        callbacks: &Callbacks<'_, '_>,
        wait: bool,
        end: End,
    ) -> PyResult<bool> {
        if wait {
            self.end_worker(state, callbacks, end)?;
        } else {
            state.taken.end = Some(end);
        }
        Ok(wait)
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
    fn fail<'py>(
        &self,
        py: Python<'py>,
        core: &mut Core,
        seq: u64,
        error: PyErr,
    ) -> PyResult<Option<Due<'py>>> {
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
fn accept<'py>(core: &mut Core, seq: u64, data: Bound<'py, PyAny>) -> PyResult<Option<Due<'py>>> {
    let py = data.py();
    let due = core.accept(seq, data.unbind()).map_err(exception)?;
    Ok(due.map(|(worker, data)| Due { seq, worker, data: data.into_bound(py) }))
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
