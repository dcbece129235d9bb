//! The windows of batches that all workers make, in the main process: which are free, and which the user keeps.
//!
//! ```text
//!   FREE --take--> of a batch under way --its result lies there--> HELD --lease--> LEASED
//!    ^                      |  its result lies elsewhere             |  release       |
//!    +----------------------+----------------------------------------+----------------+
//! ```
//!
//! Only the main process knows these states: it alone lays batches out, so no word of them is shared, and no worker can
//! lose one. A window is the workers' from the moment that its batch is laid out until the batch is answered, as
//! [`joint`](crate::joint) says. Then none of them writes there, whatever the user keeps.
//!
//! ORDERING window-returned: the user's last access, on any thread, comes before the bit; who takes the bit lays the next
//! batch out, which the workers see before they write (ORDERING joint-laid-out).
//!
//! # Forked children
//!
//! A child of the main process may read what its parent had leased at the fork. The window comes back once the child has
//! gone, as any lent memory ([`process`](crate::process)), and counts as leased until then. One that was held, and is not
//! leased, comes back at once: its batch is copied, and no object of the child's lies there. A child releases nothing.
//!
//! # When the loader closes
//!
//! `JointWindows::close` takes what is free out of the set for good, and gives its pages back; whoever releases a window
//! later does the same for that one. Both change the same word, so one of them sees the other, and each bit is taken by
//! one of them.
//!
//! # Memory that a driver has
//!
//! The main process may register the front of a window that it holds with a driver
//! ([`SlotMemory`](crate::transport::slot_memory::SlotMemory)). A window keeps its pages until the loader closes, and nothing
//! is written there after, so a device that copies out of it never reads pages that are not the window's any more. Only
//! the mapping must outlive the registration.

use crate::error::{Error, Result};
use crate::forks::Moment;
use crate::number::{u32_from, usize_from};
use crate::os::Segment;
use crate::os::page::page_size;
use crate::process::{self, Process};
use crate::sync::{Arc, AtomicBool, AtomicU64, Ordering};

/// All windows of a loader.
#[derive(Debug)]
pub struct JointWindows {
    bytes: Arc<Segment>,
    count: u32,
    /// Bytes of each.
    len: u64,
    /// One bit for each that is free.
    free: Box<[AtomicU64]>,
    fronts: Box<[Front]>,
    leased: AtomicU64,
    most_leased: u64,
    closed: AtomicBool,
    process: &'static Process,
}

/// Counts bytes of a window, from its start. Relaxed: only threads of the main process count, and with the count they
/// publish nothing.
#[derive(Debug, Default)]
struct Front {
    /// Bytes that are backed by memory, in whole pages.
    touched: AtomicU64,
    /// Bytes that a driver has.
    registered: AtomicU64,
}

impl JointWindows {
    pub(super) fn new(bytes: Arc<Segment>, count: u32, most_leased: u32, len: u64) -> Self {
        let free: Box<[AtomicU64]> = (0..count.div_ceil(u64::BITS)).map(|_| AtomicU64::new(0)).collect();
        for window in 0..count as usize {
            free[window / 64].fetch_or(1 << (window % 64), Ordering::Relaxed);
        }
        Self {
            bytes,
            count,
            len,
            free,
            fronts: (0..count).map(|_| Front::default()).collect(),
            leased: AtomicU64::new(0),
            most_leased: most_leased.into(),
            closed: AtomicBool::new(false),
            process: process::current(),
        }
    }

    /// Takes the first free one, which is the warmest.
    pub(super) fn take(&self) -> Option<u32> {
        for (number, word) in self.free.iter().enumerate() {
            let mut bits = word.load(Ordering::Relaxed);
            while bits != 0 {
                let bit = bits & bits.wrapping_neg();
                // ORDERING window-returned
                bits = word.fetch_and(!bit, Ordering::Acquire);
                if bits & bit != 0 {
                    return Some(u32_from(number as u64) * u64::BITS + bit.trailing_zeros());
                }
            }
        }
        None
    }

    /// Says that nothing of this process or of a worker uses a window any more. Any thread may do that.
    pub(super) fn put_back(&self, window: u32) {
        let Some(word) = self.free.get(window as usize / 64) else { return };
        // ORDERING window-returned, and that the memory is closed, if that came before.
        word.fetch_or(1 << (window % 64), Ordering::AcqRel);
        if self.closed.load(Ordering::Relaxed) {
            self.give_free_back();
        }
    }

    /// Gives the memory of all windows that are not held back, now and when they are released. The workers have
    /// ended. In a forked child nothing is given back: the memory is the parent's.
    pub(super) fn close(&self) {
        if !self.process.is_current() {
            return;
        }
        self.closed.store(true, Ordering::Relaxed);
        self.give_free_back();
    }

