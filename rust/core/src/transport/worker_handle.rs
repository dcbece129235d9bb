//! The parent's state for one worker, shared by its engine and all leases.

use crate::error::Error;
use crate::os::eventfd::EventFd;
use crate::pool::{Closing, Leases, SlotId};
use crate::process::{self, Lender, Process};
use crate::sync::Arc;
use crate::transport::layout::Control;

/// The parent's state for one worker. Every lease on that worker's slots shares it.
///
/// INVARIANT: all of it is usable from any thread, without the interpreter, at interpreter exit.
#[derive(Debug)]
pub(crate) struct WorkerHandle {
    pub(crate) control: Arc<Control>,
    pub(crate) worker: u32,
    /// Wakes the worker: it sleeps for tasks and for room.
    pub(crate) eventfd: EventFd,
    pub(crate) leases: Leases,
    /// The process that may release: a forked child inherits leases and must leave them alone.
    pub(crate) process: &'static Process,
    closing: Closing,
}

impl Lender for WorkerHandle {
    fn is_lending(&self) -> bool {
        self.leases.leased_slots() > 0
    }
}

/// The error where a hold was overwritten of a slot that the user has.
#[cold]
pub(crate) fn holds_overwritten(worker: u32) -> Error {
    Error::Corrupt(format!("some process has overwritten which slots of worker {worker} are held"))
}

impl WorkerHandle {
    pub(crate) fn new(control: Arc<Control>, worker: u32, eventfd: EventFd, leases: Leases) -> Arc<Self> {
        let process = process::current();
        let handle = Arc::new(Self { control, worker, eventfd, leases, process, closing: Closing::new() });
        let lender = Arc::downgrade(&handle);
        process.register(lender);
        handle
    }

    /// Wakes the worker if it sleeps.
    pub(crate) fn wake(&self) {
        if self.control.worker(self.worker).worker_sleeps.take() {
            self.eventfd.notify();
        }
    }

    /// Gives back the memory of all slots that are not held, now and at every later release. Memory of registered slots
    /// is given back once their registration is cleared.
    ///
    /// Called when the worker has ended: nothing is filled any more.
    pub(crate) fn close(&self) {
        self.closing.close();
        if !self.leases.is_borne_out(self.control.worker(self.worker).slots) {
            // INVARIANT: what the user holds stays mapped. Which slots he holds is not known any more, so all of them
            // stay as long as his batches do.
            return self.control.record_refusal(Err(holds_overwritten(self.worker)));
        }
        self.control.release_unheld(self.worker, (0..self.control.geometry().slots).map(SlotId::new));
        self.control.give_back(self.control.arena(self.worker));
    }

    /// Calls [`Leases::set_registered`]. `false` too in a forked child: the registrations are its parent's.
    pub(super) fn set_registered(&self, slot: SlotId, bytes: u64) -> bool {
        if !self.process.is_current() {
            return false;
        }
        let set = self.leases.set_registered(self.control.worker(self.worker).slots, slot, bytes);
        // If the engine is closed only after this look, the thread that closes finds what was set.
        if bytes == 0 && self.closing.is_closed() {
            self.control.release_unheld(self.worker, std::iter::once(slot));
        }
        set
    }

    /// Ends one hold. Called by the process that holds, once for each hold, when no child that it forked may have the
    /// slot.
    pub(super) fn release(&self, slot: SlotId, cost: Option<u64>) {
        self.leases.release(self.control.worker(self.worker).slots, slot, cost);
        if self.closing.is_closed() {
            // While this thread was between the two stores of its release, the slot may have come round:
            // then it is held, and its holder gives it back.
            self.control.release_unheld(self.worker, std::iter::once(slot));
        } else {
            self.wake();
        }
    }
}
