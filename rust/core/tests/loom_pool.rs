//! Models of the slot protocol: every interleaving, and every value that a relaxed load may return.
//! `ci/loom.sh` runs them, and then each with a fault planted that it must catch.
//!
//! One slot, so that everything contends for it. Its payload is a cell that loom watches: a missing
//! edge between the last reader and the next filling is reported as a race, and not just as an old
//! value. A dead worker is one that does nothing more; its successor runs in the thread that plays
//! the parent.
#![cfg(ringloader_loom)]

mod support;

use std::{
    ops::Range,
    sync::{Arc as Shared, atomic::AtomicBool},
};

use loom::sync::Notify;
use ringloader_core::{
    Result,
    pool::{Closing, Custody, Fill, Growth, Leases, Limits, Pages, SlotId, SlotWords, WorkerSlots, retire},
    sync::{
        Arc, AtomicU32, AtomicU64, Ordering,
        doorbell::{WaitFlag, sleep_unless},
        thread::{self, JoinHandle},
    },
    testing::crash::killed_after,
};
use support::{
    heap_words::HeapWords,
    model::{explore, explore_all},
    payload::Payload,
};

const PAGE: u64 = 4096;
const LIMITS: Limits = Limits { share: 4 * PAGE, window: 2 * PAGE, page: 4 << 10 };
const SLOT: SlotId = SlotId::new(0);

/// Memory without end.
struct Plenty;

impl Pages for Plenty {
    fn punch(&mut self, _slot: SlotId, _bytes: Range<u64>) -> Result<()> {
        unreachable!("one slot is never short of room")
    }

    fn available(&mut self, _need: u64) -> Result<()> {
        Ok(())
    }
}

/// One slot, its payload, the parent's leases, and a ring of one batch.
struct World {
    heap: HeapWords,
    leases: Leases,
    payload: Vec<Payload>,
    tail: AtomicU32,
}

impl World {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            heap: HeapWords::new(1),
            leases: Leases::new(LIMITS, 1),
            payload: Payload::cells(1),
            tail: AtomicU32::new(0),
        })
    }

    fn words(&self) -> SlotWords<'_> {
        self.heap.words()
    }

    /// FREE -> COMMITTED, if the slot is free.
    fn fill(&self, worker: &mut WorkerSlots, value: u64) -> bool {
        let Some(slot) = worker.begin(self.words()) else {
            return false;
        };
        let growth = worker.grow(self.words(), slot, value * PAGE, &mut Plenty);
        assert_eq!(growth, Ok(Growth::Ready));
        self.payload[0].write(value);
        worker.commit(slot);
        true
    }

    /// FREE -> HELD, if the slot is free.
    fn deliver(&self, worker: &mut WorkerSlots, value: u64) -> bool {
        let filled = self.fill(worker, value);
        if filled {
            self.leases.hold(self.words(), SLOT);
        }
        filled
    }

    /// Does what the user's thread does with a held slot.
    fn use_up(&self, value: u64) {
        assert_eq!(self.payload[0].read(), value);
        self.leases.release(self.words(), SLOT, None);
    }

    fn in_thread(world: &Arc<Self>, value: u64) -> JoinHandle<()> {
        let world = Arc::clone(world);
        thread::spawn(move || world.use_up(value))
    }

    fn successor(&self) -> WorkerSlots {
        let worker = WorkerSlots::take_over(self.words(), LIMITS, &Leases::busy(self.words()));
        let touched = self.words().touched()[0].load(Ordering::Relaxed);
        assert_eq!(worker.resident(), touched);
        assert_eq!(self.words().resident.load(Ordering::Relaxed), touched);
        worker
    }

    /// Nothing is held any more: the slot must be there once, and after a take-over too.
    fn assert_whole(&self, mut worker: WorkerSlots) {
        let busy = Leases::busy(self.words());
        assert_eq!(busy, [0], "a hold was lost or is left over");
        let slot = worker.begin(self.words());
        assert_eq!(slot, Some(SLOT), "the slot was lost");
        assert_eq!(worker.begin(self.words()), None, "the slot was handed out twice");
        self.assert_recoverable();
    }

    /// Checks that a take-over recovers the slot, which may have been lost until then.
    fn assert_recoverable(&self) {
        let mut worker = self.successor();
        let slot = worker.begin(self.words());
        assert_eq!(slot, Some(SLOT), "a take-over did not recover the slot");
        assert_eq!(worker.begin(self.words()), None, "the slot was handed out twice");
    }
}