    fn give_free_back(&self) {
        for (number, word) in self.free.iter().enumerate() {
            // ORDERING window-returned: that it is closed is seen by whoever sets a bit after this.
            let mut bits = word.swap(0, Ordering::AcqRel);
            while bits != 0 {
                let window = number as u64 * 64 + u64::from(bits.trailing_zeros());
                bits &= bits - 1;
                // Refused, the pages go with the mapping.
                let _ = self.bytes.punch(window * self.len, self.len);
            }
        }
    }

    fn is_out(&self, window: u32) -> bool {
        let bit = 1 << (window % 64);
        window < self.count && self.free[window as usize / 64].load(Ordering::Relaxed) & bit == 0
    }

    /// The window that an address of this process lies in.
    pub(crate) fn find(&self, address: usize) -> Option<u32> {
        let offset = address.checked_sub(self.bytes.base().as_ptr() as usize)? as u64;
        (offset < self.bytes.len()).then_some(u32_from(offset / self.len))
    }

    /// Returns the address of a window in this process, and how many bytes from there are backed by memory, and a driver
    /// has.
    pub(crate) fn front(&self, window: u32) -> (usize, u64, u64) {
        let start = self.bytes.base().as_ptr() as usize + usize_from(u64::from(window) * self.len);
        let Front { touched, registered } = &self.fronts[window as usize];
        (start, touched.load(Ordering::Relaxed), registered.load(Ordering::Relaxed))
    }

    /// Says how many bytes of a window a driver is about to get, or still has. `false`, and nothing is changed, in a forked
    /// child, and for more than nothing of a free window, or more than is backed by memory.
    pub(crate) fn set_registered(&self, window: u32, bytes: u64) -> bool {
        let Front { touched, registered } = &self.fronts[window as usize];
        let has = || self.is_out(window) && bytes <= touched.load(Ordering::Relaxed);
        let may = self.process.is_current() && (bytes == 0 || has());
        if may {
            registered.store(bytes, Ordering::Relaxed);
        }
        may
    }

    /// Replaces `into` by a copy of bytes of a window, of which `used` are in use.
    pub(crate) fn copy_out(
        &self,
        window: u32,
        used: u64,
        offset: u64,
        len: u64,
        into: &mut Vec<u8>,
    ) -> Result<()> {
        if window >= self.count || used > self.len {
            return Err(Error::Corrupt(format!("{used} bytes in window {window} of {}", self.count)));
        }
        self.bytes.copy_out(u64::from(window) * self.len + offset, len, into)
    }
}

impl Drop for JointWindows {
    fn drop(&mut self) {
        let has_driver = self.fronts.iter().any(|front| front.registered.load(Ordering::Relaxed) > 0);
        // Memory that a driver of this process still has outlives this object. The tasks, which have it too, go before.
        let bytes = Arc::get_mut(&mut self.bytes);
        if let Some(bytes) = bytes.filter(|_| has_driver && self.process.is_current()) {
            bytes.keep_mapped();
        }
    }
}

/// A window with a batch in it that has arrived. Dropped, on any thread, it is free.
#[derive(Debug)]
pub struct HeldJointWindow {
    windows: Arc<JointWindows>,
    window: u32,
    is_leased: bool,
    held: Moment,
}

impl HeldJointWindow {
    /// The batch takes the first `used` bytes of the window.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if no batch was laid out there.
    pub(crate) fn new(windows: Arc<JointWindows>, window: u32, used: u64) -> Result<Self> {
        if !windows.is_out(window) {
            return Err(Error::Corrupt(format!("a batch in window {window}, where none was laid out")));
        }
        let used = used.min(windows.len).next_multiple_of(page_size());
        windows.fronts[window as usize].touched.fetch_max(used, Ordering::Relaxed);
        windows.process.count_lent();
        let held = windows.process.now();
        Ok(Self { windows, window, is_leased: false, held })
    }

    /// All windows, and which of them this is.
    pub(crate) fn number(&self) -> (&JointWindows, u32) {
        (&self.windows, self.window)
    }

    /// In which segment the window lies, and where it begins.
    pub(crate) fn location(&self) -> (&Segment, u64) {
        (&self.windows.bytes, u64::from(self.window) * self.windows.len)
    }

    /// Makes the window the user's. `false`: he keeps as many as he may.
    pub(crate) fn lease(&mut self) -> bool {
        let JointWindows { leased, most_leased, process, .. } = &*self.windows;
        let more = || {
            let add = |now: u64| (now < *most_leased).then_some(now + 1);
            leased.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).is_ok()
        };
        self.is_leased = self.is_leased || more() || {
            // Children for which windows are kept may have gone.
            process.look();
            more()
        };
        self.is_leased
    }
}

