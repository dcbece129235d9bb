//! All calls of ringloader's Python, by name: of its modules, and of the objects that it passes.
//!
//! INVARIANT: no other file of this crate names a module or a private attribute of ours. `_native.pyi` has the
//! protocols of the objects.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

use crate::caught::caught;

/// Names of ringloader's own methods.
pub(crate) mod names {
    crate::strings::strings! {
        end_epoch = "_end_epoch",
        leave = "leave",
        next_index = "_next_index",
        note_exhausted = "_note_exhausted",
        note_wait = "_note_wait",
        odd_size = "odd_size",
        open = "open",
        raise_lost = "_raise_lost",
        raise_timeout = "_raise_timeout",
        replace_lost = "_replace_lost",
    }
}

/// The module whose functions pickle and unpickle.
pub(crate) fn pickling(py: Python<'_>) -> PyResult<Bound<'_, PyModule>> {
    py.import("ringloader._common.pickling")
}

/// Private names of torch.
pub(crate) fn torch_internals(py: Python<'_>) -> PyResult<Bound<'_, PyModule>> {
    py.import("ringloader._torch.internals")
}

/// Logs that a batch did not fit into its worker's share.
///
/// # Errors
/// The error that logging raises.
pub(crate) fn log_oversize(py: Python<'_>, len: u64, share: u64, largest: u64, workers: u32) -> PyResult<()> {
    let budget = py.import("ringloader._transport.budget")?;
    budget.call_method1("log_oversize", (len, share, largest, workers)).map(drop)
}

/// Logs why memory that is needed no more was not given back.
///
/// # Errors
/// The error that logging raises.
pub(crate) fn log_not_given_back(py: Python<'_>, why: &str) -> PyResult<()> {
    py.import("ringloader._transport.budget")?.call_method1("log_refused", (why,)).map(drop)
}

/// Imports what [`failed_arrival`] and the others above need later: there may be no descriptor to open a file then.
///
/// # Errors
/// The error that importing it raises.
pub(crate) fn load(py: Python<'_>) -> PyResult<()> {
    py.import("ringloader._transport.budget")?;
    Standing::get(py).map(drop)
}

/// The class whose objects stand for a batch whose arrival has failed, and one object that stands for any such batch.
struct Standing {
    class: Py<PyAny>,
    lost: Py<PyAny>,
}

impl Standing {
    fn get(py: Python<'_>) -> PyResult<&'static Self> {
        static STANDING: PyOnceLock<Standing> = PyOnceLock::new();
        STANDING.get_or_try_init(py, || {
            Ok(Self {
                class: py.import("ringloader._transport.overdue")?.getattr("FailedArrival")?.unbind(),
                lost: py.import("ringloader._transport.overdue")?.getattr("LOST")?.unbind(),
            })
        })
    }
}

/// Returns an object that stands for a batch whose arrival has failed. If making the object fails, returns the one that
/// stands for any such batch, and that error.
///
/// # Errors
/// None, once [`load`] has succeeded.
pub(crate) fn failed_arrival<'py>(
    py: Python<'py>,
    error: &PyErr,
    was_raised: bool,
) -> PyResult<(Bound<'py, PyAny>, Option<PyErr>)> {
    let Standing { class, lost } = Standing::get(py)?;
    let made = caught(py, || class.bind(py).call1((error.value(py), was_raised)));
    Ok(made.map_or_else(|error| (lost.bind(py).clone(), Some(error)), |made| (made, None)))
}

/// A worker, its task, and that task's index; `None` if it is lost.
pub(crate) type Late<'py> = (u32, u64, Option<Bound<'py, PyAny>>);

/// The iterator whose method calls the scheduler: `SchedulerCallbacks` in the stub.
///
/// The iterator is passed with each call, and no call keeps it: with a cycle it would outlive its last user.
pub(crate) struct Callbacks<'a, 'py>(pub(crate) &'a Bound<'py, PyAny>);

impl<'py> Callbacks<'_, 'py> {
    pub(crate) fn py(&self) -> Python<'py> {
        self.0.py()
    }

    /// torch's `_next_index`: the next index, by Python.
    ///
    /// # Errors
    /// `StopIteration` at the sampler's end; what the sampler raises.
    pub(crate) fn next_index(&self) -> PyResult<Bound<'py, PyAny>> {
        self.0.call_method0(names::next_index(self.py()))
    }

    /// A worker's iterable dataset has ended.
    ///
    /// # Errors
    /// The error that torch raises.
    pub(crate) fn note_exhausted(&self, worker: u32) -> PyResult<()> {
        self.0.call_method1(names::note_exhausted(self.py()), (worker,)).map(drop)
    }

    /// A worker's process has ended. `in_hand`: what it was in.
    ///
    /// # Errors
    /// The error that the iterator raises. It always raises one.
    pub(crate) fn raise_lost(&self, worker: u32, in_hand: Option<Late<'py>>) -> PyResult<()> {
        self.0.call_method1(names::raise_lost(self.py()), (worker, in_hand)).map(drop)
    }

    /// Starts a successor of a worker whose process has ended, if it gets one. Returns true if it did.
    ///
    /// # Errors
    /// The error that starting a process raises.
    pub(crate) fn replace_lost(&self, worker: u32, in_hand: Option<Late<'py>>) -> PyResult<bool> {
        self.0.call_method1(names::replace_lost(self.py()), (worker, in_hand))?.extract()
    }

    /// The time for a batch is over. `late`: what may be waited for.
    ///
    /// # Errors
    /// The error that the iterator raises. It always raises one.
    pub(crate) fn raise_timeout(&self, late: Vec<Late<'py>>) -> PyResult<()> {
        self.0.call_method1(names::raise_timeout(self.py()), (late,)).map(drop)
    }

    /// Reports that the wait for a batch has taken `seconds` so far. `owing`: the task that each worker owes.
    ///
    /// # Errors
    /// The error that logging raises.
    pub(crate) fn note_wait(&self, seconds: f64, owing: Vec<Late<'py>>) -> PyResult<()> {
        self.0.call_method1(names::note_wait(self.py()), (seconds, owing)).map(drop)
    }

    /// The epoch is over.
    ///
    /// # Errors
    /// The error that shutting the workers down raises.
    pub(crate) fn end_epoch(&self) -> PyResult<()> {
        self.0.call_method0(names::end_epoch(self.py())).map(drop)
    }
}

/// Reads and draws of torch for one epoch of a sampler: `Draws` in the stub.
pub(crate) struct Draws<'a, 'py>(pub(crate) &'a Bound<'py, PyAny>);

impl<'py> Draws<'_, 'py> {
    pub(crate) fn py(&self) -> Python<'py> {
        self.0.py()
    }

    /// Makes the native stream; `None` if Python must iterate the sampler.
    ///
    /// # Errors
    /// The error that the sampler's `len` raises.
    pub(crate) fn open(&self) -> PyResult<Bound<'py, PyAny>> {
        self.0.call_method0(names::open(self.py()))
    }

    /// Gives it the incomplete last batch of a stream that rolls over.
    pub(crate) fn leave(&self, rest: Bound<'py, PyAny>) -> PyResult<()> {
        self.0.call_method1(names::leave(self.py()), (rest,)).map(drop)
    }

    /// Returns what torch makes of a batch size that was set meanwhile and is no plain number.
    pub(crate) fn odd_size(&self, size: &Bound<'py, PyAny>) -> PyResult<u64> {
        self.0.call_method1(names::odd_size(self.py()), (size,))?.extract()
    }
}
