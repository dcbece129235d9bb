//! Slots passed round by real threads, for ThreadSanitizer to judge. `ci/tsan.sh` runs it, clean
//! and with faults planted.
//!
//! A line of workers (each dies, the next takes over), a parent that drains, two users that read
//! and release. The slots' bytes are plain memory. Only atomics, `spawn` and `join`: the standard
//! library is not instrumented, and anything else of it would be reported, or would hide a report.

#[cfg(not(ringloader_loom))]
mod support;

#[cfg(not(ringloader_loom))]
fn main() {
    stress::main();
}

/// Loom's atomics need a model around them.
#[cfg(ringloader_loom)]
fn main() {}

#[cfg(not(ringloader_loom))]
mod stress {
    use std::ops::Range;

    use super::support::{heap_words::HeapWords, payload::Payload};
    use ringloader_core::{
        Result,
        pool::{Growth, Leases, Limits, Pages, SlotId, SlotWords, WorkerSlots},
        sync::{Arc, AtomicU64, AtomicUsize, Ordering, thread},
        testing::fault::fault,
    };

    const SLOTS: u32 = 4;
    const USERS: usize = 2;
    const WORKERS: usize = 200;
    const BATCHES_EACH: usize = 20;
    const BATCHES: usize = WORKERS * BATCHES_EACH;
    const PAGE: u64 = 4096;
    const LIMITS: Limits = Limits { share: 6 * PAGE, window: 4 * PAGE, page: 4 << 10 };

    struct World {
        heap: HeapWords,
        leases: Leases,
        payload: Vec<Payload>,
        /// For each batch, its slot plus one, from the worker to the parent.
        published: Vec<AtomicU64>,
        /// For each batch, its slot plus one, and above it the cost of the lease, from the parent to a user.
        leased: Vec<AtomicU64>,
        released: AtomicUsize,
        punched: AtomicUsize,
    }

    struct Punches<'a>(&'a World);

    impl Pages for Punches<'_> {
        fn punch(&mut self, slot: SlotId, _bytes: Range<u64>) -> Result<()> {
            // Does to the bytes what punching does: no one else may look at them.
            self.0.payload[slot.index()].write(0);
            self.0.punched.fetch_add(1, Ordering::Relaxed);
            Ok(())
        }

        fn available(&mut self, _need: u64) -> Result<()> {
            Ok(())
        }
    }

    impl World {
        fn words(&self) -> SlotWords<'_> {
            self.heap.words()
        }

        /// Fills its batches, and dies with the next slot begun.
        fn work(&self, mut worker: WorkerSlots, first: usize) {
            for batch in first..first + BATCHES_EACH {
                let slot = self.begin(&mut worker, PAGE * (1 + batch as u64 % 3));
                self.payload[slot.index()].write(batch as u64);
                worker.commit(slot);
                self.published[batch].store(u64::from(slot.get()) + 1, Ordering::Release);
            }
            worker.begin(self.words());
        }

        fn begin(&self, worker: &mut WorkerSlots, bytes: u64) -> SlotId {
            loop {
                if let Some(slot) = worker.begin(self.words()) {
                    if worker.grow(self.words(), slot, bytes, &mut Punches(self)) == Ok(Growth::Ready) {
                        return slot;
                    }
                    worker.abandon(slot);
                }
                thread::yield_now();
                worker.sweep(self.words());
            }
        }

        fn drain(&self, batch: usize) {
            let slot = SlotId::new(wait(&self.published[batch]) as u32 - 1);
            self.leases.hold(self.words(), slot);
            let cost = self.leases.try_lease(self.words(), slot).unwrap_or(0);
            assert!(self.leases.leased_bytes() <= LIMITS.half());
            let lease = (cost << 32) | (u64::from(slot.get()) + 1);
            self.leased[batch].store(lease, Ordering::Release);
        }

        fn use_up(&self, first: usize) {
            for batch in (first..BATCHES).step_by(USERS) {
                let lease = wait(&self.leased[batch]);
                let (slot, cost) = (SlotId::new(lease as u32 - 1), lease >> 32);
                assert_eq!(self.payload[slot.index()].read(), batch as u64, "a held slot was filled");
                self.leases.release(self.words(), slot, (cost > 0).then_some(cost));
                self.released.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    fn wait(cell: &AtomicU64) -> u64 {
        loop {
            match cell.load(Ordering::Acquire) {
                0 => thread::yield_now(),
                value => return value,
            }
        }
    }

    pub(super) fn main() {
        // Reads the environment before there are threads: what orders that read is not
        // instrumented.
        fault("");
        let cells = || (0..BATCHES).map(|_| AtomicU64::new(0)).collect();
        let world = Arc::new(World {
            heap: HeapWords::new(SLOTS),
            leases: Leases::new(LIMITS, SLOTS),
            payload: Payload::cells(SLOTS as usize),
            published: cells(),
            leased: cells(),
            released: AtomicUsize::new(0),
            punched: AtomicUsize::new(0),
        });
        let users: Vec<_> = (0..USERS)
            .map(|user| {
                let world = Arc::clone(&world);
                thread::spawn(move || world.use_up(user))
            })
            .collect();
        let mut worker = WorkerSlots::new(world.words(), LIMITS);
        for first in (0..BATCHES).step_by(BATCHES_EACH) {
            let process = {
                let world = Arc::clone(&world);
                thread::spawn(move || world.work(worker, first))
            };
            for batch in first..first + BATCHES_EACH {
                world.drain(batch);
            }
            process.join().expect("the worker");
            worker = WorkerSlots::take_over(world.words(), LIMITS, &Leases::busy(world.words()));
        }
        for user in users {
            user.join().expect("a user");
        }
        let mut worker = WorkerSlots::take_over(world.words(), LIMITS, &Leases::busy(world.words()));
        let slots = std::iter::from_fn(|| worker.begin(world.words())).count();
        assert_eq!(slots, SLOTS as usize, "a slot was lost or handed out twice");
        let (released, punched) =
            (world.released.load(Ordering::Relaxed), world.punched.load(Ordering::Relaxed));
        assert!(released == BATCHES && punched > 0);
        println!("tsan_pool: {} operations", released + punched);
    }
}
