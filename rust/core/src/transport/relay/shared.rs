//! State that the main process's end and its thread share.

use std::collections::VecDeque;
use std::sync::Condvar;

use super::link::Link;
use super::loss::Loss;
use crate::os::eventfd::EventFd;
use crate::sync::Lock;

#[derive(Debug)]
pub(super) struct MainShared {
    pub(super) state: Lock<MainState>,
    /// Says that the state of a worker has changed.
    pub(super) changed: Condvar,
    /// Wakes the thread.
    pub(super) bell: EventFd,
}

#[derive(Debug, Default)]
pub(super) struct MainState {
    pub(super) commands: VecDeque<Command>,
    pub(super) workers: Vec<Status>,
    /// True once the thread serves nobody any more, or is to.
    pub(super) is_closed: bool,
    /// Why the thread has panicked, if it has.
    pub(super) panic: Option<String>,
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

/// A request to the thread.
#[derive(Debug)]
pub(super) enum Command {
    Expect { worker: u32, link: Box<Link> },
    Lose { worker: u32, number: u64, why: String },
}
