//! The parent's end of a transport, as the scheduler uses it: a Python class.

use std::time::Duration;

use pyo3::PyClass;
use pyo3::prelude::*;
use pyo3::pyclass::boolean_struct::True;
use ringloader_core::batch::Token;
use ringloader_core::sync::Arc;
use ringloader_core::timing::Stamps;
use ringloader_core::transport::Transport;
use ringloader_core::transport::engine::Engine as CoreEngine;
use ringloader_core::transport::message::{TaskIndex, TaskKind};
use ringloader_core::transport::queues::Reply;
use ringloader_core::transport::received::Received;
use ringloader_core::transport::run_times::TimedRun;

use crate::caught::caught;
use crate::gil::{exception, wait, wait_for_threads};
use crate::placement::arrival::Arrival;
use crate::python::Callbacks;
use crate::sampling::codec::{decode_index, encode_index};
use crate::sampling::places;
use crate::sampling::source::IndexSource;
use crate::transport::claimed::Index;
use crate::transport::engine::Engine;
use crate::transport::queues::{Core as CoreQueues, Made, ThreadQueues};

/// In each pickle that has what torch sends of a tensor to another process.
const REDUCTIONS: &[u8] = b"torch.multiprocessing.reductions";

/// The delivery of a [`ParentEnd`].
pub(crate) type DeliveryOf<E> = <<E as ParentEnd>::Core as Transport>::Received;

/// The index that a task of a [`ParentEnd`] asks for.
pub(crate) type IndexOf<E> = <<E as ParentEnd>::Core as Transport>::Index;

/// The parent's end of a transport, as a Python class.
pub(crate) trait ParentEnd: PyClass<Frozen = True> + Sync {
    /// The transport.
    type Core: Transport<Index: Send>;

    /// # Errors
    /// Once it is closed.
    fn core(this: &Py<Self>) -> PyResult<Arc<Self::Core>>;

    /// Returns true if nothing more is wanted of the workers.
    fn is_done(this: &Py<Self>) -> bool;

    /// Ends the wait of a thread that is in [`wait`](Self::wait), or comes there next. Does nothing once it is closed.
    ///
    /// # Errors
    /// In a forked child.
    fn end_wait(this: &Py<Self>) -> PyResult<()>;

    /// The object that a delivery carries.
    ///
    /// # Errors
    /// The reason why it is lost.
    fn unpack<'py>(
        this: &Py<Self>,
        py: Python<'py>,
        delivery: DeliveryOf<Self>,
    ) -> PyResult<Bound<'py, PyAny>>;

    /// A delivery as an [`Arrival`], or unpacked; in any case unpacked if it may be the end of an iterable dataset.
    ///
    /// # Errors
    /// The reason why it is lost.
    fn arrival<'py>(
        this: &Py<Self>,
        py: Python<'py>,
        delivery: DeliveryOf<Self>,
        iterable: bool,
    ) -> PyResult<Bound<'py, PyAny>>;

    /// Returns the worker that has made a delivery, and the batch's moments there, if they were noted.
    fn stamps(delivery: &DeliveryOf<Self>) -> Option<(u32, Stamps)>;

    /// Takes the runs of a delivery that all workers have made, if they are timed.
    fn take_runs(_core: &Self::Core, _delivery: &DeliveryOf<Self>) -> Vec<TimedRun> {
        Vec::new()
    }

    /// Returns the numbers that an index consists of, as little-endian int64; `None` for an index of any other kind.
    fn numbers(index: &IndexOf<Self>) -> Option<&[u8]>;

    /// Reads the next index; `None` at the sampler's end. `again`: it may be sent and decoded more than once.
    ///
    /// # Errors
    /// The error that the sampler raises.
    fn read(
        source: &IndexSource,
        callbacks: &Callbacks<'_, '_>,
        again: bool,
    ) -> PyResult<Option<IndexOf<Self>>>;

    /// Returns the same index again, for errors that name it.
    fn clone_index(index: &IndexOf<Self>, py: Python<'_>) -> IndexOf<Self>;

    /// The object that an index is to the worker.
    ///
    /// # Errors
    /// The error that unpickling raises.
    fn index<'py>(py: Python<'py>, index: &IndexOf<Self>) -> PyResult<Bound<'py, PyAny>>;

    /// The task that `worker` took last, as it was sent, and its index; `None` where that is not known.
    fn in_hand(core: &Self::Core, worker: u32) -> Option<(u64, IndexOf<Self>)>;

    /// Returns the task that each busy worker makes samples of, with its index, where all workers share the tasks.
    fn all_in_hand(_core: &Self::Core, _py: Python<'_>) -> Option<Vec<(u32, u64, IndexOf<Self>)>> {
        None
    }

    /// Returns true if a worker runs on another machine: nobody knows which task it took last.
    fn is_elsewhere(core: &Self::Core, worker: u32) -> bool;

    /// Waits for the next event without the interpreter, then lets signal handlers run.
    ///
    /// # Errors
    /// The error of the transport, or the one that a signal handler raises.
    fn wait(py: Python<'_>, core: &Self::Core, only: Option<u32>, limit: Duration) -> PyResult<()>;
}

