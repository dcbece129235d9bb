//! The Python classes of the scheduler, one for each transport.

use pyo3::prelude::*;
use pyo3::{PyTraverseError, PyVisit};

use super::Scheduling;
use crate::sampling::source::IndexSource;
use crate::timing::Recorder;
use crate::transport::engine::Engine;
use crate::transport::joint_engine::JointEngine;
use crate::transport::queues::ThreadQueues;

/// In which order batches are returned.
#[pyclass(
    eq,
    eq_int,
    frozen,
    from_py_object,
    rename_all = "SCREAMING_SNAKE_CASE",
    module = "ringloader._native"
)]
#[derive(PartialEq, Eq, Clone, Copy)]
#[expect(clippy::enum_variant_names, reason = "the names are torch's")]
pub(crate) enum Order {
    /// In the order of their indices.
    InOrder,
    /// In the order in which they come.
    AsCompleted,
    /// In the order in which they come, with indices given to the workers in turn.
    AsCompletedRoundRobin,
}

/// The position of an epoch: torch's `_send_idx`, `_rcvd_idx` and `_tasks_outstanding`.
#[pyclass(frozen, get_all, module = "ringloader._native")]
pub(crate) struct Positions {
    pub(super) sent: u64,
    pub(super) received: u64,
    pub(super) outstanding: u64,
}

/// The Python classes of a [`Scheduling`]: there is one for each transport, so that none pays for another. They have the
/// methods of this list, which are those of [`Scheduling`].
macro_rules! scheduler_classes {
    ([$($(#[$about:meta])* $name:ident of $end:ty),* $(,)?], $methods:tt) => {
        $(scheduler_classes!(@one $(#[$about])* $name of $end, $methods);)*
    };
    (@one $(#[$about:meta])* $name:ident of $end:ty,
     { $(fn $method:ident($($argument:ident: $type:ty),*) -> $returned:ty;)* }) => {
        $(#[$about])*
        #[pyclass(frozen, module = "ringloader._native")]
        pub(crate) struct $name(Scheduling<$end>);

        #[pymethods]
        impl $name {
            #[new]
            fn new(
                engine: Py<$end>,
                source: Py<IndexSource>,
                workers: u32,
                prefetch_factor: u32,
                order: Order,
                iterable: bool,
                timeout: f64,
            ) -> Self {
                Self(Scheduling::new(engine, source, workers, prefetch_factor, order, iterable, timeout))
            }

            $(fn $method(&self, $($argument: $type),*) -> $returned {
                self.0.$method($($argument),*)
            })*

            fn next<'py>(&self, callbacks: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
                self.0.next(callbacks)
            }

            fn next_placed<'py>(
                &self,
                placement: &Bound<'py, PyAny>,
                prepare: &Bound<'py, PyAny>,
                callbacks: &Bound<'py, PyAny>,
            ) -> PyResult<Bound<'py, PyAny>> {
                self.0.next_placed(placement, prepare, callbacks)
            }

            fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
                self.0.traverse(&visit)
            }
        }
    };
}

scheduler_classes!(
    [
        /// Native scheduling over shared-memory rings.
        Scheduler of Engine,
        /// Native scheduling of tasks that all workers share, over shared-memory rings.
        JointScheduler of JointEngine,
        /// Native scheduling over queues between threads.
        ThreadScheduler of ThreadQueues,
    ],
    {
        fn keep_sent(py: Python<'_>) -> PyResult<()>;
        fn take_ahead(py: Python<'_>) -> PyResult<()>;
        fn balance(py: Python<'_>) -> PyResult<()>;
        fn use_first(py: Python<'_>, workers: u32, most: u64) -> PyResult<()>;
        fn begin_worker(py: Python<'_>, worker: u32) -> PyResult<()>;
        fn has_begun(py: Python<'_>) -> PyResult<bool>;
        fn retire(py: Python<'_>, worker: u32) -> PyResult<bool>;
        fn unanswered(py: Python<'_>) -> PyResult<Vec<u64>>;
        fn share_tasks(py: Python<'_>, most: u64) -> PyResult<()>;
        fn watch(py: Python<'_>, seconds: f64) -> PyResult<()>;
        fn record(py: Python<'_>, recorder: Py<Recorder>, decodes: bool) -> PyResult<()>;
        fn reset(py: Python<'_>, source: Py<IndexSource>) -> PyResult<()>;
        fn put_index(callbacks: &Bound<'_, PyAny>) -> PyResult<()>;
        fn is_at_end(py: Python<'_>) -> PyResult<bool>;
        fn follow(py: Python<'_>, source: Py<IndexSource>) -> PyResult<()>;
        fn put_following(callbacks: &Bound<'_, PyAny>) -> PyResult<()>;
        fn take_over(py: Python<'_>) -> PyResult<bool>;
        fn number_next(py: Python<'_>) -> PyResult<u64>;
        fn forget_placed(placement: &Bound<'_, PyAny>) -> PyResult<()>;
        fn close_placed(placement: &Bound<'_, PyAny>) -> PyResult<()>;
        fn stop(message: String) -> PyResult<()>;
        fn take_committed(py: Python<'_>) -> PyResult<()>;
        fn positions(py: Python<'_>) -> PyResult<Positions>;
        fn waited() -> f64;
    }
);
