//! Models of the parent's wait for one of several workers, as `Engine::wait_for` and `Scheduler::poll` go about it:
//! one bell, a flag for each worker and one for all, and the bits that say which workers are ready. `ci/loom.sh` runs
//! them, and then each with a fault planted that it must catch.
#![cfg(ringloader_loom)]

#[path = "support/model.rs"]
mod model;

use loom::sync::{Mutex, Notify};
use model::explore;
use ringloader_core::{
    ring::{Consumer, Descriptor, Producer, Ring, RingHeader, WORDS},
    sync::{
        Arc, AtomicBool, AtomicU64, Ordering,
        doorbell::{WaitFlag, sleep_unless, take_any},
        ready::{Ready, ReadyBits},
        thread::{self, JoinHandle},
    },
    testing::{crash::killed_after, fault::fault},
};

/// The memory that the parent shares with one worker.
struct Channel {
    header: RingHeader,
    slots: Vec<Descriptor>,
    flag: WaitFlag,
    ended: AtomicBool,
}

impl Channel {
    fn results(&self) -> Ring<'_> {
        Ring::new(&self.header, &self.slots)
    }
}

struct Shared {
    channels: [Channel; 2],
    /// Raised while any worker is awaited.
    flag: WaitFlag,
    ready: [AtomicU64; 1],
    bell: Notify,
    closed: Mutex<bool>,
}

impl Shared {
    fn new() -> Arc<Self> {
        let channel = || Channel {
            header: RingHeader::default(),
            slots: vec![Descriptor::default(), Descriptor::default()],
            flag: WaitFlag::default(),
            ended: AtomicBool::new(false),
        };
        Arc::new(Self {
            channels: [channel(), channel()],
            flag: WaitFlag::default(),
            ready: [AtomicU64::new(0)],
            bell: Notify::new(),
            closed: Mutex::new(false),
        })
    }

    /// A worker's commit, as `Commit::finish`.
    fn commit(&self, worker: usize) {
        let channel = &self.channels[worker];
        let mut results = Producer::attach(channel.results()).expect("sound");
        assert!(results.push(channel.results(), &[1; WORDS]).expect("sound"));
        let late = fault("ready_after_doorbell");
        if !late {
            self.ready().set(worker as u32);
        }
        if take_any([&channel.flag, &self.flag]) {
            self.bell.notify();
        }
        if late {
            self.ready().set(worker as u32);
        }
    }

    fn ready(&self) -> ReadyBits<'_> {
        ReadyBits::new(&self.ready)
    }

    fn worker(this: &Arc<Self>, worker: usize) -> JoinHandle<()> {
        let this = Arc::clone(this);
        thread::spawn(move || this.commit(worker))
    }

    /// Worker 1, which dies once it has made so many stores of its commit.
    fn dying(this: &Arc<Self>, stores: usize) -> JoinHandle<()> {
        let this = Arc::clone(this);
        thread::spawn(move || {
            killed_after(stores, || this.commit(1));
            // The kernel's part: the pidfd becomes readable, and ends the sleep as the bell does.
            this.channels[1].ended.store(true, Ordering::Release);
            this.bell.notify();
        })
    }
}

/// The parent's private state.
struct Parent {
    shared: Arc<Shared>,
    results: [Consumer; 2],
    ready: Ready,
}

impl Parent {
    fn new(shared: &Arc<Shared>) -> Self {
        let results =
            [0, 1].map(|worker| Consumer::attach(shared.channels[worker].results()).expect("sound"));
        Self { shared: Arc::clone(shared), results, ready: Ready::new(2) }
    }

    fn has(&mut self, worker: usize) -> bool {
        !self.results[worker].is_empty(self.shared.channels[worker].results()).expect("sound")
    }

    /// `Engine::find`.
    fn find(&mut self) -> Option<usize> {
        let Self { shared, results, ready } = self;
        let has = |worker: u32| {
            let worker = worker as usize;
            Ok(!results[worker].is_empty(shared.channels[worker].results())?)
        };
        ready.find(shared.ready(), has).expect("sound").map(|worker| worker as usize)
    }

    /// `Engine::try_next`.
    fn take_any(&mut self) -> bool {
        let Some(worker) = self.find() else { return false };
        assert!(self.take(worker), "it was there");
        self.ready.pass(worker as u32);
        true
    }

    /// Waits for the next result of any worker, and takes it.
    fn next(&mut self) {
        while !self.take_any() {
            self.wait_for(None);
        }
    }

    fn take(&mut self, worker: usize) -> bool {
        self.results[worker].pop(self.shared.channels[worker].results()).expect("sound").is_some()
    }

    /// `Engine::wait_for`: one worker, or all.
    fn wait_for(&mut self, only: Option<usize>) {
        let shared = Arc::clone(&self.shared);
        let flag = only.map_or(&shared.flag, |worker| &shared.channels[worker].flag);
        let look = || {
            Ok(match only {
                Some(worker) => self.has(worker),
                None => self.find().is_some(),
            })
        };
        sleep_unless(flag, look, || Ok(shared.bell.wait())).expect("nothing fails");
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
        (0..2).for_each(|_| parent.next());
        for worker in workers {
            worker.join().expect("no panic");
        }
    });
}

/// The worker's second commit meets a parent that is about to look at its first.
#[test]
fn a_worker_that_is_ready_commits_again() {
    explore("a_worker_that_is_ready_commits_again", || {
        let shared = Shared::new();
        let mut parent = Parent::new(&shared);
        let committing = Arc::clone(&shared);
        let worker = thread::spawn(move || [1, 1].iter().for_each(|&worker| committing.commit(worker)));
        (0..2).for_each(|_| parent.next());
        worker.join().expect("no panic");
    });
}

/// A worker dies before any of its stores, while the parent takes what comes: what it had committed is handed out.
#[test]
fn as_completed_a_death_leaves_nothing_behind() {
    for stores in 0..=WORDS + 3 {
        explore(&format!("as_completed_a_death_leaves_nothing_behind, {stores}"), move || {
            let shared = Shared::new();
            let mut parent = Parent::new(&shared);
            let worker = Shared::dying(&shared, stores);
            let (mut ended, mut taken) = (false, 0);
            loop {
                if !ended && shared.channels[1].ended.load(Ordering::Acquire) {
                    ended = true;
                    // `Engine::record_ended`.
                    if !fault("ended_not_looked_at") {
                        parent.ready.look_at(1);
                    }
                }
                match parent.take_any() {
                    true => taken += 1,
                    false if ended => break,
                    false => parent.wait_for(None),
                }
            }
            assert_eq!(taken, usize::from(stores > WORDS), "a batch that was committed is not handed out");
            worker.join().expect("no panic");
        });
    }
}

/// A worker dies before any of its stores, while the parent waits for another one, which is at work for hours: it
/// is told, and after all that the dead one had committed.
#[test]
fn a_death_is_told_while_another_worker_is_awaited() {
    for stores in 0..=WORDS + 3 {
        explore(&format!("a_death_is_told_while_another_worker_is_awaited, {stores}"), move || {
            let shared = Shared::new();
            let mut parent = Parent::new(&shared);
            let worker = Shared::dying(&shared, stores);
            // `Scheduler::poll`: which workers have ended, whose turn it is, which are lost.
            let committed = loop {
                let early = fault("ring_before_ended").then(|| parent.has(1));
                let ended = shared.channels[1].ended.load(Ordering::Acquire);
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
                if fault("bell_before_closed") {
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
