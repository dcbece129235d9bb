//! Models of the ring, its bytes and the doorbell. `ci/loom.sh` runs them, and then each with a fault
//! planted that it must catch.
#![cfg(ringloader_loom)]

mod support;

use loom::sync::Notify;
use ringloader_core::{
    ring::{ByteFifo, Consumer, Descriptor, Producer, Ring, RingHeader, WORDS, Words},
    sync::{
        Arc, AtomicBool, AtomicU64, Ordering,
        doorbell::{WaitFlag, sleep_unless, take_some},
        thread,
    },
    testing::{crash::killed_after, fault::fault},
};
use support::{model::explore, payload::Payload};

/// The memory that the two processes share.
struct Shared {
    header: RingHeader,
    slots: Vec<Descriptor>,
    payload: Vec<Payload>,
    flag: WaitFlag,
    bell: Notify,
    producer_died: AtomicBool,
}

impl Shared {
    fn new(slots: usize, payload: usize) -> Arc<Self> {
        Arc::new(Self {
            header: RingHeader::default(),
            slots: (0..slots).map(|_| Descriptor::default()).collect(),
            payload: Payload::cells(payload),
            flag: WaitFlag::default(),
            bell: Notify::new(),
            producer_died: AtomicBool::new(false),
        })
    }

    fn ring(&self) -> Ring<'_> {
        Ring::new(&self.header, &self.slots)
    }

    fn producer(&self) -> Producer {
        Producer::attach(self.ring()).expect("sound")
    }

    fn consumer(&self) -> Consumer {
        Consumer::attach(self.ring()).expect("sound")
    }

    /// Waits for a descriptor, as a caller of the doorbell has to.
    fn sleep_until(&self, consumer: &mut Consumer) -> Words {
        loop {
            if let Some(words) = consumer.peek(self.ring()).expect("sound") {
                return words;
            }
            let look = || Ok(consumer.peek(self.ring())?.is_some());
            sleep_unless(&self.flag, look, || Ok(self.bell.wait())).expect("sound");
        }
    }

    fn push_and_wake(&self, producer: &mut Producer, words: &Words) {
        assert!(producer.push(self.ring(), words).expect("sound"), "the ring is full");
        if self.flag.take() {
            self.bell.notify();
        }
    }
}

/// Words that show by themselves whether all of them were stored.
fn words(number: u64) -> Words {
    [number + 1; WORDS]
}

/// Returns the number of the descriptor that `words` are.
fn number(words: Words) -> u64 {
    assert_eq!(words, [words[0]; WORDS], "torn descriptor");
    words[0].checked_sub(1).expect("torn descriptor: no word was stored")
}

/// A ring of one slot, so that the second payload goes where the first was: the ring orders both ways.
#[test]
fn tail_publishes_and_head_hands_back() {
    explore("tail_publishes_and_head_hands_back", || {
        let shared = Shared::new(1, 1);
        let peer = Arc::clone(&shared);
        let producer = thread::spawn(move || {
            let (ring, mut producer) = (peer.ring(), peer.producer());
            for item in 0..2 {
                while producer.head(ring).expect("sound") != producer.tail() {
                    thread::yield_now();
                }
                peer.payload[0].write(item);
                assert!(producer.push(ring, &words(item)).expect("sound"));
            }
        });
        let (ring, mut consumer) = (shared.ring(), shared.consumer());
        for item in 0..2 {
            let found = loop {
                match consumer.peek(ring).expect("sound") {
                    Some(found) => break found,
                    None => thread::yield_now(),
                }
            };
            assert_eq!(number(found), item);
            if fault("hand_back_before_read") {
                consumer.advance(ring);
                assert_eq!(shared.payload[0].read(), item);
            } else {
                assert_eq!(shared.payload[0].read(), item);
                consumer.advance(ring);
            }
        }
        producer.join().expect("no panic");
    });
}

