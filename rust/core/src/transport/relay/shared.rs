//! State that the main process's end and its thread share.

use std::collections::VecDeque;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use super::link::Link;
use super::loss::Loss;
use crate::os::eventfd::EventFd;

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) state: Mutex<State>,
    /// Says that the state of a worker has changed.
    pub(super) changed: Condvar,
    /// Wakes the thread.
    pub(super) bell: EventFd,
}

#[derive(Debug)]
pub(super) struct State {
    pub(super) requests: VecDeque<Request>,
    pub(super) workers: Vec<Status>,
    pub(super) is_closed: bool,
    pub(super) received: u64,
}

/// A worker, as callers see it.
#[derive(Debug, Clone, Default)]
pub(super) struct Status {
    pub(super) number: u64,
    /// True once it has connected.
    pub(super) is_connected: bool,
    /// Why it was lost.
    pub(super) lost: Option<Loss>,
}

#[derive(Debug)]
pub(super) enum Request {
    Expect { worker: u32, link: Box<Link> },
    Lose { worker: u32, number: u64, why: String },
}

impl Shared {
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
