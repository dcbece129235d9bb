//! Random operations of a worker and its parent against plain sets: what may be handed out, and
//! what may be counted.
#![cfg(not(any(ringloader_loom, ringloader_tsan)))]

use std::collections::{BTreeSet, VecDeque};
use std::ops::Range;

use heap_words::HeapWords;
use proptest::prelude::*;
use proptest::sample::Index;
use ringloader_core::pool::{Growth, Leases, Limits, OwnLease, Pages, SlotId, SlotWords, WorkerSlots};
use ringloader_core::sync::Ordering::Relaxed;
use ringloader_core::sync::{AtomicU32, AtomicU64};

#[path = "support/heap_words.rs"]
mod heap_words;

const SLOTS: u32 = 6;

fn limits(page: u64) -> Limits {
    Limits { share: (600 << 10) + 1000, window: 512 << 10, page }
}

#[derive(Clone, Debug)]
enum Step {
    Begin,
    Grow(Index, u64),
    Commit(Index),
    Abandon(Index),
    OwnLease(Index),
    EndOwnLease(Index),
    /// The parent registers a part of a slot that it holds, or nothing of it any more.
    Register(Index, u64),
    /// The parent unregisters what the driver had of a slot, held or not.
    Unregister(Index),
    /// The parent takes the oldest batch and leases it, or copies it if it must.
    Drain,
    Release(Index),
    /// The first half of a release, and later the second.
    ReleaseHalf(Index),
    FinishRelease(Index),
    Die,
}

fn step() -> impl Strategy<Value = Step> {
    let which = any::<Index>;
    prop_oneof![
        6 => Just(Step::Begin),
        4 => (which(), 0..=300u64 << 10).prop_map(|(slot, end)| Step::Grow(slot, end)),
        2 => (which(), 0..9000u64).prop_map(|(slot, end)| Step::Grow(slot, end)),
        5 => which().prop_map(Step::Commit),
        1 => which().prop_map(Step::Abandon),
        1 => which().prop_map(Step::OwnLease),
        1 => which().prop_map(Step::EndOwnLease),
        2 => (which(), 0..=300u64 << 10).prop_map(|(slot, bytes)| Step::Register(slot, bytes)),
        1 => which().prop_map(Step::Unregister),
        5 => Just(Step::Drain),
        3 => which().prop_map(Step::Release),
        1 => which().prop_map(Step::ReleaseHalf),
        1 => which().prop_map(Step::FinishRelease),
        1 => Just(Step::Die),
    ]
}

/// The memory that is really there, and the slots that may not be punched.
struct Memory {
    used: [u64; SLOTS as usize],
    registered: [u64; SLOTS as usize],
    in_use: BTreeSet<SlotId>,
    page: u64,
}

impl Pages for Memory {
    fn punch(&mut self, slot: SlotId, bytes: Range<u64>) -> ringloader_core::Result<()> {
        assert!(!self.in_use.contains(&slot), "punched slot {slot}, which is in use");
        assert!(bytes.start >= self.registered[slot.index()], "punched slot {slot}, which is registered");
        assert!(bytes.start.is_multiple_of(self.page) && bytes.end.is_multiple_of(self.page));
        self.used[slot.index()] = self.used[slot.index()].min(bytes.start);
        Ok(())
    }

    fn available(&mut self, _need: u64) -> ringloader_core::Result<()> {
        Ok(())
    }
}

struct Model<'a> {
    limits: Limits,
    words: SlotWords<'a>,
    leases: Leases,
    worker: WorkerSlots,
    used: [u64; SLOTS as usize],
    /// Bytes of each slot that a driver has.
    registered: [u64; SLOTS as usize],
    filling: Vec<SlotId>,
    committed: VecDeque<SlotId>,
    held: Vec<(SlotId, Option<u64>)>,
    /// Releases that have set the bit and not yet lowered the counter.
    late: Vec<SlotId>,
    own_leases: Vec<(SlotId, OwnLease)>,
    /// Unused until the next take-over: the bit died with a worker, and the counter was late.
    lost: BTreeSet<SlotId>,
}

fn pick<T>(from: &mut Vec<T>, index: &Index) -> Option<T> {
    (!from.is_empty()).then(|| from.swap_remove(index.index(from.len())))
}