/// Slots for all, bytes for one: a task's bytes come back through the ring's `head`.
#[test]
fn bytes_come_back_through_head() {
    explore("bytes_come_back_through_head", || {
        let shared = Shared::new(2, 1);
        let peer = Arc::clone(&shared);
        let producer = thread::spawn(move || {
            let (ring, mut producer) = (peer.ring(), peer.producer());
            let mut bytes = ByteFifo::new(8);
            for item in 0..2 {
                let offset = loop {
                    match bytes.reserve(8) {
                        Some(offset) => break offset,
                        None => {
                            thread::yield_now();
                            bytes.reclaim(producer.head(ring).expect("sound"));
                        }
                    }
                };
                peer.payload[offset as usize / 8].write(item);
                let position = producer.tail();
                assert!(producer.push(ring, &words(offset)).expect("sound"));
                bytes.commit(position);
            }
        });
        let (ring, mut consumer) = (shared.ring(), shared.consumer());
        for item in 0..2 {
            let found = loop {
                match consumer.peek(ring).expect("sound") {
                    Some(found) => break found,
                    None => thread::yield_now(),
                }
            };
            assert_eq!(shared.payload[number(found) as usize / 8].read(), item);
            consumer.advance(ring);
        }
        producer.join().expect("no panic");
    });
}

/// The sleeper also wakes by itself, as at the end of its time: loom's bell does that once.
#[test]
fn no_wake_up_is_lost() {
    explore("no_wake_up_is_lost", || {
        let shared = Shared::new(2, 0);
        let peer = Arc::clone(&shared);
        let producer = thread::spawn(move || {
            let mut producer = peer.producer();
            for item in 0..2 {
                peer.push_and_wake(&mut producer, &words(item));
            }
        });
        let mut consumer = shared.consumer();
        for item in 0..2 {
            assert_eq!(number(shared.sleep_until(&mut consumer)), item);
            consumer.advance(shared.ring());
        }
        producer.join().expect("no panic");
    });
}

/// Two threads of one process wake the same sleeper: what one takes, the other need not ring for.
#[test]
fn two_ringers_lose_no_wake_up() {
    explore("two_ringers_lose_no_wake_up", || {
        let shared = Shared::new(1, 0);
        let (published, bells) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let ringers = [1, 2].map(|bit| {
            let (peer, published, bells) = (shared.clone(), published.clone(), bells.clone());
            thread::spawn(move || {
                published.fetch_or(bit, Ordering::Release);
                if peer.flag.take() {
                    bells.fetch_add(1, Ordering::Relaxed);
                    peer.bell.notify();
                }
            })
        });
        let mut announced = 0;
        while published.load(Ordering::Acquire) != 3 {
            announced += 1;
            let look = || Ok(published.load(Ordering::Acquire) == 3);
            sleep_unless(&shared.flag, look, || Ok(shared.bell.wait())).expect("nothing fails");
        }
        for ringer in ringers {
            ringer.join().expect("no panic");
        }
        assert!(bells.load(Ordering::Relaxed) <= announced, "more bells than sleeps");
    });
}

/// `Engine::wake_workers`, for one run that was freed. The first worker is at work for hours, or looks for a run too.
#[test]
fn as_many_are_woken_as_there_are_runs() {
    for sleeping in [1..2, 0..2] {
        explore(&format!("as_many_are_woken_as_there_are_runs, {sleeping:?}"), move || {
            let workers: Arc<[_; 2]> = Arc::new([0, 1].map(|_| (WaitFlag::default(), Notify::new())));
            let runs = Arc::new(AtomicU64::new(0));
            let threads = sleeping.clone().map(|worker| {
                let (workers, runs) = (workers.clone(), runs.clone());
                thread::spawn(move || {
                    let (flag, bell) = &workers[worker];
                    let look = || Ok(runs.load(Ordering::Acquire) != 0);
                    while runs.load(Ordering::Acquire) == 0 {
                        sleep_unless(flag, look, || Ok(bell.wait())).expect("nothing fails");
                    }
                    // Whoever takes the run tells the other one that there is nothing more.
                    if runs.swap(2, Ordering::Relaxed) == 1 {
                        workers[1 - worker].1.notify();
                    }
                })
            });
            let threads: Vec<_> = threads.collect();
            runs.store(1, Ordering::Release);
            take_some(workers.iter().map(|(flag, bell)| (flag, bell)), 1).for_each(Notify::notify);
            for thread in threads {
                thread.join().expect("no panic");
            }
        });
    }
}