/// A [`ParentEnd`] of rings.
pub(crate) trait RingEnd: PyClass<Frozen = True> + Sync {
    type Core: Transport<Index = TaskIndex, Received = Received>;
    /// More than one worker decodes the index of a batch.
    const DECODES_AGAIN: bool;

    /// Returns the class of the rings.
    fn engine(this: &Py<Self>) -> &Py<Engine>;

    /// Returns the rings.
    fn rings(core: &Self::Core) -> &CoreEngine;

    /// # Errors
    /// Once it is closed.
    fn core(&self) -> PyResult<Arc<Self::Core>>;

    /// As [`ParentEnd::take_runs`].
    fn take_runs(_core: &Self::Core, _seq: u64) -> Vec<TimedRun> {
        Vec::new()
    }

    /// As [`ParentEnd::in_hand`].
    fn in_hand(core: &Self::Core, worker: u32) -> Option<(u64, TaskIndex)>;

    /// As [`ParentEnd::all_in_hand`].
    fn all_in_hand(_core: &Self::Core) -> Option<Vec<(u32, u64, TaskIndex)>> {
        None
    }
}

impl RingEnd for Engine {
    type Core = CoreEngine;
    const DECODES_AGAIN: bool = false;

    fn engine(this: &Py<Self>) -> &Py<Engine> {
        this
    }

    fn rings(core: &CoreEngine) -> &CoreEngine {
        core
    }

    fn core(&self) -> PyResult<Arc<CoreEngine>> {
        self.core()
    }

    fn in_hand(core: &CoreEngine, worker: u32) -> Option<(u64, TaskIndex)> {
        let task = core.in_hand(worker).ok().flatten()?;
        let (kind, bytes) = match task.kind {
            TaskKind::Seeded => {
                places::split(&task.bytes).map(|(_, kind, bytes)| (kind, bytes.to_vec())).ok()?
            }
            kind => (kind, task.bytes),
        };
        // Messages and calls have no number.
        let asks = matches!(
            kind,
            TaskKind::Indices | TaskKind::Index | TaskKind::Nones | TaskKind::PickledIndex | TaskKind::None
        );
        // A tensor that torch sends in its own way can be taken only once, and not here.
        let once =
            kind == TaskKind::PickledIndex && bytes.windows(REDUCTIONS.len()).any(|part| part == REDUCTIONS);
        (asks && !once).then_some((task.seq, (kind, bytes)))
    }
}

impl<R: RingEnd> ParentEnd for R {
    type Core = R::Core;

    fn core(this: &Py<R>) -> PyResult<Arc<R::Core>> {
        RingEnd::core(this.get())
    }

    fn is_done(this: &Py<R>) -> bool {
        R::engine(this).get().is_done()
    }

    fn end_wait(this: &Py<R>) -> PyResult<()> {
        if let Ok(core) = R::engine(this).get().core() {
            core.wake();
        }
        Ok(())
    }

