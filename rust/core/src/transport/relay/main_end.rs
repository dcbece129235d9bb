//! The main process's end, as its callers see it.

use std::net::{IpAddr, SocketAddr, TcpListener};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Condvar, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use super::link::Link;
use super::loss::Loss;
use super::serving::Serving;
use super::shared::{Command, MainShared, MainState, Status};
use super::{Beats, Token};
use crate::error::{Error, Result};
use crate::os::eventfd::EventFd;
use crate::process::{self, Process};
use crate::sync::{Arc, Lock};
use crate::transport::engine::Engine;
use crate::transport::port::Port;

/// The relay of an iterator's workers, in the main process.
///
/// INVARIANT: in a forked child it does nothing: thread and connections are the parent's.
#[derive(Debug)]
pub struct MainRelay {
    pub(super) shared: Arc<MainShared>,
    address: SocketAddr,
    thread: Lock<Option<JoinHandle<()>>>,
    process: &'static Process,
}

/// The standing of a worker that was expected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Standing {
    /// Not yet connected.
    Expected,
    /// Connected once. The worker may be lost by now.
    Connected,
    /// Lost before it had connected, for this reason; or another was expected since.
    Lost(String),
}

impl MainRelay {
    /// Listens at `host`, and serves the workers of an engine from now on.
    ///
    /// # Errors
    /// [`Error::Os`] when it cannot listen there, or no thread can start.
    pub fn new(engine: &Engine, host: IpAddr, token: Token, most: Option<u64>, beats: Beats) -> Result<Self> {
        let listener =
            TcpListener::bind((host, 0)).map_err(|error| Error::io("listening for workers", &error))?;
        listener.set_nonblocking(true).map_err(|error| Error::io("listening for workers", &error))?;
        let address = listener.local_addr().map_err(|error| Error::io("listening for workers", &error))?;
        let workers = engine.control().geometry().workers as usize;
        let state = MainState { workers: vec![Status::default(); workers], ..MainState::default() };
        let shared =
            Arc::new(MainShared { state: Lock::new(state), changed: Condvar::new(), bell: EventFd::new()? });
        let control = engine.control().clone();
        let serving = Serving::new(shared.clone(), control, listener, token, most, beats);
        let thread = std::thread::Builder::new()
            .name("ringloader-relay".into())
            .spawn(move || serving.run())
            .map_err(|error| Error::io("starting the relay's thread", &error))?;
        Ok(Self { shared, address, thread: Lock::new(Some(thread)), process: process::current() })
    }

    /// The address at which it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Expects a worker, or its successor: `busy` is what [`Engine::succeed`] has returned. Returns the number under
    /// which it must connect.
    ///
    /// # Errors
    /// As [`Port::attach`] and [`Engine::watch_relayed`].
    pub fn expect(&self, engine: &Engine, worker: u32, busy: Option<&[u64]>) -> Result<u64> {
        let fds = engine
            .inherited_fds(worker)
            .map_err(|error| Error::io("taking a worker's descriptors", &error))?;
        let control = engine.control().clone();
        let port = Port::attach(control, worker, engine.share(), fds, busy)?;
        let ended = EventFd::new()?;
        let watched: OwnedFd = ended
            .as_fd()
            .try_clone_to_owned()
            .map_err(|error| Error::io("duplicating an eventfd", &error))?;
        engine.watch_relayed(worker, watched)?;
        let mut state = self.shared.state.lock();
        let status = &mut state.workers[worker as usize];
        *status = Status { number: status.number + 1, ..Status::default() };
        let number = status.number;
        let link = Link::new(number, Arc::new(port), ended);
        if state.is_closed {
            let why = state.panic.clone().unwrap_or_else(|| "the relay was closed".into());
            state.workers[worker as usize].lost = Some(Loss { why, is_ours: true });
            drop(state);
            link.end();
            return Ok(number);
        }
        state.commands.push_back(Command::Expect { worker, link: Box::new(link) });
        drop(state);
        self.shared.bell.notify();
        Ok(number)
    }

    /// The worker that was expected under this number is lost, unless another was expected since.
    pub fn lose(&self, worker: u32, number: u64, why: String) {
        self.shared.state.lock().commands.push_back(Command::Lose { worker, number, why });
        self.shared.bell.notify();
    }

    /// Returns how the worker stands that was expected under this number, once it is not expected any more, or the time
    /// is over.
    #[must_use]
    pub fn standing(&self, worker: u32, number: u64, limit: Duration) -> Standing {
        let state = self.shared.state.lock();
        let is_expected = |state: &mut MainState| {
            let status = &state.workers[worker as usize];
            status.number == number && !status.is_connected && status.lost.is_none() && !state.is_closed
        };
        let waited = self.shared.changed.wait_timeout_while(state, limit, is_expected);
        let state = waited.unwrap_or_else(PoisonError::into_inner).0;
        match &state.workers[worker as usize] {
            status if status.number != number => Standing::Lost("another was expected since".into()),
            Status { is_connected: true, .. } => Standing::Connected,
            Status { lost: Some(loss), .. } => Standing::Lost(loss.why.clone()),
            _ if state.is_closed => Standing::Lost("the relay was closed".into()),
            _ => Standing::Expected,
        }
    }

    /// Returns why a worker was lost, if it was.
    #[must_use]
    pub fn why_lost(&self, worker: u32) -> Option<String> {
        Some(self.shared.state.lock().workers[worker as usize].lost.as_ref()?.why.clone())
    }

    /// Returns why this process could not take what a worker has sent, if the worker was lost by that.
    #[must_use]
    pub fn failure(&self, worker: u32) -> Option<String> {
        let state = self.shared.state.lock();
        let loss = state.workers[worker as usize].lost.as_ref()?;
        loss.is_ours.then(|| loss.why.clone())
    }

    /// Bytes of results that have come from workers.
    #[must_use]
    pub fn received(&self) -> u64 {
        self.shared.state.lock().received
    }

    /// Ends all connections, and the thread. Calling it again does nothing.
    pub fn close(&self) {
        if !self.process.is_current() {
            return;
        }
        self.shared.state.lock().is_closed = true;
        self.shared.bell.notify();
        let thread = self.thread.lock().take();
        if let Some(thread) = thread {
            let _ = thread.join();
        }
    }
}

impl Drop for MainRelay {
    fn drop(&mut self) {
        self.close();
    }
}