#[test]
fn two_leases_in_turn() {
    let situations = &["used again", "not back yet"];
    explore_all("two_leases_in_turn", situations, |seen| {
        let world = World::new();
        let mut worker = WorkerSlots::new(world.words(), LIMITS);
        assert!(world.deliver(&mut worker, 1));
        let first = World::in_thread(&world, 1);
        let second = world.deliver(&mut worker, 2).then(|| World::in_thread(&world, 2));
        seen.note(if second.is_some() { "used again" } else { "not back yet" });
        first.join().unwrap();
        if let Some(second) = second {
            second.join().unwrap();
        }
        world.assert_whole(worker);
    });
}

/// `Port::wait_for_room`: its last look is over when the user drops the batch.
#[test]
fn a_worker_that_waits_for_room_finds_it_or_is_woken() {
    explore("a_worker_that_waits_for_room_finds_it_or_is_woken", || {
        let world = World::new();
        let mut worker = WorkerSlots::new(world.words(), LIMITS);
        assert!(world.deliver(&mut worker, 1) && worker.begin(world.words()).is_none());
        let doorbell = Arc::new((WaitFlag::default(), Notify::new()));
        let (user, bell) = (Arc::clone(&world), Arc::clone(&doorbell));
        let user = thread::spawn(move || {
            user.use_up(1);
            if bell.0.take() {
                bell.1.notify();
            }
        });
        let (flag, bell) = &*doorbell;
        while !world.fill(&mut worker, 1) {
            sleep_unless(flag, || Ok(worker.sweep(world.words())), || Ok(bell.wait())).expect("no error");
        }
        user.join().expect("no panic");
    });
}

#[test]
fn held_again_while_the_old_release_is_between_its_stores() {
    let situations = &["held twice"];
    explore_all("held_again_while_the_old_release_is_between_its_stores", situations, |seen| {
        let world = World::new();
        let mut worker = WorkerSlots::new(world.words(), LIMITS);
        assert!(world.deliver(&mut worker, 1));
        let first = World::in_thread(&world, 1);
        if world.deliver(&mut worker, 2) {
            if world.words().holds[0].load(Ordering::Relaxed) == 2 {
                seen.note("held twice");
            }
            // The worker dies while the second batch is held.
            let mut worker = world.successor();
            assert_eq!(worker.begin(world.words()), None, "a held slot was handed out");
            first.join().unwrap();
            // The next one dies too, and by now the old release is done.
            let mut worker = world.successor();
            assert_eq!(worker.begin(world.words()), None, "a held slot was handed out");
            world.use_up(2);
            world.assert_whole(worker);
        } else {
            first.join().unwrap();
        }
    });
}

/// The slot is held, and its release can stand anywhere when the worker dies before one of the
/// stores of its next batch and while the successor takes over.
#[test]
fn take_over_after_a_death_before_any_store() {
    let swept = &[
        "free at once",
        "free at once, its bit swept before",
        "free once its bit came",
        "lost until the next take-over",
    ];
    let unpublished = [
        ("the swap of the free word", &["free at once", "free once its bit came"][..]),
        ("resident", swept),
        ("touched", swept),
        ("tail", swept),
    ];
    for (stores, (store, situations)) in (0..).zip(unpublished) {
        take_over_after(stores, &format!("death before {store}"), situations);
    }
    take_over_after(4, "death after tail", &["in use", "free at once", "free once its bit came"]);
}

