//! The slots of an engine, and the windows that its workers share, as plain memory: for the parent that registers windows
//! with a driver.

use crate::number::usize_from;
use crate::pool::SlotId;
use crate::sync::{Arc, Ordering};
use crate::transport::joint::windows::JointWindows;
use crate::transport::worker_handle::WorkerHandle;

/// The window of one slot, or one that workers share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlotWindow {
    /// Address of the window in this process: the same as long as the memory lives.
    pub address: usize,
    /// Bytes from there that are backed by memory. As long as the window is held, they do not get fewer.
    pub touched: u64,
    /// Bytes from there that are registered with a driver.
    pub registered: u64,
}

impl SlotWindow {
    pub(super) fn of(handle: &WorkerHandle, slot: SlotId) -> Self {
        let WorkerHandle { control, worker, .. } = handle;
        let words = control.worker(*worker).slots;
        let start = usize_from(control.window(*worker, slot).start);
        Self {
            address: control.segment().base().as_ptr() as usize + start,
            touched: words.touched()[slot.index()].load(Ordering::Relaxed),
            registered: words.registered()[slot.index()].load(Ordering::Relaxed),
        }
    }

    pub(super) fn of_joint((windows, window): (&JointWindows, u32)) -> Self {
        let (address, touched, registered) = windows.front(window);
        Self { address, touched, registered }
    }
}

/// All slots of one engine, and the windows that its workers share, by their addresses. It outlives the engine: the driver may unregister before or after the
/// engine is closed, and the memory stays mapped in between.
///
/// INVARIANT: it is the same memory for the engine, for what it is [stored](crate::transport::engine::Engine::store)
/// as, and for the engine that takes that. Shared windows are of the engine alone.
#[derive(Debug, Clone)]
pub struct SlotMemory(Vec<Arc<WorkerHandle>>, Option<Arc<JointWindows>>);

impl SlotMemory {
    pub(super) fn new(handles: &[Arc<WorkerHandle>], joint: Option<&Arc<JointWindows>>) -> Self {
        Self(handles.to_vec(), joint.cloned())
    }

    /// Returns true if this process is a forked child of the one that has the memory. Such a child registers nothing.
    #[must_use]
    pub fn is_inherited(&self) -> bool {
        self.0.iter().any(|handle| !handle.process.is_current())
    }

    /// The window that `address` lies in.
    #[must_use]
    pub fn window_of(&self, address: usize) -> Option<SlotWindow> {
        let slot = self.find(address).map(|(handle, slot)| SlotWindow::of(handle, slot));
        slot.or_else(|| self.find_joint(address).map(SlotWindow::of_joint))
    }

    /// Says how many bytes of the window that `address` lies in are registered, from the window's start; see
    /// [`Leases::set_registered`](crate::pool::Leases::set_registered). `false` too of an address that is of no window,
    /// and for more than nothing of a window that is not held. With nothing, and the engine closed, memory that is not
    /// held is given back.
    #[must_use = "a refusal means that the memory may be given back at any time"]
    pub fn set_registered(&self, address: usize, bytes: u64) -> bool {
        if let Some((windows, window)) = self.find_joint(address) {
            return windows.set_registered(window, bytes);
        }
        self.find(address).is_some_and(|(handle, slot)| {
            let holds = &handle.control.worker(handle.worker).slots.holds[slot.index()];
            (bytes == 0 || holds.load(Ordering::Relaxed) > 0) && handle.set_registered(slot, bytes)
        })
    }

    /// The windows of slots of which any bytes are registered.
    #[must_use]
    pub fn registered_windows(&self) -> Vec<SlotWindow> {
        let slots = |handle: &Arc<WorkerHandle>| (0..handle.control.geometry().slots).map(SlotId::new);
        let windows = self.0.iter().flat_map(|handle| slots(handle).map(|slot| SlotWindow::of(handle, slot)));
        windows.filter(|window| window.registered > 0).collect()
    }

    fn find_joint(&self, address: usize) -> Option<(&JointWindows, u32)> {
        let windows = self.1.as_deref()?;
        windows.find(address).map(|window| (windows, window))
    }

    fn find(&self, address: usize) -> Option<(&WorkerHandle, SlotId)> {
        let control = &self.0.first()?.control;
        let offset = address.checked_sub(control.segment().base().as_ptr() as usize)?;
        let (worker, slot) = control.slot_at(offset as u64)?;
        Some((self.0.get(worker as usize)?, slot))
    }
}