impl<'a> Model<'a> {
    fn new(words: SlotWords<'a>, limits: Limits) -> Self {
        Self {
            limits,
            words,
            leases: Leases::new(limits, SLOTS),
            worker: WorkerSlots::new(words, limits),
            used: [0; SLOTS as usize],
            registered: [0; SLOTS as usize],
            filling: Vec::new(),
            committed: VecDeque::new(),
            held: Vec::new(),
            late: Vec::new(),
            own_leases: Vec::new(),
            lost: BTreeSet::new(),
        }
    }

    fn in_use(&self) -> BTreeSet<SlotId> {
        let held = self.held.iter().map(|(slot, _)| slot);
        let own_leased = self.own_leases.iter().map(|(slot, _)| slot);
        let all = self.filling.iter().chain(&self.committed).chain(held).chain(own_leased);
        all.chain(&self.lost).copied().collect()
    }

    fn touched(&self, slot: SlotId) -> u64 {
        self.words.touched()[slot.index()].load(Relaxed)
    }

    fn grow(&mut self, slot: SlotId, end: u64) {
        let in_use = self.in_use();
        let kept: u64 = in_use.iter().map(|slot| self.touched(*slot)).sum();
        let free = (0..SLOTS).map(SlotId::new).filter(|slot| !in_use.contains(slot));
        let fixed: u64 = free.map(|slot| self.registered[slot.index()]).sum();
        let mut memory =
            Memory { used: self.used, registered: self.registered, in_use, page: self.limits.page };
        let growth = self.worker.grow(self.words, slot, end, &mut memory).unwrap();
        self.used = memory.used;
        let alone = self.filling == [slot]
            && self.committed.is_empty()
            && self.held.iter().all(|(_, cost)| cost.is_some())
            && (self.held.is_empty() || fixed == 0)
            && self.own_leases.is_empty()
            && self.lost.is_empty();
        match growth {
            Growth::Ready => {
                assert!(end <= self.limits.half() && end <= self.touched(slot));
                // A page that is touched is there whole.
                let there = end.next_multiple_of(self.limits.page);
                self.used[slot.index()] = self.used[slot.index()].max(there);
                assert!(self.worker.resident() <= self.limits.share);
            }
            Growth::Oversize => assert!(end > self.limits.half()),
            Growth::NoRoom => {
                let rounded = end.next_multiple_of(64 << 10);
                assert!(
                    end <= self.limits.half()
                        && kept + fixed + rounded > self.limits.share + self.touched(slot)
                );
                assert!(!alone, "leases alone have starved the worker");
            }
        }
    }

    fn drain(&mut self) {
        let Some(slot) = self.committed.pop_front() else {
            return;
        };
        self.leases.hold(self.words, slot);
        let (slots, bytes) = (self.leases.leased_slots(), self.leases.leased_bytes());
        let cost = self.leases.try_lease(self.words, slot);
        let fits = slots < SLOTS / 2 && bytes + self.touched(slot) <= self.limits.half();
        assert_eq!(cost, fits.then(|| self.touched(slot)));
        self.held.push((slot, cost));
    }

    fn die(&mut self) {
        while !self.committed.is_empty() {
            self.drain();
        }
        let bit_is_there = |slot: SlotId| {
            let (word, bit) = (slot.index() / 64, slot.index() % 64);
            self.words.free[word].load(Relaxed) >> bit & 1 == 1
        };
        let held: BTreeSet<_> = self.held.iter().map(|(slot, _)| *slot).collect();
        let unsure = self.late.iter().copied().filter(|slot| !held.contains(slot));
        self.lost = unsure.filter(|slot| !bit_is_there(*slot)).collect();
        self.filling.clear();
        self.own_leases.clear();
        self.worker = WorkerSlots::take_over(self.words, self.limits, &Leases::busy(self.words));
    }