fn take_over_after(stores: usize, death: &str, situations: &[&'static str]) {
    explore_all(&format!("take_over, {death}"), situations, move |seen| {
        let world = World::new();
        let mut worker = WorkerSlots::new(world.words(), LIMITS);
        assert!(world.deliver(&mut worker, 1));
        let first = World::in_thread(&world, 1);

        let life = killed_after(stores, || {
            let filled = world.fill(&mut worker, 2);
            if filled {
                world.tail.store(1, Ordering::Release);
            }
            filled
        });
        drop(worker);
        // The parent drains, then takes over.
        let held = world.tail.load(Ordering::Acquire) == 1;
        if held {
            world.leases.hold(world.words(), SLOT);
        }
        let mut worker = world.successor();
        let at_once = worker.begin(world.words()).is_some();
        assert!(!(held && at_once), "a held slot was handed out");
        if at_once {
            world.payload[0].write(3);
        }
        first.join().unwrap();
        let later = worker.begin(world.words()).is_some();
        assert!(!(held && later), "a held slot was handed out");
        assert!(!(at_once && later), "the slot was handed out twice");
        if later {
            world.payload[0].write(3);
        }
        let swept = life.is_none() && stores > 0;
        seen.note(match (held, at_once, later) {
            (true, ..) => "in use",
            (_, true, _) if swept => "free at once, its bit swept before",
            (_, true, _) => "free at once",
            (_, _, true) => "free once its bit came",
            _ if swept => "lost until the next take-over",
            _ => panic!("only a bit that died with the worker may be missing"),
        });
        if held {
            world.use_up(2);
            world.assert_whole(worker);
        } else {
            assert_eq!(worker.begin(world.words()), None, "the slot was handed out twice");
            world.assert_recoverable();
        }
    });
}

/// The edges that the dead worker acquired died with it: the successor gets its edges from the shared words. (The
/// system orders a death before the news of it; nothing here relies on that.)
#[test]
fn a_dead_worker_passes_no_edge_on() {
    let situations = &["swept before", "not swept before"];
    explore_all("a_dead_worker_passes_no_edge_on", situations, |seen| {
        let world = World::new();
        let mut worker = WorkerSlots::new(world.words(), LIMITS);
        assert!(world.deliver(&mut worker, 1));
        let first = World::in_thread(&world, 1);
        let dead = Arc::new(AtomicU32::new(0));
        let death = {
            let (world, dead) = (Arc::clone(&world), Arc::clone(&dead));
            thread::spawn(move || {
                let swept = worker.begin(world.words()).is_some();
                dead.store(1 + u32::from(swept), Ordering::Relaxed);
            })
        };
        let news = dead.load(Ordering::Relaxed);
        if news > 0 {
            let mut worker = world.successor();
            if worker.begin(world.words()).is_some() {
                seen.note(if news == 2 { "swept before" } else { "not swept before" });
                world.payload[0].write(3);
            }
        }
        first.join().unwrap();
        death.join().unwrap();
    });
}

#[test]
fn an_own_lease_ends_while_the_slot_comes_back() {
    let situations = &["used again", "back, with an own lease", "not back yet"];
    explore_all("an_own_lease_ends_while_the_slot_comes_back", situations, |seen| {
        let world = World::new();
        let mut worker = WorkerSlots::new(world.words(), LIMITS);
        let slot = worker.begin(world.words()).unwrap();
        world.payload[0].write(1);
        let own = worker.own_lease(slot);
        worker.commit(slot);
        world.leases.hold(world.words(), slot);
        let user = World::in_thread(&world, 1);
        let worker_itself = {
            let world = Arc::clone(&world);
            thread::spawn(move || {
                assert_eq!(world.payload[0].read(), 1);
                drop(own);
            })
        };
        let reused = world.deliver(&mut worker, 2);
        if reused {
            seen.note("used again");
        } else if worker.own_leased_slots() == 1 {
            seen.note("back, with an own lease");
        } else {
            seen.note("not back yet");
        }
        user.join().unwrap();
        worker_itself.join().unwrap();
        if reused {
            world.use_up(2);
        }
        world.assert_whole(worker);
    });
}

#[test]
fn a_segment_is_used_again() {
    let situations = &["used again", "not back yet"];
    explore_all("a_segment_is_used_again", situations, |seen| {
        let segment = Arc::new((AtomicU64::new(0), Payload::cells(1)));
        let deliver = |value| {
            segment.1[0].write(value);
            Custody::new(&segment.0).lend();
            let segment = Arc::clone(&segment);
            // The thread's start is the edge of the ring's tail.
            thread::spawn(move || {
                assert_eq!(segment.1[0].read(), value);
                assert!(Custody::new(&segment.0).give_back());
            })
        };
        let first = deliver(1);
        let second = Custody::new(&segment.0).is_back().then(|| deliver(2));
        seen.note(if second.is_some() { "used again" } else { "not back yet" });
        first.join().unwrap();
        if let Some(second) = second {
            second.join().unwrap();
        }
        assert!(Custody::new(&segment.0).is_back());
    });
}

#[test]
fn a_chunk_is_handed_out_again_once_it_was_dropped() {
    let situations = &["the same bytes", "the next ones"];
    explore_all("a_chunk_is_handed_out_again_once_it_was_dropped", situations, |seen| {
        let world = World::new();
        let mut worker = WorkerSlots::new(world.words(), LIMITS);
        let slot = worker.begin(world.words()).unwrap();
        let mut fill = Fill::new(slot);
        let chunk = fill.hand_out(0, 64, worker.own_lease(slot));
        let dropping = {
            let world = Arc::clone(&world);
            thread::spawn(move || {
                world.payload[0].write(1);
                drop(chunk);
            })
        };
        fill.take_back();
        if fill.bump() == 0 {
            seen.note("the same bytes");
            world.payload[0].write(2);
        } else {
            seen.note("the next ones");
        }
        dropping.join().unwrap();
        drop(fill);
        worker.abandon(slot);
        world.assert_whole(worker);
    });
}

/// Ends one hold, as `WorkerHandle::release`, while the engine may close. Whether this gives the pages back.
fn release_and_retire(world: &World, closing: &Closing, value: u64) -> bool {
    world.use_up(value);
    closing.is_closed() && give_back(world)
}

/// Gives the pages back if the slot is not held: a read after that gives zero.
fn give_back(world: &World) -> bool {
    let won = retire(world.words(), SLOT);
    if won {
        world.payload[0].write(0);
    }
    won
}

#[test]
fn closing_meets_a_release() {
    let situations = &["the engine gives the pages back", "the user gives the pages back"];
    explore_all("closing_meets_a_release", situations, |seen| {
        let (world, closing) = (World::new(), Arc::new(Closing::new()));
        let mut worker = WorkerSlots::new(world.words(), LIMITS);
        assert!(world.deliver(&mut worker, 1));
        let user = {
            let (world, closing) = (Arc::clone(&world), Arc::clone(&closing));
            thread::spawn(move || release_and_retire(&world, &closing, 1))
        };
        closing.close();
        let engine = give_back(&world);
        let user = user.join().unwrap();
        assert!(engine || user, "the pages were not given back");
        assert!(!(engine && user), "the pages were given back twice");
        seen.note(situations[usize::from(user)]);
    });
}

/// The old release is between its stores, or before them, when the slot is held again.
#[test]
fn closing_leaves_what_is_held_again() {
    let situations = &["the old release is late", "both are done"];
    explore_all("closing_leaves_what_is_held_again", situations, |seen| {
        let (world, closing) = (World::new(), Arc::new(Closing::new()));
        let mut worker = WorkerSlots::new(world.words(), LIMITS);
        assert!(world.deliver(&mut worker, 1));
        let first = {
            let (world, closing) = (Arc::clone(&world), Arc::clone(&closing));
            thread::spawn(move || release_and_retire(&world, &closing, 1))
        };
        let again = world.deliver(&mut worker, 2);
        drop(worker);
        closing.close();
        let engine = give_back(&world);
        assert!(!(engine && again), "pages that are held were given back");
        let second = again && release_and_retire(&world, &closing, 2);
        let first = first.join().unwrap();
        let times = [engine, first, second].into_iter().filter(|gave| *gave).count();
        assert_eq!(times, 1, "the pages were given back {times} times");
        if again {
            seen.note(if first { "the old release is late" } else { "both are done" });
        }
    });
}

/// A cached segment gives back the memory of what is not held, while the user ends a hold; then other workers come.
#[test]
fn storing_meets_a_release() {
    let situations = &["held", "given back"];
    explore_all("storing_meets_a_release", situations, |seen| {
        let world = World::new();
        let mut worker = WorkerSlots::new(world.words(), LIMITS);
        assert!(world.deliver(&mut worker, 1));
        drop(worker);
        let user = World::in_thread(&world, 1);
        let held = Leases::busy(world.words()) != [0];
        if !held {
            world.payload[0].write(0);
        }
        seen.note(situations[usize::from(!held)]);
        let mut worker = world.successor();
        let filled = world.deliver(&mut worker, 2);
        assert!(filled || held, "the slot was lost");
        user.join().unwrap();
        if filled {
            world.use_up(2);
        }
        world.assert_whole(worker);
    });
}

/// The two pages of the window, as cells: a punch writes to them.
struct TwoPages<'a>([&'a Payload; 2]);

