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

/// The Python class of a [`Scheduling`]: there is one for each transport, so that none pays for another.
macro_rules! scheduler_class {
    ($(#[$about:meta])* $name:ident, $end:ty) => {
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

            fn keep_sent(&self, py: Python<'_>) -> PyResult<()> {
                self.0.keep_sent(py)
            }

            fn balance(&self, py: Python<'_>) -> PyResult<()> {
                self.0.balance(py)
            }

            fn use_first(&self, py: Python<'_>, workers: u32, most: u64) -> PyResult<()> {
                self.0.use_first(py, workers, most)
            }

            fn begin_worker(&self, py: Python<'_>, worker: u32) -> PyResult<()> {
                self.0.begin_worker(py, worker)
            }

            fn has_begun(&self, py: Python<'_>) -> PyResult<bool> {
                self.0.has_begun(py)
            }

            fn retire(&self, py: Python<'_>, worker: u32) -> PyResult<bool> {
                self.0.retire(py, worker)
            }

            fn unanswered(&self, py: Python<'_>) -> PyResult<Vec<u64>> {
                self.0.unanswered(py)
            }

            fn share_tasks(&self, py: Python<'_>, most: u64) -> PyResult<()> {
                self.0.share_tasks(py, most)
            }

            fn watch(&self, py: Python<'_>, seconds: f64) -> PyResult<()> {
                self.0.watch(py, seconds)
            }

            fn record(&self, py: Python<'_>, recorder: Py<Recorder>, decodes: bool) -> PyResult<()> {
                self.0.record(py, recorder, decodes)
            }

            fn reset(&self, py: Python<'_>, source: Py<IndexSource>) -> PyResult<()> {
                self.0.reset(py, source)
            }

            fn put_index(&self, callbacks: &Bound<'_, PyAny>) -> PyResult<()> {
                self.0.put_index(callbacks)
            }

            fn is_at_end(&self, py: Python<'_>) -> PyResult<bool> {
                self.0.is_at_end(py)
            }

            fn follow(&self, py: Python<'_>, source: Py<IndexSource>) -> PyResult<()> {
                self.0.follow(py, source)
            }

            fn put_following(&self, callbacks: &Bound<'_, PyAny>) -> PyResult<()> {
                self.0.put_following(callbacks)
            }

            fn take_over(&self, py: Python<'_>) -> PyResult<bool> {
                self.0.take_over(py)
            }

            fn number_next(&self, py: Python<'_>) -> PyResult<u64> {
                self.0.number_next(py)
            }

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

            fn forget_placed(&self, placement: &Bound<'_, PyAny>) -> PyResult<()> {
                self.0.forget_placed(placement)
            }

            fn close_placed(&self, placement: &Bound<'_, PyAny>) -> PyResult<()> {
                self.0.close_placed(placement)
            }

            fn stop(&self, message: String) -> PyResult<()> {
                self.0.stop(message)
            }

            fn take_committed(&self, py: Python<'_>) -> PyResult<()> {
                self.0.take_committed(py)
            }

            fn positions(&self, py: Python<'_>) -> PyResult<Positions> {
                self.0.positions(py)
            }

            fn waited(&self) -> f64 {
                self.0.waited()
            }

            fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
                self.0.traverse(&visit)
            }
        }
    };
}

scheduler_class!(
    /// Native scheduling over shared-memory rings.
    Scheduler,
    Engine
);
scheduler_class!(
    /// Native scheduling of tasks that all workers share, over shared-memory rings.
    JointScheduler,
    JointEngine
);
scheduler_class!(
    /// Native scheduling over queues between threads.
    ThreadScheduler,
    ThreadQueues
);
