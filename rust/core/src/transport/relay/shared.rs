//! State that the main process's end and its threads share.

use std::collections::VecDeque;
use std::net::{Shutdown, TcpStream};
use std::sync::Condvar;

use super::flow_limit::FlowLimit;
use super::{Beats, Token};
use crate::error::Error;
use crate::os::eventfd::EventFd;
use crate::sync::{Arc, AtomicU64, Lock};
use crate::transport::port::Port;

#[derive(Debug)]
pub(super) struct MainShared {
    pub(super) token: Token,
    pub(super) beats: Beats,
    pub(super) state: Lock<MainState>,
    /// Says that the state of a worker has changed, or that a caller has gone.
    pub(super) changed: Condvar,
    /// Wakes the thread that lets callers in.
    pub(super) bell: EventFd,
    /// The limit on batches that are made ahead; `None`: slots are the limit.
    pub(super) limit: Option<Lock<FlowLimit>>,
    /// Bytes of results that have come from workers.
    pub(super) received: AtomicU64,
}

#[derive(Debug, Default)]
pub(super) struct MainState {
    pub(super) workers: Vec<Status>,
    /// Connections that have not said whose they are, the oldest first.
    pub(super) callers: VecDeque<Arc<TcpStream>>,
    /// Why nobody is let in any more.
    pub(super) closed: Option<Loss>,
}

/// The state of a worker.
#[derive(Debug, Default)]
pub(super) struct Status {
    pub(super) number: u64,
    /// The worker's rings, while it is expected.
    pub(super) expected: Option<Rings>,
    /// True once it has connected.
    pub(super) is_connected: bool,
    /// The worker's connection, while it has one.
    pub(super) socket: Option<Arc<TcpStream>>,
    /// Why it was lost.
    pub(super) lost: Option<Loss>,
}

/// The worker's end of the rings of a worker that is expected, or connected.
///
/// INVARIANT: dropped in this order. By the time that the engine is told of the worker's end, nothing writes to its slots.
#[derive(Debug)]
pub(super) struct Rings {
    pub(super) port: Port,
    _ended: Ended,
}

/// Tells the engine of a worker's end when it is dropped.
#[derive(Debug)]
struct Ended(EventFd);

impl Rings {
    pub(super) fn new(port: Port, ended: EventFd) -> Self {
        Self { port, _ended: Ended(ended) }
    }
}

impl Drop for Ended {
    fn drop(&mut self) {
        self.0.notify();
    }
}

/// The end of a worker's connection.
#[derive(Debug, Clone)]
pub(super) struct Loss {
    /// The reason, in words.
    pub(super) why: String,
    /// True if this process could not take what the worker has sent: another worker would be lost in the same way.
    pub(super) is_ours: bool,
}

impl MainState {
    /// Returns how many workers are expected.
    pub(super) fn expected(&self) -> usize {
        self.workers.iter().filter(|status| status.expected.is_some()).count()
    }

    /// A caller has said whose it is, or has gone.
    pub(super) fn forget(&mut self, caller: *const TcpStream) {
        self.callers.retain(|socket| Arc::as_ptr(socket) != caller);
    }
}

impl Status {
    /// Notes why the worker is lost, unless that is known, and ends its connection. The caller drops the rings that it
    /// returns without the lock.
    pub(super) fn lose(&mut self, loss: Loss) -> Option<Rings> {
        self.lost.get_or_insert(loss);
        self.socket.take().inspect(|socket| hang_up(socket));
        self.expected.take()
    }
}

impl Loss {
    /// The worker, or the way to it, is to blame.
    pub(super) fn theirs(why: impl Into<String>) -> Self {
        Self { why: why.into(), is_ours: false }
    }

    /// This process is to blame.
    pub(super) fn ours(error: Error) -> Self {
        Self { why: error.to_string(), is_ours: true }
    }

    /// The relay serves nobody any more.
    pub(super) fn closed() -> Self {
        Self { why: "the relay was closed".into(), is_ours: true }
    }
}

/// Wakes the thread that reads from a connection. A child that was forked meanwhile has the connection too.
pub(super) fn hang_up(socket: &TcpStream) {
    let _ = socket.shutdown(Shutdown::Both);
}
