//! The relays of workers on other machines, as Python classes: the main process's, and the worker's.

use std::net::IpAddr;
use std::time::Duration;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use ringloader_core::transport::relay::main_end::{MainRelay as CoreMain, Standing};
use ringloader_core::transport::relay::worker_end::WorkerRelay as CoreWorker;
use ringloader_core::transport::relay::{Beats, Identity, Token};

use super::engine::Engine;
use super::port::Port;
use crate::gil::{detached, exception, without_interpreter};

/// Serves the connections of an iterator's workers, each on a thread of its own.
#[pyclass(frozen, module = "ringloader._native")]
pub(crate) struct MainRelay(CoreMain);

#[pymethods]
impl MainRelay {
    /// Listens at the address `host`. `max_bytes`: of batches that are made, or made and not taken; None: as many as
    /// the engine's memory takes. `OSError`: it cannot listen there.
    #[new]
    fn new(engine: &Engine, host: &str, token: &[u8], max_bytes: Option<u64>) -> PyResult<Self> {
        let host: IpAddr =
            host.parse().map_err(|_| PyValueError::new_err(format!("{host:?} is no IP address")))?;
        let core = engine.core()?;
        CoreMain::new(&core, host, secret(token)?, max_bytes, Beats::default()).map(Self).map_err(exception)
    }

    /// The port at which it listens.
    #[getter]
    fn port(&self) -> u16 {
        self.0.address().port()
    }

    /// Expects a worker, or its successor: `busy` is what `Engine.succeed` has returned. Returns the number under which
    /// it must connect.
    #[pyo3(signature = (engine, worker, busy = None))]
    fn expect(&self, engine: &Engine, worker: u32, busy: Option<Vec<u64>>) -> PyResult<u64> {
        self.0.expect(&*engine.core()?, worker, busy.as_deref()).map_err(exception)
    }

    /// Notes that the worker that was expected under this number has ended. Nothing, if another was expected since.
    fn lose(&self, worker: u32, number: u64, why: String) {
        self.0.lose(worker, number, why);
    }

    /// Waits until a worker is not expected any more, or the time is over. Returns whether it has connected, and why it
    /// was lost, if it was lost before.
    fn standing(
        &self,
        py: Python<'_>,
        worker: u32,
        number: u64,
        timeout: f64,
    ) -> PyResult<(bool, Option<String>)> {
        let limit = Duration::try_from_secs_f64(timeout).unwrap_or(Duration::ZERO);
        Ok(match detached(py, || Ok(self.0.standing(worker, number, limit)))? {
            Standing::Expected => (false, None),
            Standing::Connected => (true, None),
            Standing::Lost(why) => (false, Some(why)),
        })
    }

    /// Returns why a worker was lost, if it was.
    fn why_lost(&self, worker: u32) -> Option<String> {
        self.0.why_lost(worker)
    }

    /// Returns why this process could not take what a worker has sent, if the worker was lost by that.
    fn failure(&self, worker: u32) -> Option<String> {
        self.0.failure(worker)
    }

    /// Bytes of results that have come from workers.
    #[getter]
    fn received(&self) -> u64 {
        self.0.received()
    }

    /// Ends all connections. Calling it again does nothing.
    fn close(&self, py: Python<'_>) {
        without_interpreter(py, || self.0.close());
    }
}

/// The end of a worker's connection, in the worker, with rings and slots as of a local worker.
#[pyclass(frozen, module = "ringloader._native")]
pub(crate) struct WorkerRelay(CoreWorker);

#[pymethods]
impl WorkerRelay {
    /// Connects to the main process. `OSError`: there is no way to it within `timeout` seconds.
    #[new]
    #[allow(clippy::too_many_arguments, reason = "Python names them")]
    fn new(
        py: Python<'_>,
        host: &str,
        port: u16,
        token: &[u8],
        worker: u32,
        number: u64,
        max_tasks: u32,
        share: u64,
        timeout: f64,
    ) -> PyResult<Self> {
        let identity = Identity { token: secret(token)?, worker, number };
        let limit = Duration::try_from_secs_f64(timeout).unwrap_or(Duration::MAX);
        let connect = || CoreWorker::connect(host, port, identity, max_tasks, share, limit, Beats::default());
        detached(py, connect).map(Self)
    }

    /// The worker's end of the rings.
    fn attach(&self) -> PyResult<Port> {
        self.0.port().map(Port::of).map_err(exception)
    }

    /// Notes that the answer to this task is the last that the worker gives in this epoch.
    fn end_part(&self, seq: u64) {
        self.0.end_part(seq);
    }

    /// True if the connection has ended before the worker was told to end.
    #[getter]
    fn is_lost(&self) -> bool {
        self.0.is_lost()
    }

    /// Sends what is committed, waits until it is gone, and ends the connection.
    fn finish(&self, py: Python<'_>) {
        py.detach(|| self.0.finish());
    }
}

fn secret(token: &[u8]) -> PyResult<Token> {
    token.try_into().map_err(|_| PyValueError::new_err(format!("a token of {} bytes, not 32", token.len())))
}
