//! Models of what is lent over a fork: a forked child reads a slot that its parent releases. `ci/loom.sh` runs them,
//! and then each with a fault planted that it must catch.
//!
//! A child is a thread that reads the payload, if the fork found the object's last reference. The fork looks for that
//! by a read-modify-write, and a reference goes by one: in a process the one that comes later finds what the earlier
//! had stored, for a fork makes all memory read-only, and the next write to it is a page fault.
#![cfg(ringloader_loom)]

mod support;

use std::ops::Range;

use ringloader_core::{
    Result,
    forks::{Child, ForkClock, Forks, Moment},
    pool::{Growth, Leases, Limits, Pages, SlotId, WorkerSlots},
    sync::{
        Arc, AtomicU32, Ordering,
        thread::{self, JoinHandle},
    },
};
use support::{
    heap_words::HeapWords,
    model::{Seen, explore_all},
    payload::Payload,
};

const LIMITS: Limits = Limits { share: 4 << 12, window: 2 << 12, page: 1 << 12 };
const SLOT: SlotId = SlotId::new(0);

struct Plenty;

impl Pages for Plenty {
    fn punch(&mut self, _slot: SlotId, _bytes: Range<u64>) -> Result<()> {
        unreachable!("one slot is never short of room")
    }

    fn available(&mut self, _need: u64) -> Result<()> {
        Ok(())
    }
}

/// The processes of one fork that are left: the child, and those that it has forked.
#[derive(Clone)]
struct Processes(Arc<AtomicU32>);

impl Processes {
    fn new() -> Self {
        Self(Arc::new(AtomicU32::new(0)))
    }

    fn end(&self) {
        self.0.fetch_sub(1, Ordering::Release);
    }
}

impl Child for Processes {
    fn has_gone(&self) -> bool {
        self.0.load(Ordering::Acquire) == 0
    }
}

/// One slot, the object that lies over it, and the process that forks.
struct World {
    heap: HeapWords,
    leases: Leases,
    payload: Vec<Payload>,
    clock: ForkClock,
    forks: Forks<Processes>,
    /// References to the object.
    references: AtomicU32,
}

impl World {
    fn new() -> Arc<Self> {
        let clock = ForkClock::default();
        clock.start(1);
        Arc::new(Self {
            heap: HeapWords::new(1),
            leases: Leases::new(LIMITS, 1),
            payload: Payload::cells(1),
            clock,
            forks: Forks::new(),
            references: AtomicU32::new(0),
        })
    }

    /// Fills the slot, if it is free.
    fn fill(&self, worker: &mut WorkerSlots, value: u64) -> bool {
        let Some(slot) = worker.begin(self.heap.words()) else { return false };
        assert_eq!(worker.grow(self.heap.words(), slot, 1, &mut Plenty), Ok(Growth::Ready));
        self.payload[0].write(value);
        worker.commit(slot);
        true
    }

    /// Takes what was filled.
    fn lend(&self) -> Moment {
        self.leases.hold(self.heap.words(), SLOT);
        let lent = self.clock.now();
        self.references.fetch_add(1, Ordering::AcqRel);
        lent
    }

    /// Drops the object: MIRRORS `HeldSlot::drop`.
    fn drop_object(world: &Arc<Self>, lent: Moment) {
        assert_eq!(world.references.fetch_sub(1, Ordering::AcqRel), 1);
        let returned = Returned(Arc::clone(world));
        if world.clock.is_still(lent) {
            drop(returned);
        } else {
            world.forks.give_back(lent, Box::new(returned));
        }
    }

    /// Forks. The child, if it has the object: it must find `value` in it.
    fn fork(world: &Arc<Self>, value: u64, grandchild: bool) -> Option<JoinHandle<()>> {
        let processes = Processes::new();
        let number = world.forks.begin(&world.clock, processes.clone());
        processes.0.store(1, Ordering::Relaxed);
        let has_it = world.references.fetch_add(0, Ordering::AcqRel) > 0;
        let child = has_it.then(|| {
            let (world, processes) = (Arc::clone(world), processes.clone());
            thread::spawn(move || {
                if grandchild {
                    // The child ends at once; what it has forked reads on.
                    processes.0.fetch_add(1, Ordering::Relaxed);
                    processes.end();
                }
                assert_eq!(world.payload[0].read(), value, "the child sees another batch");
                processes.end();
            })
        });
        if child.is_none() {
            processes.end();
        }
        world.forks.end(&world.clock, number, true);
        child
    }

