//! A driver that has pages of slots: as long as they are registered, it sees what the slots hold.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use ringloader_core::transport::Control;
use ringloader_core::transport::slot_memory::{SlotMemory, SlotWindow};
use rustix::io::{pread, read};
use rustix::param::page_size;
use rustix::pipe::{SpliceFlags, pipe, splice};
use rustix::process::{Signal, kill_process};

use super::content::{Profile, Random};
use super::keeper::Keepers;
use super::parent::{Kept, PATIENCE, Parent, Seen};
use super::storms::Effort;

const MIB: u64 = 1 << 20;

/// Pages of one window. A page of the memfd that was spliced into a pipe is that very page, and not a copy: read
/// later, the pipe gives what stands in it by then, as a device would.
#[derive(Debug)]
struct Pages {
    /// Offsets of two pages in the segment: the first of the window and the last that is registered.
    offsets: [u64; 2],
    reader: OwnedFd,
    writer: OwnedFd,
}

impl Pages {
    fn lock(control: &Control, memfd: &OwnedFd, address: usize, bytes: u64) -> Self {
        let start = (address - control.segment().base().as_ptr() as usize) as u64;
        let (reader, writer) = pipe().unwrap();
        let pages = Self { offsets: [start, start + bytes - page_size() as u64], reader, writer };
        pages.splice(control, memfd);
        pages
    }

    fn splice(&self, control: &Control, memfd: &OwnedFd) {
        for mut offset in self.offsets {
            // Reads a byte, so that the page is there, as a locked page is.
            control.segment().copy_out(offset, 1, &mut Vec::new()).unwrap();
            let len = splice(memfd, Some(&mut offset), &self.writer, None, page_size(), SpliceFlags::empty());
            assert_eq!(len, Ok(page_size()));
        }
    }

    /// Returns true if the pages are still those of the window. Nothing may be written to the window meanwhile.
    fn are_those_of_the_window(&self, control: &Control, memfd: &OwnedFd) -> bool {
        for offset in self.offsets {
            let (mut seen, mut there) = (vec![0; page_size()], vec![0; page_size()]);
            let mut len = 0;
            while len < seen.len() {
                len += read(&self.reader, &mut seen[len..]).unwrap();
            }
            // Reads the file and not the mapping, which may be gone by mistake.
            assert_eq!(pread(memfd, &mut there, offset), Ok(page_size()));
            if seen != there {
                return false;
            }
        }
        self.splice(control, memfd);
        true
    }
}

/// The parent's driver, and what is registered with it.
#[derive(Debug)]
struct Driver {
    memory: SlotMemory,
    control: Arc<Control>,
    memfd: OwnedFd,
    registered: HashMap<usize, Pages>,
    random: Random,
    looks: u64,
    refused: u64,
}

impl Driver {
    /// At most so many windows are registered: each takes two descriptors.
    const MOST: usize = 40;

    fn of(parent: &Parent) -> Self {
        let engine = &parent.engine;
        Self {
            memory: engine.slot_memory(),
            control: engine.control().clone(),
            memfd: engine.worker_fds(0).segment.as_fd().try_clone_to_owned().unwrap(),
            registered: HashMap::new(),
            random: Random(parent.profile.seed),
            looks: 0,
            refused: 0,
        }
    }

    /// Looks at the slot of a batch that is held, and now and then registers more of it, or none any more.
    fn see(&mut self, batch: &Kept) {
        let Some(SlotWindow { address, touched, registered }) = batch.backing().window() else { return };
        if let Some(pages) = self.registered.get(&address) {
            self.look(pages);
            self.looks += 1;
            assert!(registered > 0 && registered <= touched);
            if self.random.once_in(16) {
                self.registered.remove(&address);
                assert!(self.memory.set_registered(address, 0));
            }
        } else {
            assert_eq!(registered, 0);
        }
        let bytes = self.random.magnitude(touched).next_multiple_of(page_size() as u64);
        if self.registered.len() < Self::MOST && bytes > registered && self.random.once_in(4) {
            if self.memory.set_registered(address, bytes) {
                let pages = Pages::lock(&self.control, &self.memfd, address, bytes);
                self.registered.insert(address, pages);
            } else {
                self.refused += 1;
            }
        }
        assert_eq!(self.memory.registered_windows().len(), self.registered.len());
    }

