//! Models of batches that all workers make. `ci/loom.sh` runs them, and then each with a fault planted that it must
//! catch.
#![cfg(ringloader_loom)]

mod support;

use ringloader_core::{
    joint::{Batch, Claim, Part, Plan, WORDS},
    sync::{Arc, AtomicU64, Ordering, thread},
    testing::{crash::killed_after, fault::fault},
};
use support::{model::explore, payload::Payload};

/// Bytes of a batch, as places for parts.
const PLACES: usize = 4;
const RUNS: u64 = 2;

struct Shared {
    words: Vec<AtomicU64>,
    index: Payload,
    parts: Vec<Payload>,
    collated: AtomicU64,
}

impl Shared {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            words: (0..WORDS).map(|_| AtomicU64::new(0)).collect(),
            index: Payload::new(),
            parts: Payload::cells(PLACES),
            collated: AtomicU64::new(0),
        })
    }

    fn batch(&self) -> Batch<'_> {
        Batch::new(&self.words)
    }

    fn lay_out(&self, seq: u64) {
        self.index.write(seq);
        self.batch().lay_out(&Plan { seq, samples: RUNS, per_run: 1, kind: 0, len: 0 });
    }

    /// A worker claims something, if it can, and does it.
    fn work(&self, worker: u32) -> bool {
        let Some(claim) = self.batch().claim(worker) else { return false };
        let seq = self.index.read();
        if let Some(run) = claim.run {
            if self.batch().begin_last(claim) {
                self.collate(claim, seq);
                return true;
            }
            let offset = self.batch().reserve(64, 64 * PLACES as u64).expect("there is room");
            let value = 10 * seq + u64::from(run);
            let part = Part::Bytes { offset, len: 8 };
            let is_last = if fault("joint_bit_before_part") {
                let is_last = self.batch().finish(claim, part);
                self.parts[offset as usize / 64].write(value);
                is_last
            } else {
                self.parts[offset as usize / 64].write(value);
                self.batch().finish(claim, part)
            };
            if !is_last {
                return true;
            }
        }
        self.collate(claim, seq);
        true
    }

    fn collate(&self, claim: Claim, seq: u64) {
        for run in 0..RUNS as u32 {
            match self.batch().part(run) {
                Some(Part::Bytes { offset, .. }) => {
                    let found = self.parts[offset as usize / 64].read();
                    assert_eq!(found, 10 * seq + u64::from(run), "a part of another run");
                }
                part => assert_eq!((claim.run, part), (Some(run), None), "a run that nobody has made"),
            }
        }
        self.collated.fetch_add(1, Ordering::Relaxed);
    }

    fn finish(&self, worker: u32) -> u64 {
        while self.work(worker) {}
        self.collated.swap(0, Ordering::Relaxed)
    }
}

#[test]
fn the_last_of_two_workers_collates() {
    explore("the_last_of_two_workers_collates", || {
        let shared = Shared::new();
        let peer = Arc::clone(&shared);
        let peer = thread::spawn(move || while peer.work(0) {});
        shared.lay_out(1);
        while shared.work(1) {}
        peer.join().expect("no panic");
        assert_eq!(shared.finish(2), 1, "not collated once");
    });
}

#[test]
fn a_place_is_used_again_once_a_lost_worker_has_ended() {
    explore("a_place_is_used_again_once_a_lost_worker_has_ended", || {
        let shared = Shared::new();
        shared.lay_out(1);
        let peer = Arc::clone(&shared);
        let lost = thread::spawn(move || peer.work(0));
        if fault("joint_lost_while_it_lives") {
            // What it still writes lies in the bytes of the next batch.
            shared.batch().lose(0);
            while shared.work(1) {}
            shared.batch().close();
            shared.lay_out(2);
            while shared.work(1) {}
            lost.join().expect("no panic");
            return;
        }
        shared.work(1);
        lost.join().expect("no panic");
        shared.batch().lose(0);
        shared.finish(1);
        shared.batch().close();
        shared.lay_out(2);
        assert_eq!(shared.finish(1), 1, "not collated once");
    });
}

#[test]
fn another_works_on_while_a_worker_dies() {
    for stores in 0..6 {
        explore("another_works_on_while_a_worker_dies", move || {
            let shared = Shared::new();
            shared.lay_out(1);
            let [lost, other] = [Arc::clone(&shared), Arc::clone(&shared)];
            let lost = thread::spawn(move || {
                killed_after(stores, || lost.work(0));
            });
            let other = thread::spawn(move || while other.work(1) {});
            lost.join().expect("no panic");
            if shared.collated.load(Ordering::Relaxed) == 0 {
                shared.batch().lose(0);
            }
            other.join().expect("no panic");
            while shared.work(2) {}
            assert_eq!(shared.collated.load(Ordering::Relaxed), 1, "killed before store {stores}");
        });
    }
}