    fn apply(&mut self, step: &Step) {
        match step {
            Step::Begin => {
                let in_use = self.in_use();
                match self.worker.begin(self.words) {
                    Some(slot) => {
                        assert!(!in_use.contains(&slot), "slot {slot} was handed out twice");
                        self.filling.push(slot);
                    }
                    None => assert_eq!(in_use.len(), SLOTS as usize, "a slot was lost"),
                }
            }
            Step::Grow(index, end) if !self.filling.is_empty() => {
                self.grow(self.filling[index.index(self.filling.len())], *end);
            }
            Step::Commit(index) => {
                if let Some(slot) = pick(&mut self.filling, index) {
                    self.worker.commit(slot);
                    self.committed.push_back(slot);
                }
            }
            Step::Abandon(index) => {
                if let Some(slot) = pick(&mut self.filling, index) {
                    self.worker.abandon(slot);
                }
            }
            Step::OwnLease(index) if !self.filling.is_empty() => {
                let slot = self.filling[index.index(self.filling.len())];
                self.own_leases.push((slot, self.worker.own_lease(slot)));
            }
            Step::EndOwnLease(index) => drop(pick(&mut self.own_leases, index)),
            Step::Register(index, bytes) if !self.held.is_empty() => {
                let (slot, _) = self.held[index.index(self.held.len())];
                let others = self.leases.registered_bytes() - self.registered[slot.index()];
                let bytes_there = bytes.next_multiple_of(self.limits.page);
                let fits = bytes_there <= self.touched(slot) && others + bytes_there <= self.limits.share / 2;
                let less = bytes_there <= self.registered[slot.index()];
                assert_eq!(self.leases.set_registered(self.words, slot, *bytes), fits || less);
                if fits {
                    self.registered[slot.index()] = bytes_there;
                }
            }
            Step::Unregister(index) => {
                let slot = SlotId::new(index.index(SLOTS as usize) as u32);
                self.registered[slot.index()] = 0;
                assert!(self.leases.set_registered(self.words, slot, 0));
            }
            Step::Drain => self.drain(),
            Step::Release(index) => {
                if let Some((slot, cost)) = pick(&mut self.held, index) {
                    self.leases.release(self.words, slot, cost);
                }
            }
            Step::ReleaseHalf(index) => {
                if let Some((slot, cost)) = pick(&mut self.held, index) {
                    // The whole release, with the counter put back.
                    self.leases.release(self.words, slot, cost);
                    self.words.holds[slot.index()].fetch_add(1, Relaxed);
                    self.late.push(slot);
                }
            }
            Step::FinishRelease(index) => {
                if let Some(slot) = pick(&mut self.late, index) {
                    self.words.holds[slot.index()].fetch_sub(1, Relaxed);
                }
            }
            Step::Die => self.die(),
            Step::Grow(..) | Step::OwnLease(_) | Step::Register(..) => {}
        }
        self.audit();
    }

    fn audit(&self) {
        let touched = || (0..SLOTS).map(|slot| self.touched(SlotId::new(slot)));
        assert_eq!(self.worker.resident(), touched().sum::<u64>());
        assert_eq!(self.words.resident.load(Relaxed), self.worker.resident());
        assert!(self.worker.resident() <= self.limits.share);
        for (used, touched) in self.used.iter().zip(touched()) {
            assert!(*used <= touched, "{used} bytes are there, {touched} counted");
        }
        for (slot, registered) in (0..).map(SlotId::new).zip(self.registered) {
            assert_eq!(self.words.registered()[slot.index()].load(Relaxed), registered);
            assert!(registered <= self.touched(slot), "slot {slot} keeps less than is registered of it");
        }
        assert_eq!(self.leases.registered_bytes(), self.registered.iter().sum::<u64>());
        let costs = self.held.iter().filter_map(|(_, cost)| *cost);
        assert_eq!(self.leases.leased_bytes(), costs.clone().sum::<u64>());
        assert_eq!(self.leases.leased_slots() as usize, costs.count());
        assert!(self.leases.leased_bytes() <= self.limits.half());
        assert!(self.leases.leased_slots() <= SLOTS / 2);
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 500,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    #[test]
    fn slots_and_bytes_agree_with_sets(
        steps in prop::collection::vec(step(), 0..150),
        page in prop::sample::select(&[4u64 << 10, 16 << 10, 64 << 10]),
    ) {
        let heap = HeapWords::new(SLOTS);
        let mut model = Model::new(heap.words(), limits(page));
        for step in &steps {
            model.apply(step);
        }
        // Everything comes back in the end.
        model.filling.clear();
        for (slot, cost) in std::mem::take(&mut model.held) {
            model.leases.release(model.words, slot, cost);
        }
        for slot in std::mem::take(&mut model.late) {
            model.words.holds[slot.index()].fetch_sub(1, Relaxed);
        }
        model.die();
        for (slot, cost) in std::mem::take(&mut model.held) {
            model.leases.release(model.words, slot, cost);
        }
        let all: BTreeSet<_> = std::iter::from_fn(|| model.worker.begin(model.words)).collect();
        prop_assert_eq!(all.len(), SLOTS as usize);
        prop_assert_eq!((model.leases.leased_slots(), model.leases.leased_bytes()), (0, 0));
    }
}