    fn unpack<'py>(this: &Py<R>, py: Python<'py>, delivery: Received) -> PyResult<Bound<'py, PyAny>> {
        R::engine(this).get().unpack(py, delivery)
    }

    fn arrival<'py>(
        this: &Py<R>,
        py: Python<'py>,
        delivery: Received,
        iterable: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        let engine = R::engine(this);
        if iterable {
            // The end of an iterable dataset is a small pickle.
            let root = delivery.meta().and_then(|meta| meta.skeleton().next_token().map(may_be_end));
            if root.map_err(exception)? {
                return engine.get().unpack(py, delivery);
            }
        }
        caught(py, || {
            engine.get().log_if_oversize(py, &delivery)?;
            let arrival = Arrival::of_delivery(engine.clone_ref(py), delivery);
            Ok(Bound::new(py, arrival)?.into_any())
        })
    }

    fn stamps(delivery: &Received) -> Option<(u32, Stamps)> {
        Some((delivery.worker, delivery.stamps()?))
    }

    fn take_runs(core: &R::Core, delivery: &Received) -> Vec<TimedRun> {
        R::take_runs(core, delivery.seq)
    }

    fn numbers(index: &TaskIndex) -> Option<&[u8]> {
        numbers(index)
    }

    fn read(source: &IndexSource, callbacks: &Callbacks<'_, '_>, again: bool) -> PyResult<Option<TaskIndex>> {
        source.read(callbacks, again || R::DECODES_AGAIN)
    }

    fn clone_index(index: &TaskIndex, _py: Python<'_>) -> TaskIndex {
        index.clone()
    }

    fn index<'py>(py: Python<'py>, (kind, bytes): &TaskIndex) -> PyResult<Bound<'py, PyAny>> {
        decode_index(py, *kind, bytes)
    }

    fn in_hand(core: &R::Core, worker: u32) -> Option<(u64, TaskIndex)> {
        R::in_hand(core, worker)
    }

    fn all_in_hand(core: &R::Core, _py: Python<'_>) -> Option<Vec<(u32, u64, TaskIndex)>> {
        R::all_in_hand(core)
    }

    fn is_elsewhere(core: &R::Core, worker: u32) -> bool {
        R::rings(core).is_relayed(worker)
    }

    fn wait(py: Python<'_>, core: &R::Core, only: Option<u32>, limit: Duration) -> PyResult<()> {
        wait(py, R::rings(core), only, limit)
    }
}

/// Bytes of the pickle of the end of an iterable dataset, at most: a class by its name, and a small number.
const LONGEST_END: usize = 1024;

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

fn may_be_end(token: Token<'_>) -> bool {
    matches!(token, Token::Pickle(bytes) if bytes.len() <= LONGEST_END)
}

impl ParentEnd for ThreadQueues {
    type Core = CoreQueues;

    fn core(this: &Py<Self>) -> PyResult<Arc<CoreQueues>> {
        this.get().core()
    }

    fn is_done(this: &Py<Self>) -> bool {
        this.get().is_done()
    }

    fn end_wait(this: &Py<Self>) -> PyResult<()> {
        this.get().core().map_or(Ok(()), |core| core.wake().map_err(exception))
    }

    fn unpack<'py>(_this: &Py<Self>, py: Python<'py>, reply: Reply<Made>) -> PyResult<Bound<'py, PyAny>> {
        Ok(reply.content.object.into_bound(py))
    }

    fn arrival<'py>(
        _this: &Py<Self>,
        py: Python<'py>,
        reply: Reply<Made>,
        _iterable: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        Ok(reply.content.object.into_bound(py))
    }

    fn stamps(reply: &Reply<Made>) -> Option<(u32, Stamps)> {
        reply.content.stamps.as_deref().copied()
    }

    fn take_runs(_core: &CoreQueues, reply: &Reply<Made>) -> Vec<TimedRun> {
        reply.content.runs.clone()
    }

    fn numbers(index: &Index) -> Option<&[u8]> {
        match index {
            Index::Plain(plain) => numbers(plain),
            Index::Placed(index, _) => Self::numbers(index),
            Index::Object(_) => None,
        }
    }

    fn read(source: &IndexSource, callbacks: &Callbacks<'_, '_>, again: bool) -> PyResult<Option<Index>> {
        let read = source.read_as(callbacks, again, Index::Plain, |index| {
            // The worker gets a new list of plain ints, as a process does: the sampler may use its own list again.
            Ok(encode_index(index)?.map_or_else(|| Index::Object(index.clone().unbind()), Index::Plain))
        })?;
        Ok(read.map(|(index, places)| match places {
            None => index,
            Some(places) => Index::Placed(Box::new(index), places),
        }))
    }

    fn clone_index(index: &Index, py: Python<'_>) -> Index {
        index.clone_ref(py)
    }

    fn index<'py>(py: Python<'py>, index: &Index) -> PyResult<Bound<'py, PyAny>> {
        index.plain(py)
    }

    fn in_hand(_core: &CoreQueues, _worker: u32) -> Option<(u64, Index)> {
        None
    }

    fn all_in_hand(core: &CoreQueues, py: Python<'_>) -> Option<Vec<(u32, u64, Index)>> {
        let tasks = core.all_in_hand().ok().flatten()?;
        Some(tasks.iter().map(|(worker, seq, index)| (*worker, *seq, index.clone_ref(py))).collect())
    }

    fn is_elsewhere(_core: &CoreQueues, _worker: u32) -> bool {
        false
    }

    fn wait(py: Python<'_>, core: &CoreQueues, only: Option<u32>, limit: Duration) -> PyResult<()> {
        wait_for_threads(py, core, only, limit)
    }
}