    /// The slot is in use no more: it must be there.
    fn assert_back(&self, worker: &mut WorkerSlots) {
        self.forks.look();
        assert!(!self.forks.retains_anything(), "something is kept for no child");
        assert_eq!(Leases::busy(self.heap.words()), [0], "the slot is not held");
        assert_eq!(worker.begin(self.heap.words()), Some(SLOT), "the slot was lost");
    }
}

/// MIRRORS `Returned` of the core's `transport::received`.
struct Returned(Arc<World>);

impl Drop for Returned {
    fn drop(&mut self) {
        self.0.leases.release(self.0.heap.words(), SLOT, None);
    }
}

/// The object goes while the process forks, and the worker waits for the slot.
fn dropped_around_a_fork(name: &str, grandchild: bool) {
    let situations = &["before the fork", "kept for the child", "the child had gone"];
    explore_all(name, situations, move |seen| {
        let world = World::new();
        let mut worker = WorkerSlots::new(world.heap.words(), LIMITS);
        assert!(world.fill(&mut worker, 1));
        let lent = world.lend();
        let user = {
            let world = Arc::clone(&world);
            thread::spawn(move || World::drop_object(&world, lent))
        };
        let child = World::fork(&world, 1, grandchild);
        let has_child = child.is_some();
        let again = world.fill(&mut worker, 2);
        user.join().unwrap();
        note(seen, has_child, world.forks.retains_anything());
        child.into_iter().for_each(|child| child.join().unwrap());
        if again {
            world.lend();
            World::drop_object(&world, world.clock.now());
        }
        world.assert_back(&mut worker);
    });
}

fn note(seen: &Seen, has_child: bool, is_kept: bool) {
    seen.note(match (has_child, is_kept) {
        (false, _) => "before the fork",
        (true, true) => "kept for the child",
        (true, false) => "the child had gone",
    });
}

#[test]
fn the_last_reference_goes_around_a_fork() {
    dropped_around_a_fork("the_last_reference_goes_around_a_fork", false);
}

#[test]
fn a_grandchild_outlives_the_child() {
    dropped_around_a_fork("a_grandchild_outlives_the_child", true);
}

/// Another thread gets a batch, and drops it, at any moment of the fork.
#[test]
fn a_batch_is_lent_and_dropped_around_a_fork() {
    let situations = &["before the fork", "kept for the child", "the child had gone"];
    explore_all("a_batch_is_lent_and_dropped_around_a_fork", situations, |seen| {
        let world = World::new();
        let mut worker = WorkerSlots::new(world.heap.words(), LIMITS);
        assert!(world.fill(&mut worker, 1));
        let user = {
            let world = Arc::clone(&world);
            thread::spawn(move || {
                let lent = world.lend();
                World::drop_object(&world, lent);
            })
        };
        let child = World::fork(&world, 1, false);
        let has_child = child.is_some();
        let again = world.fill(&mut worker, 2);
        user.join().unwrap();
        note(seen, has_child, world.forks.retains_anything());
        child.into_iter().for_each(|child| child.join().unwrap());
        if again {
            world.lend();
            World::drop_object(&world, world.clock.now());
        }
        world.assert_back(&mut worker);
    });
}

/// The segment is cached and taken over by other workers while a child may have the slot.
#[test]
fn storing_leaves_what_a_child_has() {
    let situations = &["busy for the child", "free"];
    explore_all("storing_leaves_what_a_child_has", situations, |seen| {
        let world = World::new();
        let mut worker = WorkerSlots::new(world.heap.words(), LIMITS);
        assert!(world.fill(&mut worker, 1));
        drop(worker);
        let lent = world.lend();
        let user = {
            let world = Arc::clone(&world);
            thread::spawn(move || World::drop_object(&world, lent))
        };
        let child = World::fork(&world, 1, false);
        world.forks.look();
        let busy = Leases::busy(world.heap.words());
        if busy == [0] {
            // MIRRORS `Engine::keep`: the pages of what is not held are given back.
            world.payload[0].write(0);
        }
        seen.note(if busy == [0] { "free" } else { "busy for the child" });
        let mut worker = WorkerSlots::take_over(world.heap.words(), LIMITS, &busy);
        let again = world.fill(&mut worker, 2);
        assert!(again || busy != [0], "the slot was lost");
        user.join().unwrap();
        child.into_iter().for_each(|child| child.join().unwrap());
        if again {
            world.lend();
            World::drop_object(&world, world.clock.now());
        }
        world.assert_back(&mut worker);
    });
}
