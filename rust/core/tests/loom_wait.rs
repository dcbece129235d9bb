//! Models of the parent's wait for one of several workers, as `Engine::wait_for` and `Scheduler::poll` go about it:
//! one bell for all, a flag for each. `ci/loom.sh` runs them, and then each with a fault planted that it must
//! catch.
#![cfg(ringloader_loom)]

#[path = "support/model.rs"]
mod model;

use loom::sync::{Mutex, Notify};
use model::explore;
use ringloader_core::{
    ring::{Consumer, Descriptor, Producer, Ring, RingHeader, WORDS},
    sync::{
        Arc, AtomicBool, Ordering,
        doorbell::{WaitFlag, sleep_unless},
        mortal::killed_after,
        planted::planted,
        thread::{self, JoinHandle},
    },
};

/// What the parent shares with one worker.
struct Line {
    header: RingHeader,
    slots: Vec<Descriptor>,
    flag: WaitFlag,
    ended: AtomicBool,
}

impl Line {
    fn results(&self) -> Ring<'_> {
        Ring::new(&self.header, &self.slots).expect("a power of two")
    }
}

struct Shared {
    lines: [Line; 2],
    bell: Notify,
    closed: Mutex<bool>,
}

impl Shared {
    fn new() -> Arc<Self> {
        let line = || Line {
            header: RingHeader::new(),
            slots: vec![Descriptor::new()],
            flag: WaitFlag::new(),
            ended: AtomicBool::new(false),
        };
        Arc::new(Self { lines: [line(), line()], bell: Notify::new(), closed: Mutex::new(false) })
    }

    /// A worker's commit, as `Commit::finish`.
    fn commit(&self, worker: usize) {
        let line = &self.lines[worker];
        let mut results = Producer::attach(line.results()).expect("sound");
        assert!(results.push(line.results(), &[1; WORDS]).expect("sound"));
        if line.flag.take() {
            self.bell.notify();
        }
    }

    fn worker(this: &Arc<Self>, worker: usize) -> JoinHandle<()> {
        let this = Arc::clone(this);
        thread::spawn(move || this.commit(worker))
    }
}

/// The parent's private state.
struct Parent {
    shared: Arc<Shared>,
    results: [Consumer; 2],
}

impl Parent {
    fn new(shared: &Arc<Shared>) -> Self {
        let results = [0, 1].map(|worker| Consumer::attach(shared.lines[worker].results()).expect("sound"));
        Self { shared: Arc::clone(shared), results }
    }

    fn has(&mut self, worker: usize) -> bool {
        self.results[worker].peek(self.shared.lines[worker].results()).expect("sound").is_some()
    }

    fn take(&mut self, worker: usize) -> bool {
        self.results[worker].pop(self.shared.lines[worker].results()).expect("sound").is_some()
    }

    /// `Engine::wait_for`: one worker, or all.
    fn wait_for(&mut self, only: Option<usize>) {
        let shared = Arc::clone(&self.shared);
        let awaited = only.map_or(0..2, |worker| worker..worker + 1);
        let flags = awaited.clone().map(|worker| &shared.lines[worker].flag);
        let look = || Ok(awaited.into_iter().any(|worker| self.has(worker)));
        sleep_unless(flags, look, || Ok(shared.bell.wait())).expect("nothing fails");
    }
}

/// The other worker commits without a bell, and its result is there when its turn comes.
#[test]
fn in_order_the_next_worker_is_awaited() {
    explore("in_order_the_next_worker_is_awaited", || {
        let shared = Shared::new();
        let mut parent = Parent::new(&shared);
        let workers = [0, 1].map(|worker| Shared::worker(&shared, worker));
        for worker in [0, 1] {
            while !parent.take(worker) {
                parent.wait_for(Some(worker));
            }
        }
        for worker in workers {
            worker.join().expect("no panic");
        }
    });
}

#[test]
fn as_completed_all_workers_are_awaited() {
    explore("as_completed_all_workers_are_awaited", || {
        let shared = Shared::new();
        let mut parent = Parent::new(&shared);
        let workers = [0, 1].map(|worker| Shared::worker(&shared, worker));
        for _ in 0..2 {
            while !parent.take(0) && !parent.take(1) {
                parent.wait_for(None);
            }
        }
        for worker in workers {
            worker.join().expect("no panic");
        }
    });
}

/// A worker dies before any of its stores, while the parent waits for another one, which is at work for hours: it
/// is told, and after all that the dead one had committed.
#[test]
fn a_death_is_told_while_another_worker_is_awaited() {
    for stores in 0..=WORDS + 2 {
        explore(&format!("a_death_is_told_while_another_worker_is_awaited, {stores}"), move || {
            let shared = Shared::new();
            let mut parent = Parent::new(&shared);
            let dying = Arc::clone(&shared);
            let worker = thread::spawn(move || {
                killed_after(stores, || dying.commit(1));
                // The kernel's part: the pidfd becomes readable, and ends the sleep as the bell does.
                dying.lines[1].ended.store(true, Ordering::Release);
                dying.bell.notify();
            });
            // `Scheduler::poll`: who has ended, whose turn it is, who is lost.
            let committed = loop {
                let early = planted("ring_before_ended").then(|| parent.has(1));
                let ended = shared.lines[1].ended.load(Ordering::Acquire);
                assert!(!parent.take(0), "worker 0 commits nothing");
                if ended {
                    break early.unwrap_or_else(|| parent.has(1));
                }
                parent.wait_for(Some(0));
            };
            assert_eq!(parent.take(1), committed, "lost with a batch in its ring");
            assert_eq!(committed, stores > WORDS, "a commit is the store of the tail");
            worker.join().expect("no panic");
        });
    }
}

/// `Engine::close` in another thread. The second look asks for results only: what else there is has the bell.
#[test]
fn closing_ends_the_wait() {
    explore("closing_ends_the_wait", || {
        let shared = Shared::new();
        let mut parent = Parent::new(&shared);
        let closing = {
            let shared = Arc::clone(&shared);
            thread::spawn(move || {
                if planted("bell_before_closed") {
                    shared.bell.notify();
                    *shared.closed.lock().expect("no panic") = true;
                } else {
                    *shared.closed.lock().expect("no panic") = true;
                    shared.bell.notify();
                }
            })
        };
        while !*shared.closed.lock().expect("no panic") {
            parent.wait_for(None);
        }
        closing.join().expect("no panic");
    });
}
