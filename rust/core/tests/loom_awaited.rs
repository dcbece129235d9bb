//! Models of the threads that an end waits for. `ci/loom.sh` runs them, and then each with a fault planted that it must
//! catch.
#![cfg(ringloader_loom)]

mod support;

use ringloader_core::sync::{Arc, AtomicBool, AtomicU64, Awaited, Ordering, thread};
use support::{
    model::{Seen, explore_all},
    payload::Payload,
};

const PID: u32 = 7;

/// What the threads use and the end takes away, and the flag that the end sets.
struct World {
    awaited: Awaited,
    has_begun: AtomicBool,
    used: Vec<Payload>,
}

impl World {
    fn new(threads: usize) -> Arc<Self> {
        Arc::new(Self {
            awaited: Awaited::over(AtomicU64::new(0)),
            has_begun: AtomicBool::new(false),
            used: Payload::cells(threads),
        })
    }

    /// Relaxed: the count alone must order it.
    fn has_begun(&self) -> bool {
        self.has_begun.load(Ordering::Relaxed)
    }

    fn work(&self, at: usize, seen: &Seen) {
        if self.awaited.enter(PID, || self.has_begun()) {
            seen.note("a thread works");
            self.used[at].write(1);
            self.awaited.leave(PID);
        } else {
            seen.note("a thread comes too late");
        }
    }

    fn end(&self) {
        self.has_begun.store(true, Ordering::Relaxed);
        while self.awaited.count(PID) > 0 {
            thread::yield_now();
        }
        self.used.iter().for_each(|used| used.write(2));
    }
}

#[test]
fn the_end_waits_for_a_thread_or_the_thread_stays_out() {
    explore_all("awaited-one", &["a thread works", "a thread comes too late"], |seen| {
        let (world, seen) = (World::new(1), seen.clone());
        let other = thread::spawn({
            let world = Arc::clone(&world);
            move || world.work(0, &seen)
        });
        world.end();
        other.join().unwrap();
    });
}

#[test]
fn the_end_waits_for_all_threads() {
    explore_all("awaited-two", &["a thread works", "a thread comes too late"], |seen| {
        let world = World::new(2);
        let others: Vec<_> = (0..2)
            .map(|at| {
                let (world, seen) = (Arc::clone(&world), seen.clone());
                thread::spawn(move || world.work(at, &seen))
            })
            .collect();
        world.end();
        others.into_iter().for_each(|other| other.join().unwrap());
    });
}