/// The producer dies before its n-th store, for every n of two pushes. The death wakes the consumer, which drains whole
/// descriptors; a new producer goes on behind them.
#[test]
fn a_producer_may_die_before_any_store() {
    const STORES_OF_A_PUSH: usize = WORDS + 1;
    for stores in 0..=2 * (STORES_OF_A_PUSH + 1) {
        explore(&format!("a_producer_may_die_before_any_store, {stores}"), move || {
            let shared = Shared::new(2, 0);
            let peer = Arc::clone(&shared);
            let producer = thread::spawn(move || {
                let life = killed_after(stores, || {
                    let mut producer = peer.producer();
                    peer.push_and_wake(&mut producer, &words(0));
                    peer.push_and_wake(&mut producer, &words(1));
                });
                // The kernel's part: the pidfd becomes readable, whatever the process left undone.
                peer.producer_died.store(true, Ordering::Release);
                peer.bell.notify();
                life.is_some()
            });
            let (ring, mut consumer) = (shared.ring(), shared.consumer());
            let mut drained = 0;
            loop {
                let died = shared.producer_died.load(Ordering::Acquire);
                while let Some(found) = consumer.pop(ring).expect("sound") {
                    assert_eq!(number(found), drained);
                    drained += 1;
                }
                if died {
                    break;
                }
                let look =
                    || Ok(consumer.peek(ring)?.is_some() || shared.producer_died.load(Ordering::Acquire));
                sleep_unless(&shared.flag, look, || Ok(shared.bell.wait())).expect("sound");
            }
            let finished = producer.join().expect("no panic");
            if finished {
                assert_eq!(drained, 2, "a finished producer's descriptors are all there");
            } else if stores < STORES_OF_A_PUSH {
                assert_eq!(drained, 0, "visible without a commit");
            } else {
                assert!(drained >= 1, "committed and lost");
            }
            let mut heir = shared.producer();
            assert!(heir.push(ring, &words(drained)).expect("sound"));
            assert_eq!(number(consumer.pop(ring).expect("sound").expect("pushed")), drained);
        });
    }
}

/// The consumer dies before it hands a slot back: the descriptor is still there for its heir.
#[test]
fn a_consumer_may_die_before_any_store() {
    for stores in 0..=2 {
        explore(&format!("a_consumer_may_die_before_any_store, {stores}"), move || {
            let shared = Shared::new(1, 1);
            let peer = Arc::clone(&shared);
            let consumer = thread::spawn(move || {
                killed_after(stores, || {
                    let (ring, mut consumer) = (peer.ring(), peer.consumer());
                    while let Some(found) = consumer.peek(ring).expect("sound") {
                        assert_eq!(peer.payload[0].read(), number(found));
                        consumer.advance(ring);
                    }
                })
            });
            let (ring, mut producer) = (shared.ring(), shared.producer());
            let mut pushed = 0;
            for item in 0..2 {
                if producer.head(ring).expect("sound") == producer.tail() {
                    shared.payload[0].write(item);
                    assert!(producer.push(ring, &words(item)).expect("sound"));
                    pushed += 1;
                } else {
                    break;
                }
            }
            consumer.join().expect("no panic");
            let mut heir = shared.consumer();
            let mut next = producer.head(ring).expect("sound");
            assert!(next <= stores as u64, "handed back more than was stored");
            while let Some(found) = heir.pop(ring).expect("sound") {
                assert_eq!(number(found), next);
                assert_eq!(shared.payload[0].read(), next);
                next += 1;
            }
            assert_eq!(next, pushed, "lost with the consumer");
        });
    }
}
