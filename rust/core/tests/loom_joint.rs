//! Models of batches that all workers make. `ci/loom.sh` runs them, and then each with a fault planted that it must
//! catch.
#![cfg(ringloader_loom)]

mod support;

use ringloader_core::{
    joint::{Batch, Claim, JointPlan, Part, Pending, Room, WORDS},
    sync::{Arc, AtomicU64, Ordering, thread},
    testing::{crash::killed_after, fault::fault},
};
use support::{model::explore, payload::Payload};

/// Bytes of a batch, as places for parts.
const PLACES: usize = 8;
const RUNS: u64 = 2;
const ROOM: u64 = 64 * PLACES as u64;
const ROWS: [Option<u64>; RUNS as usize] = [Some(1), Some(1)];

struct Shared {
    words: Vec<AtomicU64>,
    index: Payload,
    parts: Vec<Payload>,
    /// The row of each run.
    rows: Vec<Payload>,
    /// Of which form the samples of each run are; `None`: they go as parts.
    forms: [Option<u64>; RUNS as usize],
    collated: AtomicU64,
    /// The result of a batch, in models of epochs.
    result: Payload,
    pending: AtomicU64,
}

impl Shared {
    fn new() -> Arc<Self> {
        Self::with_forms([None; RUNS as usize])
    }

    fn with_forms(forms: [Option<u64>; RUNS as usize]) -> Arc<Self> {
        Arc::new(Self {
            words: (0..WORDS).map(|_| AtomicU64::new(0)).collect(),
            index: Payload::new(),
            parts: Payload::cells(PLACES),
            rows: Payload::cells(RUNS as usize),
            forms,
            collated: AtomicU64::new(0),
            result: Payload::new(),
            pending: AtomicU64::new(0),
        })
    }

    fn batch(&self) -> &Batch {
        Batch::over(&self.words)
    }

    fn lay_out(&self, seq: u64) {
        self.index.write(seq);
        self.batch().lay_out(&JointPlan { seq, samples: RUNS, per_run: 1, kind: 0, len: 0, window: 0 }, ROOM);
    }

    fn reserve(&self) -> u64 {
        let mut room = self.batch().room();
        loop {
            let start = room.before_top(64).expect("there is room");
            match self.batch().reserve(room, start) {
                Ok(()) => return start,
                Err(now) => room = now,
            }
        }
    }

    fn form(&self, room: Room) -> Option<u64> {
        room.form().map(|at| self.parts[at as usize / 64].read())
    }

    /// Returns true if the rows are of this form, and says so if nobody has said anything.
    fn are_rows_of(&self, form: u64) -> bool {
        let mut room = self.batch().room();
        if room.form().is_none() {
            let at = self.reserve();
            self.parts[at as usize / 64].write(form);
            room = self.batch().room();
            while room.form().is_none() {
                match self.batch().lay_out_rows(room, at) {
                    Ok(()) => return true,
                    Err(now) => room = now,
                }
            }
        }
        self.form(room) == Some(form)
    }

    /// A worker claims something, if it can, and does it.
    fn work(&self, worker: u32) -> bool {
        let claim = self.batch().claim(worker, |_| true);
        claim.into_iter().for_each(|claim| self.make(claim));
        claim.is_some()
    }

    fn make(&self, claim: Claim) {
        let seq = self.index.read();
        if let Some(run) = claim.run {
            let form = self.forms[run as usize];
            if self.batch().begin_last(claim) {
                if form.is_some_and(|form| self.are_rows_of(form)) {
                    self.rows[run as usize].write(10 * seq + u64::from(run));
                }
                return self.collate(claim, seq);
            }
            let value = 10 * seq + u64::from(run);
            let (cell, part) = if form.is_some_and(|form| self.are_rows_of(form)) {
                (&self.rows[run as usize], Part::Rows)
            } else {
                let offset = self.reserve();
                (&self.parts[offset as usize / 64], Part::Bytes { offset, len: 8 })
            };
            let is_last = if fault("joint_bit_before_part") {
                let is_last = self.batch().finish(claim, part);
                cell.write(value);
                is_last
            } else {
                cell.write(value);
                self.batch().finish(claim, part)
            };
            if !is_last {
                return;
            }
        }
        self.collate(claim, seq);
    }