impl Drop for HeldJointWindow {
    fn drop(&mut self) {
        let Self { windows, window, is_leased, held } = self;
        let returned = || Returned { windows: windows.clone(), window: *window, is_leased: *is_leased };
        let is_free = windows.process.is_still(*held) || (!*is_leased && windows.process.is_current());
        if is_free {
            drop(returned());
        } else {
            windows.process.give_back(*held, returned);
        }
    }
}

/// Releases a window when it is dropped.
struct Returned {
    windows: Arc<JointWindows>,
    window: u32,
    is_leased: bool,
}

impl Drop for Returned {
    fn drop(&mut self) {
        if self.is_leased {
            self.windows.leased.fetch_sub(1, Ordering::Relaxed);
        }
        self.windows.put_back(self.window);
        self.windows.process.discount_lent();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn windows(count: u32, most_leased: u32) -> Arc<JointWindows> {
        let len = 1 << 16;
        let (bytes, _fd) = Segment::create("windows", len * u64::from(count)).unwrap();
        Arc::new(JointWindows::new(Arc::new(bytes), count, most_leased, len))
    }

    #[test]
    fn the_first_free_window_is_taken() {
        let windows = windows(70, 1);
        let taken: Vec<_> = std::iter::from_fn(|| windows.take()).collect();
        assert_eq!(taken, (0..70).collect::<Vec<_>>());
        windows.put_back(69);
        windows.put_back(3);
        assert_eq!([windows.take(), windows.take(), windows.take()], [Some(3), Some(69), None]);
    }

    #[test]
    fn a_held_window_comes_back_and_the_user_keeps_no_more_than_he_may() {
        let windows = windows(3, 1);
        assert!(
            HeldJointWindow::new(windows.clone(), 0, 1).is_err()
                && HeldJointWindow::new(windows.clone(), 9, 1).is_err()
        );
        let numbers = [windows.take(), windows.take()].map(Option::unwrap);
        let [mut first, mut second] =
            numbers.map(|window| HeldJointWindow::new(windows.clone(), window, 1).unwrap());
        assert!(first.lease() && first.lease() && !second.lease());
        assert_eq!(windows.take(), Some(2));
        drop(second);
        assert_eq!((windows.take(), windows.leased.load(Ordering::Relaxed)), (Some(1), 1));
        drop(first);
        assert_eq!((windows.take(), windows.leased.load(Ordering::Relaxed)), (Some(0), 0));
    }

    #[test]
    fn what_is_touched_of_a_held_window_may_be_registered() {
        let windows = windows(2, 1);
        let window = windows.take().unwrap();
        assert!(!windows.set_registered(window, 1), "nothing is touched");
        let held = HeldJointWindow::new(windows.clone(), window, 5).unwrap();
        let (address, touched, registered) = windows.front(window);
        assert_eq!((touched, registered), (page_size(), 0));
        let size = windows.len as usize;
        let near = [address - 1, address, address + size - 1, address + size, address + 2 * size];
        assert_eq!(near.map(|address| windows.find(address)), [None, Some(0), Some(0), Some(1), None]);
        assert!(!windows.set_registered(window, touched + 1) && windows.set_registered(window, touched));
        assert_eq!(windows.front(window), (address, touched, touched));
        drop(held);
        assert!(!windows.set_registered(window, touched), "it is free");
        assert!(windows.set_registered(window, 0));
        assert_eq!(windows.front(window), (address, touched, 0));
    }

    #[test]
    fn what_a_driver_has_stays_mapped() {
        for bytes in [0, 1] {
            let (segment, fd) = Segment::create("windows", 1 << 16).unwrap();
            let windows = Arc::new(JointWindows::new(Arc::new(segment), 1, 1, 1 << 16));
            let held = HeldJointWindow::new(windows.clone(), windows.take().unwrap(), 5).unwrap();
            assert!(windows.set_registered(0, bytes));
            windows.close();
            drop((windows, held));
            let inode = rustix::fs::fstat(&fd).unwrap().st_ino.to_string();
            let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
            let is_mapped = maps.lines().any(|line| line.split_whitespace().nth(4) == Some(&inode));
            assert_eq!(is_mapped, bytes > 0);
        }
    }

    #[test]
    fn closed_windows_give_their_pages_back() {
        let windows = windows(2, 1);
        let held = windows.take().unwrap();
        let write = |window: u32| windows.bytes.copy_in(u64::from(window) << 16, &[7; 9]).unwrap();
        let read = |window: u32| {
            let mut bytes = Vec::new();
            windows.bytes.copy_out(u64::from(window) << 16, 9, &mut bytes).unwrap();
            bytes
        };
        (0..2).for_each(write);
        windows.close();
        assert_eq!((read(held), read(1)), (vec![7; 9], vec![0; 9]));
        assert_eq!(windows.take(), None);
        windows.put_back(held);
        assert_eq!((read(held), windows.take()), (vec![0; 9], None));
    }
}