impl Pages for TwoPages<'_> {
    fn punch(&mut self, _slot: SlotId, bytes: Range<u64>) -> Result<()> {
        (bytes.start / PAGE..bytes.end / PAGE).for_each(|page| self.0[page as usize].write(0));
        Ok(())
    }

    fn available(&mut self, _need: u64) -> Result<()> {
        Ok(())
    }
}

/// The parent registers the first page of a batch that it holds, and unregisters it when it has returned the slot.
/// Meanwhile the worker, and then its successor, have nothing to do and give memory back.
#[test]
fn registered_pages_stay() {
    let situations = &["all is given back", "what is not registered is given back", "not back yet"];
    explore_all("registered_pages_stay", situations, |seen| {
        let world = World::new();
        let second = Payload::new();
        let mut worker = WorkerSlots::new(world.words(), LIMITS);
        assert!(world.deliver(&mut worker, 2));
        let parent = {
            let world = Arc::clone(&world);
            thread::spawn(move || {
                assert!(world.leases.set_registered(world.words(), SLOT, PAGE));
                world.use_up(2);
                assert_eq!(world.payload[0].read(), 2, "the device reads other bytes");
                assert!(world.leases.set_registered(world.words(), SLOT, 0));
            })
        };
        let mut memory = TwoPages([&world.payload[0], &second]);
        worker.shrink(world.words(), u64::MAX, &mut memory);
        worker = world.successor();
        worker.shrink(world.words(), u64::MAX, &mut memory);
        let touched = world.words().touched()[0].load(Ordering::Relaxed);
        seen.note(situations[(touched / PAGE) as usize]);
        parent.join().unwrap();
        world.assert_recoverable();
    });
}

