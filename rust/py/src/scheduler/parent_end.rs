//! The parent's end of a transport, as the scheduler uses it: a Python class.

use std::time::Duration;

use pyo3::PyClass;
use pyo3::prelude::*;
use pyo3::pyclass::boolean_struct::True;
use ringloader_core::batch::Token;
use ringloader_core::sync::Arc;
use ringloader_core::transport::Transport;
use ringloader_core::transport::engine::Engine as CoreEngine;
use ringloader_core::transport::joint::JointTasks;
use ringloader_core::transport::message::TaskIndex;
use ringloader_core::transport::queues::Reply;
use ringloader_core::transport::received::Received;

use crate::caught::caught;
use crate::gil::{exception, wait, wait_for_threads};
use crate::placement::arrival::Arrival;
use crate::python::Callbacks;
use crate::sampling::codec::{decode_index, encode_index};
use crate::sampling::source::IndexSource;
use crate::transport::claimed::{Core as CoreQueues, Index, Made};
use crate::transport::engine::Engine;
use crate::transport::queues::ThreadQueues;

/// The delivery of a [`TransportEnd`].
pub(crate) type DeliveryOf<E> = <<E as TransportEnd>::Core as Transport>::Received;

/// The index that a task of a [`TransportEnd`] asks for.
pub(crate) type IndexOf<E> = <<E as TransportEnd>::Core as Transport>::Index;

/// The parent's end of a transport, as a Python class.
pub(crate) trait TransportEnd: PyClass<Frozen = True> + Sync {
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

    /// Waits for the next event without the interpreter, then lets signal handlers run.
    ///
    /// # Errors
    /// The error of the transport, or the one that a signal handler raises.
    fn wait(py: Python<'_>, core: &Self::Core, only: Option<u32>, limit: Duration) -> PyResult<()>;
}

/// A [`TransportEnd`] of rings.
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

    /// Returns the tasks that all workers share, if they share them.
    fn joint(_core: &Self::Core) -> Option<&JointTasks> {
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
}

impl<R: RingEnd> TransportEnd for R {
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

    fn read(source: &IndexSource, callbacks: &Callbacks<'_, '_>, again: bool) -> PyResult<Option<TaskIndex>> {
        source.read(callbacks, again || R::DECODES_AGAIN)
    }

    fn clone_index(index: &TaskIndex, _py: Python<'_>) -> TaskIndex {
        index.clone()
    }

    fn index<'py>(py: Python<'py>, (kind, bytes): &TaskIndex) -> PyResult<Bound<'py, PyAny>> {
        decode_index(py, *kind, bytes)
    }

    fn wait(py: Python<'_>, core: &R::Core, only: Option<u32>, limit: Duration) -> PyResult<()> {
        wait(py, R::rings(core), only, limit)
    }
}

/// Bytes of the pickle of the end of an iterable dataset, at most: a class by its name, and a small number.
const LONGEST_END: usize = 1024;

fn may_be_end(token: Token<'_>) -> bool {
    matches!(token, Token::Pickle(bytes) if bytes.len() <= LONGEST_END)
}

impl TransportEnd for ThreadQueues {
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

    fn wait(py: Python<'_>, core: &CoreQueues, only: Option<u32>, limit: Duration) -> PyResult<()> {
        wait_for_threads(py, core, only, limit)
    }
}
