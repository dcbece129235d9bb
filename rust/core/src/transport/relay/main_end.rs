//! The main process's end: what its callers see, and the thread that lets workers in.

use std::any::Any;
use std::convert::Infallible;
use std::io::ErrorKind;
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, OwnedFd};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Condvar, PoisonError};
use std::thread::{JoinHandle, Scope};
use std::time::Duration;

use super::flow_limit::FlowLimit;
use super::link::Link;
use super::shared::{Loss, MainShared, MainState, Rings, Status, hang_up};
use super::{Beats, Token, handshake};
use crate::error::{self, Error};
use crate::os::eventfd::{EventFd, sleep};
use crate::os::sockets;
use crate::process::{self, Process};
use crate::sync::{Arc, AtomicU64, Lock, Ordering};
use crate::transport::engine::Engine;
use crate::transport::port::Port;

/// The most callers that have not said whose they are, in addition to two for each worker that is expected.
const SPARE_CALLERS: usize = 16;

/// The time until callers are let in again, after there was no descriptor or memory for one.
const AGAIN: Duration = Duration::from_millis(100);

/// The relay of an iterator's workers, in the main process.
///
/// INVARIANT: in a forked child it does nothing: threads and connections are the parent's.
#[derive(Debug)]
pub struct MainRelay {
    shared: Arc<MainShared>,
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
    pub fn new(
        engine: &Engine,
        host: IpAddr,
        token: Token,
        most: Option<u64>,
        beats: Beats,
    ) -> error::Result<Self> {
        let failed = |error: std::io::Error| Error::io("listening for workers", &error);
        let listener = TcpListener::bind((host, 0)).map_err(failed)?;
        listener.set_nonblocking(true).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let workers = (0..engine.control().geometry().workers).map(|_| Status::default()).collect();
        let shared = Arc::new(MainShared {
            token,
            beats,
            state: Lock::new(MainState { workers, ..MainState::default() }),
            changed: Condvar::new(),
            bell: EventFd::new()?,
            limit: most.map(|most| Lock::new(FlowLimit::new(most, engine.control().clone()))),
            received: AtomicU64::new(0),
        });
        let serving = shared.clone();
        let thread = std::thread::Builder::new()
            .name("ringloader-relay".into())
            .spawn(move || serving.serve(&listener))
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
    pub fn expect(&self, engine: &Engine, worker: u32, busy: Option<&[u64]>) -> error::Result<u64> {
        let fds = engine
            .inherited_fds(worker)
            .map_err(|error| Error::io("taking a worker's descriptors", &error))?;
        let port = Port::attach(engine.control().clone(), worker, engine.share(), fds, busy)?;
        let ended = EventFd::new()?;
        let watched: OwnedFd = ended
            .as_fd()
            .try_clone_to_owned()
            .map_err(|error| Error::io("duplicating an eventfd", &error))?;
        engine.watch_relayed(worker, watched)?;
        let rings = Rings::new(port, ended);
        let mut state = self.shared.state.lock();
        let closed = state.closed.clone();
        let status = &mut state.workers[worker as usize];
        let number = status.number + 1;
        *status = Status { number, expected: Some(rings), ..Status::default() };
        let unwanted = closed.and_then(|loss| status.lose(loss));
        drop(state);
        drop(unwanted);
        self.shared.bell.notify();
        Ok(number)
    }

    /// The worker that was expected under this number is lost, unless another was expected since.
    pub fn lose(&self, worker: u32, number: u64, why: String) {
        let mut state = self.shared.state.lock();
        let status = &mut state.workers[worker as usize];
        if status.number == number {
            let rings = status.lose(Loss::theirs(why));
            drop(state);
            drop(rings);
            self.shared.changed.notify_all();
        }
    }

    /// Returns how the worker stands that was expected under this number, once it is not expected any more, or the time
    /// is over.
    #[must_use]
    pub fn standing(&self, worker: u32, number: u64, limit: Duration) -> Standing {
        let state = self.shared.state.lock();
        let is_expected = |state: &mut MainState| {
            let status = &state.workers[worker as usize];
            status.number == number && status.expected.is_some()
        };
        let waited = self.shared.changed.wait_timeout_while(state, limit, is_expected);
        let state = waited.unwrap_or_else(PoisonError::into_inner).0;
        match &state.workers[worker as usize] {
            status if status.number != number => Standing::Lost("another was expected since".into()),
            Status { is_connected: true, .. } => Standing::Connected,
            Status { lost: Some(loss), .. } => Standing::Lost(loss.why.clone()),
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
        self.shared.received.load(Ordering::Relaxed)
    }

    /// Ends all connections, and the threads. Calling it again does nothing.
    pub fn close(&self) {
        if !self.process.is_current() {
            return;
        }
        self.shared.close(Loss::closed());
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

impl MainShared {
    /// Lets workers in until the relay is closed. Returns when all connections have ended.
    ///
    /// INVARIANT: each worker is lost, whatever ends the thread: nothing else tells the engine.
    fn serve(&self, listener: &TcpListener) {
        std::thread::scope(|scope| {
            let loss = loss_of(|| {
                loop {
                    self.let_in(listener, scope)?;
                }
            });
            self.close(loss);
        });
    }

    /// Loses all workers, and lets nobody in any more.
    fn close(&self, loss: Loss) {
        let mut state = self.state.lock();
        state.callers.iter().for_each(|caller| hang_up(caller));
        let rings: Vec<_> = state.workers.iter_mut().map(|status| status.lose(loss.clone())).collect();
        state.closed.get_or_insert(loss);
        drop(state);
        drop(rings);
        self.bell.notify();
        self.changed.notify_all();
    }

    /// Waits for a caller, and lets it in. Where there are too many, the oldest goes first: a worker says at once whose it
    /// is. Where no worker is expected there is nobody: strangers wake no thread then, and take no descriptor.
    ///
    /// # Errors
    /// Why the relay is closed.
    fn let_in<'s>(&'s self, listener: &TcpListener, scope: &'s Scope<'s, '_>) -> Result<(), Loss> {
        let state = self.state.lock();
        if let Some(loss) = &state.closed {
            return Err(loss.clone());
        }
        let most = match state.expected() {
            0 => 0,
            expected => 2 * expected + SPARE_CALLERS,
        };
        if let Some(oldest) = state.callers.front().filter(|_| state.callers.len() >= most) {
            hang_up(oldest);
            drop(self.changed.wait(state).unwrap_or_else(PoisonError::into_inner));
            return Ok(());
        }
        drop(state);
        let asked = if most > 0 { listener.as_fd() } else { self.bell.as_fd() };
        // The last worker may have come while this thread slept.
        if !sleep(&self.bell, asked, Duration::MAX).map_err(Loss::ours)? || self.state.lock().expected() == 0
        {
            return Ok(());
        }
        match listener.accept() {
            Ok((socket, _)) => self.begin(Arc::new(socket), scope),
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            Err(_) => std::thread::sleep(AGAIN),
        }
        Ok(())
    }

    /// Begins a caller's thread.
    fn begin<'s>(&'s self, socket: Arc<TcpStream>, scope: &'s Scope<'s, '_>) {
        let caller = Arc::as_ptr(&socket);
        let mut state = self.state.lock();
        if state.closed.is_some() {
            return;
        }
        state.callers.push_back(socket.clone());
        drop(state);
        let thread = std::thread::Builder::new().name("ringloader-link".into());
        if thread.spawn_scoped(scope, move || self.attend(socket)).is_err() {
            self.state.lock().forget(caller);
            std::thread::sleep(AGAIN);
        }
    }

    /// Asks a caller whose it is, and serves it until it is lost. Closes a connection that is no expected worker's: an
    /// earlier worker's, too, whose tasks another does now.
    fn attend(&self, socket: Arc<TcpStream>) {
        let _ = socket.set_nodelay(true);
        sockets::fit(&socket);
        let hello = handshake::ask(&socket, &self.token);
        let Some((worker, rings)) = hello.and_then(|(worker, number)| self.connect(worker, number, &socket))
        else {
            let caller = Arc::as_ptr(&socket);
            // The last one closes it, before another is let in.
            drop(socket);
            self.state.lock().forget(caller);
            self.changed.notify_all();
            return;
        };
        let loss = loss_of(|| Link::new(self, &rings.port, &socket).serve());
        if let Some(limit) = &self.limit {
            limit.lock().reset(worker);
        }
        self.state.lock().workers[worker as usize].lose(loss);
        drop((socket, rings));
        self.changed.notify_all();
    }

    /// Returns the rings of a worker that has connected, if it is the one that is expected.
    fn connect(&self, worker: u32, number: u64, socket: &Arc<TcpStream>) -> Option<(u32, Rings)> {
        let mut state = self.state.lock();
        let status = state.workers.get_mut(worker as usize).filter(|status| status.number == number)?;
        let rings = status.expected.take()?;
        status.is_connected = true;
        status.socket = Some(socket.clone());
        state.forget(Arc::as_ptr(socket));
        drop(state);
        self.bell.notify();
        self.changed.notify_all();
        Some((worker, rings))
    }
}

/// Runs a thread. Returns why it has ended.
fn loss_of(serve: impl FnOnce() -> Result<Infallible, Loss>) -> Loss {
    match catch_unwind(AssertUnwindSafe(serve)) {
        Ok(Err(loss)) => loss,
        Err(panic) => {
            let text = text_of(&*panic);
            Loss { why: format!("the thread that receives batches has panicked: {text}"), is_ours: true }
        }
    }
}

fn text_of(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("without a message")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_is_this_processs_fault() {
        let text = String::from("in words");
        for loss in [loss_of(|| panic!("{text}")), loss_of(|| panic!("in words"))] {
            assert!(loss.is_ours && loss.why.ends_with("has panicked: in words"), "{}", loss.why);
        }
    }
}