    fn look(&self, pages: &Pages) {
        let same = pages.are_those_of_the_window(&self.control, &self.memfd);
        assert!(same, "the driver has other pages than the slot");
    }

    /// Looks at all slots, when no worker is there.
    fn look_at_all(&self) {
        self.registered.values().for_each(|pages| self.look(pages));
    }

    fn unregister(mut self) {
        for (address, _) in self.registered.drain() {
            assert!(self.memory.set_registered(address, 0));
        }
    }
}

/// Slots of all sizes are registered and unregistered while workers make room, rest, are killed and succeeded, and
/// end with their epoch; at last the memory is closed before the driver leaves it, or after.
pub(crate) fn registered(effort: Effort) -> Seen {
    let mut random = Random(effort.seed);
    let (end, mut seen, mut looks, mut refused) = (Instant::now() + effort.time, Seen::default(), 0, 0);
    // A busy machine may not let the worker rest in time.
    assert!((0..10).any(|_| !keeps_pages(false)), "nothing was given back");
    assert!(keeps_pages(true), "the driver has other pages than the slot");
    for round in 0.. {
        let closed_first = round % 2 == 0;
        let profile = Profile { seed: random.next(), leaves: 3, leaf: 120 << 10 };
        let mut parent = Parent::with_workers(2, 8, MIB / 2, profile);
        let mut driver = Driver::of(&parent);
        let mut keepers = Keepers::new(random.next(), Duration::from_millis(20));
        for _ in 0..4 {
            parent.pump(Duration::from_millis(60), |batch, leased| {
                driver.see(&batch);
                keepers.keep(batch, leased);
            });
            match random.below(3) {
                0 => thread::sleep(Duration::from_millis(250)),
                1 => {
                    let worker = random.below(2) as u32;
                    kill_process(parent.pid(worker), Signal::KILL).unwrap();
                    parent.pump_to_kill(worker, |batch, leased| {
                        driver.see(&batch);
                        keepers.keep(batch, leased);
                    });
                    parent.succeed(worker, None);
                }
                _ => {
                    parent.end_workers(false);
                    parent = parent.next_epoch_after(|| driver.look_at_all());
                }
            }
        }
        keepers.finish();
        looks += driver.looks;
        refused += driver.refused;
        if closed_first {
            parent.end_workers(false);
            parent.engine.close();
            driver.look_at_all();
            driver.unregister();
            parent.check_empty();
            seen += parent.seen;
        } else {
            parent.end_workers(true);
            driver.look_at_all();
            driver.unregister();
            seen += parent.finish_ended();
        }
        // A busy machine may take longer until all has happened.
        let has_seen_all = seen.kills > 0 && refused > 0 && seen.shrunk > 0;
        if Instant::now() >= end + if has_seen_all { Duration::ZERO } else { PATIENCE } && round > 0 {
            break;
        }
    }
    assert!(looks > 50 && refused > 0 && seen.shrunk > 0, "{looks} looks, {refused} refused, {seen:?}");
    seen
}

/// A worker that rests gives its free slots back: without a word of the parent's, the driver goes on to see the old
/// bytes, while the worker fills other pages. Returns whether they are the same.
fn keeps_pages(is_registered: bool) -> bool {
    let profile = Profile { seed: 1, leaves: 1, leaf: 64 << 10 };
    let mut parent = Parent::with_workers(1, 1, MIB, profile);
    let mut next = || {
        parent.send(0);
        let start = Instant::now();
        loop {
            if let Some((batch, _)) = parent.take() {
                let driver = Driver::of(&parent);
                return (batch.backing().window().unwrap(), batch, driver);
            }
            parent.engine.wait_for(None, Duration::from_millis(20)).unwrap();
            assert!(start.elapsed() < PATIENCE);
        }
    };
    let (SlotWindow { address, touched, .. }, batch, driver) = next();
    assert!(!is_registered || driver.memory.set_registered(address, touched));
    let pages = Pages::lock(&driver.control, &driver.memfd, address, touched);
    assert!(pages.are_those_of_the_window(&driver.control, &driver.memfd));
    drop(batch);
    thread::sleep(Duration::from_millis(400));
    // The worker may keep something in a slot for some batches.
    let _again = loop {
        let (window, batch, _) = next();
        if window.address == address {
            break batch;
        }
    };
    let same = pages.are_those_of_the_window(&driver.control, &driver.memfd);
    driver.unregister();
    same
}