    fn collate(&self, claim: Claim, seq: u64) {
        for run in 0..RUNS as u32 {
            match self.batch().part(run) {
                Some(Part::Bytes { offset, .. }) => {
                    let found = self.parts[offset as usize / 64].read();
                    assert_eq!(found, 10 * seq + u64::from(run), "a part of another run");
                }
                Some(Part::Rows) => {
                    let form = self.forms[run as usize].expect("a run of rows");
                    assert_eq!(self.form(self.batch().room()), Some(form), "rows of another form");
                    let found = self.rows[run as usize].read();
                    assert_eq!(found, 10 * seq + u64::from(run), "a row of another batch");
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
fn a_worker_claims_what_it_wants_where_another_batch_is_laid_out() {
    explore("a_worker_claims_what_it_wants_where_another_batch_is_laid_out", || {
        let shared = Shared::new();
        let lay_out = |seq| {
            shared.index.write(seq);
            shared
                .batch()
                .lay_out(&JointPlan { seq, samples: 1, per_run: 1, kind: 0, len: 0, window: 0 }, ROOM);
        };
        lay_out(1);
        let peer = Arc::clone(&shared);
        let peer = thread::spawn(move || {
            if let Some(claim) = peer.batch().claim(0, |seq| seq == 1) {
                assert_eq!((peer.batch().seq(), peer.index.read()), (1, 1), "a batch that is not wanted");
                peer.batch().finish(claim, Part::Unsent);
            }
        });
        if shared.batch().claim(1, |_| true).is_some_and(|claim| shared.batch().finish(claim, Part::Unsent)) {
            shared.batch().close();
            lay_out(2);
        }
        peer.join().expect("no panic");
    });
}

#[test]
fn rows_of_two_workers_become_one_batch() {
    explore("rows_of_two_workers_become_one_batch", || {
        let shared = Shared::with_forms(ROWS);
        shared.lay_out(1);
        let peer = Arc::clone(&shared);
        let peer = thread::spawn(move || while peer.work(0) {});
        while shared.work(1) {}
        peer.join().expect("no panic");
        assert_eq!(shared.finish(2), 1, "not collated once");
    });
}

#[test]
fn samples_of_two_forms_are_collated_together() {
    explore("samples_of_two_forms_are_collated_together", || {
        let shared = Shared::with_forms([Some(1), Some(2)]);
        shared.lay_out(1);
        let peer = Arc::clone(&shared);
        let peer = thread::spawn(move || while peer.work(0) {});
        while shared.work(1) {}
        peer.join().expect("no panic");
        assert_eq!(shared.finish(2), 1, "not collated once");
    });
}

#[test]
fn rows_are_written_again_once_a_lost_worker_has_ended() {
    explore("rows_are_written_again_once_a_lost_worker_has_ended", || {
        let shared = Shared::with_forms(ROWS);
        shared.lay_out(1);
        let claim = shared.batch().claim(0, |_| true).expect("all is free");
        let peer = Arc::clone(&shared);
        let lost = thread::spawn(move || peer.make(claim));
        if fault("joint_lost_while_it_lives") {
            // What it still writes is a row of another worker's, or of the next batch.
            shared.batch().lose(0);
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
fn a_place_is_used_again_once_a_lost_worker_has_ended() {
    explore("a_place_is_used_again_once_a_lost_worker_has_ended", || {
        let shared = Shared::new();
        shared.lay_out(1);
        let claim = shared.batch().claim(0, |_| true).expect("all is free");
        let peer = Arc::clone(&shared);
        let lost = thread::spawn(move || peer.make(claim));
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

/// Makes the batch that is laid out, and sends it.
fn send(shared: &Shared) {
    let [first, last] = [0, 0].map(|worker| shared.batch().claim(worker, |_| true).expect("a run is free"));
    assert!(!shared.batch().finish(first, Part::Unsent) && shared.batch().finish(last, Part::Unsent));
    if fault("joint_sent_before_result") {
        shared.batch().note_sent(last);
        return shared.result.write(1);
    }
    shared.result.write(1);
    shared.batch().note_sent(last);
}

#[test]
fn an_epoch_begins_once_each_result_is_committed() {
    explore("an_epoch_begins_once_each_result_is_committed", || {
        let shared = Shared::new();
        shared.lay_out(1);
        let peer = Arc::clone(&shared);
        let peer = thread::spawn(move || {
            if !peer.batch().is_left() {
                assert_eq!(peer.result.read(), 1);
            }
        });
        send(&shared);
        peer.join().expect("no panic");
        assert!(!shared.batch().is_left());
    });
}

#[test]
fn an_epoch_begins_once_each_task_has_a_place_and_is_sent() {
    explore("an_epoch_begins_once_each_task_has_a_place_and_is_sent", || {
        let shared = Shared::new();
        Pending::new(&shared.pending).set(Some(0));
        let peer = Arc::clone(&shared);
        let peer = thread::spawn(move || {
            peer.lay_out(1);
            Pending::new(&peer.pending).set(None);
        });
        if Pending::new(&shared.pending).first().is_none() {
            assert!(shared.batch().is_left(), "an epoch begins over a task of the one before");
        }
        peer.join().expect("no panic");
    });
}

#[test]
fn another_works_on_while_a_worker_dies() {
    works_on("another_works_on_while_a_worker_dies", [None; RUNS as usize], 6);
}

#[test]
fn another_works_on_while_a_worker_dies_over_rows() {
    works_on("another_works_on_while_a_worker_dies_over_rows", ROWS, 8);
}

fn works_on(name: &str, forms: [Option<u64>; RUNS as usize], deaths: usize) {
    for stores in 0..deaths {
        explore(name, move || {
            let shared = Shared::with_forms(forms);
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