/// The last hold ends, the driver unregisters and the engine closes: whichever comes last gives the pages back, after
/// the last access of all.
#[test]
fn closing_meets_unregistering() {
    let situations = &["the engine gives the pages back", "the user does", "the one that unregisters does"];
    explore_all("closing_meets_unregistering", situations, |seen| {
        let (world, closing) = (World::new(), Arc::new(Closing::new()));
        let mut worker = WorkerSlots::new(world.words(), LIMITS);
        assert!(world.deliver(&mut worker, 1));
        assert!(world.leases.set_registered(world.words(), SLOT, PAGE));
        let user = {
            let (world, closing) = (Arc::clone(&world), Arc::clone(&closing));
            thread::spawn(move || release_and_retire(&world, &closing, 1))
        };
        let driver = {
            let (world, closing) = (Arc::clone(&world), Arc::clone(&closing));
            thread::spawn(move || {
                assert_eq!(world.payload[0].read(), 1);
                assert!(world.leases.set_registered(world.words(), SLOT, 0));
                closing.is_closed() && give_back(&world)
            })
        };
        closing.close();
        let gave = [give_back(&world), user.join().unwrap(), driver.join().unwrap()];
        let times = gave.iter().filter(|gave| **gave).count();
        assert_eq!(times, 1, "the pages were given back {times} times");
        seen.note(situations[gave.iter().position(|gave| *gave).unwrap()]);
    });
}

/// The memory behind the windows of four slots.
#[derive(Default)]
struct Memory {
    there: [u64; 4],
    /// Stored to, so that death may come before a punch.
    calls: AtomicU32,
}

impl Pages for Memory {
    fn punch(&mut self, slot: SlotId, bytes: Range<u64>) -> Result<()> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        self.there[slot.index()] = self.there[slot.index()].min(bytes.start);
        Ok(())
    }

    fn available(&mut self, _need: u64) -> Result<()> {
        Ok(())
    }
}

/// The worker dies before any of its stores, also between a punch and what it stores about it: what
/// is counted is never less than what is there.
#[test]
fn counts_cover_the_memory_at_any_death() {
    let survived = Shared::new(AtomicBool::new(false));
    let mut stores = 0;
    while !survived.load(Ordering::Relaxed) {
        let life = Shared::clone(&survived);
        loom::model(move || life.store(counts_cover_the_memory(stores), Ordering::Relaxed));
        stores += 1;
    }
    println!("model counts_cover_the_memory_at_any_death: {stores} executions");
    assert!(stores > 10, "the worker hardly stored anything");
}

/// Returns true if a worker with this many stores to live outlives its allocations.
fn counts_cover_the_memory(stores: usize) -> bool {
    let heap = HeapWords::new(4);
    let words = heap.words();
    let mut worker = WorkerSlots::new(words, LIMITS);
    let mut memory = Memory::default();
    let life = killed_after(stores, || {
        for (target, pages) in [(0, 2), (1, 2), (2, 2), (3, 1), (0, 2)] {
            let target = SlotId::new(target);
            let mut others = Vec::new();
            while let Some(slot) = worker.begin(words) {
                others.push(slot);
            }
            for slot in others.into_iter().filter(|&slot| slot != target) {
                worker.abandon(slot);
            }
            let growth = worker.grow(words, target, pages * PAGE, &mut memory);
            assert_eq!(growth, Ok(Growth::Ready));
            let there = &mut memory.there[target.index()];
            *there = (*there).max(pages * PAGE);
            worker.abandon(target);
        }
    });
    drop(worker);
    let touched = words.touched().iter().map(|touched| touched.load(Ordering::Relaxed));
    for (there, counted) in memory.there.iter().zip(touched.clone()) {
        assert!(*there <= counted, "{there} bytes are there, {counted} are counted");
    }
    let worker = WorkerSlots::take_over(words, LIMITS, &Leases::busy(words));
    assert_eq!(worker.resident(), touched.sum::<u64>());
    life.is_some()
}
