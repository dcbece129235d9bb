//! An engine between two epochs: its workers have ended, their slots stay warm for other workers.
//!
//! Workers that end with their epoch would leave cold memory to the next. Instead the engine is
//! [stored](Engine::store): slots keep their pages, up to a bound, and the user's batches keep their slots. The next
//! iterator of the loader [takes](CachedSegment::take) it, with new ends of rings, new socket pairs and counters at
//! zero. A worker attaches to it as a successor does to the slots of a dead worker. Leases stay, with their handles,
//! ledgers and eventfds. It pays for large batches, where a fresh page costs more than the copy into it; small batches
//! gain nothing.
//!
//! INVARIANT: no process but this one writes to what a [`CachedSegment`] lends again.
//!
//! - Every worker has ended, as its pidfd says, or has left the memory (see [`Engine::unwatch_worker`]).
//! - No process that a worker forked is left: it would have the worker's end of the socket pair, and the parent's end
//!   shows that nobody has it.
//! - A process that this one forked has the segment too. Its objects lie over slots that were leased at the fork, and
//!   these stay leased until that process has ended (see [`forks`](crate::forks)).
//! - The engine has no other owner, so a thread that still waits in an old iterator gets no result of the new epoch.
//!
//! New memory is made after a reported death, an exit code that is not 0, or a corrupt ring; in a forked child; for
//! another number of workers or tasks, another `max_shared_bytes`, or a default that has halved or doubled; when the
//! user holds more than half of what one memory allows, because batches of the next epoch would be copied out; and
//! where address space or descriptors are short.

use std::os::fd::AsFd;

use super::joint::JointBatches;
use super::{Engine, EngineState};
use crate::error::Result;
use crate::os::fd_passing;
use crate::pool::registered::fixed;
use crate::pool::{Leases, SlotId};
use crate::sync::{Arc, Ordering};
use crate::transport::layout::{Control, GRANULE};
use crate::transport::worker_handle::holds_overwritten;

/// An engine that was [stored](Engine::store). Dropping it closes it.
#[derive(Debug)]
pub struct CachedSegment(Engine);

impl Engine {
    /// Ends this engine, whose workers have ended, as [`close`](Self::close) does, but keeps `most` bytes of what its
    /// slots have touched; the rest is given back now. Batches of the user stay as they are, and count; so does what is
    /// registered with a driver.
    ///
    /// `None`, and closed: it was closed before, a worker may live or has left a process behind, a ring is corrupt, or
    /// the user and the driver have more than `most`.
    pub fn store(mut self, most: u64) -> Option<CachedSegment> {
        // Dropped, an engine closes.
        matches!(self.try_store(most), Ok(true)).then_some(CachedSegment(self))
    }

    /// Stops watching the process that ran as `worker`, which has unmapped the memory and lives on. It counts as ended
    /// for [`store`](Self::store). Call it when all results of the worker that anyone wants were taken.
    pub fn unwatch_worker(&self, worker: u32) {
        if let Some(pidfd) = self.state.lock().channels[worker as usize].pidfd.take() {
            self.poller.remove(pidfd.as_fd());
        }
    }

    /// Returns true if the user holds more than half of its limit of a worker. If such an engine were stored, only the
    /// rest would be the user's limit in the next epoch.
    #[must_use]
    pub fn is_half_leased(&self) -> bool {
        self.handles.iter().any(|handle| handle.leases.is_half_leased())
    }

    fn try_store(&mut self, most: u64) -> Result<bool> {
        if !self.process.is_current() {
            return Ok(false);
        }
        self.process.tidy();
        loop {
            // The poller names some at a time, and none twice once it is noted.
            let ended = self.poller.ended()?;
            if ended.is_empty() {
                break;
            }
            self.record_ended(&mut self.state.lock(), ended);
        }
        let state = self.state.get_mut();
        if state.closed || state.channels.iter().any(|channel| channel.pidfd.is_some()) {
            return Ok(false);
        }
        self.worker_ends.get_mut().clear();
        for channel in &mut state.channels {
            if let Some(ours) = channel.socket.take()
                && !fd_passing::is_deserted(ours.as_fd())?
            {
                return Ok(false);
            }
        }
        let workers = self.control.geometry().workers;
        for (worker, channel) in (0..workers).zip(&mut state.channels) {
            channel.forget(&self.control, worker)?;
        }
        *state = EngineState { channels: std::mem::take(&mut state.channels), ..EngineState::new(workers) };
        self.control.begin_again();
        // Windows are of one iterator.
        self.joint = JointBatches::default();
        let registered: u64 = self.handles.iter().map(|handle| handle.leases.registered_bytes()).sum();
        let Some(beside) = most.checked_sub(registered) else { return Ok(false) };
        for worker in 0..workers {
            if !self.trim(worker, beside / u64::from(workers))? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The most that a slot can have touched, whatever the words say.
    fn window(&self) -> u64 {
        self.control.geometry().window
    }

    /// Gives back what the slots of `worker` keep beyond what is registered and `most` bytes. `false`: the user holds
    /// more.
    ///
    /// # Errors
    /// The system's refusal: more is kept than may be.
    fn trim(&self, worker: u32, most: u64) -> Result<bool> {
        let words = self.control.worker(worker).slots;
        if !self.handles[worker as usize].leases.is_borne_out(words) {
            return Err(holds_overwritten(worker));
        }
        let touched = |slot: SlotId| words.touched()[slot.index()].load(Ordering::Relaxed).min(self.window());
        let loose = |slot| touched(slot) - fixed(words, slot, touched(slot));
        let busy = Leases::busy(words);
        let (held, free): (Vec<_>, Vec<_>) =
            (0..words.slots()).map(SlotId::new).partition(|slot| slot.is_in(&busy));
        let Some(mut left) = most.checked_sub(held.into_iter().map(loose).sum()) else { return Ok(false) };
        for slot in free {
            // The slot is not held, and no process is left that could have it held.
            let beside = loose(slot).min(left / GRANULE * GRANULE);
            if beside < loose(slot) {
                let kept = touched(slot) - loose(slot) + beside;
                let window = self.control.window(worker, slot);
                self.control.segment().punch(window.start + kept, window.end - window.start - kept)?;
                words.touched()[slot.index()].store(kept, Ordering::Relaxed);
            }
            left -= beside;
        }
        Ok(true)
    }
}

impl CachedSegment {
    /// Bytes that are kept, those of the user's batches too.
    #[must_use]
    pub fn resident(&self) -> u64 {
        let workers = 0..self.0.control.geometry().workers;
        let touched = |worker| self.0.control.worker(worker).slots.touched();
        workers.flat_map(touched).map(|touched| touched.load(Ordering::Relaxed).min(self.0.window())).sum()
    }

    /// The segment and its geometry.
    #[must_use]
    pub fn control(&self) -> &Arc<Control> {
        self.0.control()
    }

    /// Bytes of shared memory that each worker may take.
    #[must_use]
    pub fn share(&self) -> u64 {
        self.0.share
    }

    /// The engine for new workers, as it was when it was new but for the warm slots.
    ///
    /// # Errors
    /// [`Error::Os`](crate::Error::Os) when there are too many open files. It is closed then.
    pub fn take(self) -> Result<Engine> {
        let mut engine = self.0;
        engine.process.look();
        let state = engine.state.get_mut();
        let ends = engine.worker_ends.get_mut();
        for channel in &mut state.channels {
            let (ours, theirs) = fd_passing::pair()?;
            channel.socket = Some(ours);
            ends.push(Some(Arc::new(theirs)));
        }
        Ok(engine)
    }
}
