use std::ops::Range;

use super::*;
use crate::Error;
use crate::pool::Leases;
use crate::pool::heap_words::HeapWords;

const KIB: u64 = 1 << 10;
const LIMITS: Limits = Limits { share: 1 << 20, window: 1 << 20, page: 4 << 10 };

/// Pages that are only written down, and memory that can run out.
#[derive(Default)]
struct Book {
    punched: Vec<(u32, Range<u64>)>,
    asked: Vec<u64>,
    exhausted: bool,
    /// Slots whose pages it does not take.
    locked: Vec<u32>,
}

impl Pages for Book {
    fn punch(&mut self, slot: SlotId, bytes: Range<u64>) -> Result<()> {
        if self.locked.contains(&slot.get()) {
            return Err(Error::Corrupt("punch".into()));
        }
        self.punched.push((slot.get(), bytes));
        Ok(())
    }

    fn available(&mut self, need: u64) -> Result<()> {
        self.asked.push(need);
        if self.exhausted { Err(Error::Corrupt("available".into())) } else { Ok(()) }
    }
}

/// Checks the private and the shared figures against each other.
fn audit(slots: &WorkerSlots, words: SlotWords<'_>) {
    let shared: Vec<u64> = words.touched().iter().map(|t| t.load(Ordering::Relaxed)).collect();
    assert_eq!(shared, *slots.touched);
    assert_eq!(slots.resident(), shared.iter().sum::<u64>());
    assert_eq!(slots.resident(), words.resident.load(Ordering::Relaxed));
    let in_state = |state| slots.states.iter().filter(|&&s| s == state).count();
    assert_eq!(slots.free.len(), in_state(SlotState::Free));
    assert_eq!(slots.own_leased.len(), in_state(SlotState::OwnLeased));
}

fn fill(slots: &mut WorkerSlots, words: SlotWords<'_>, bytes: u64) -> SlotId {
    let slot = slots.begin(words).unwrap();
    assert_eq!(slots.grow(words, slot, bytes, &mut Book::default()).unwrap(), Growth::Ready);
    slots.commit(slot);
    slot
}

fn give_back(words: SlotWords<'_>, slot: SlotId) {
    let leases = Leases::new(LIMITS, words.slots());
    leases.hold(words, slot);
    leases.release(words, slot, None);
}

#[test]
fn every_slot_is_handed_out_once() {
    let heap = HeapWords::new(128);
    let words = heap.words();
    let mut slots = WorkerSlots::new(words, LIMITS);
    let mut seen: Vec<u32> = std::iter::from_fn(|| slots.begin(words)).map(SlotId::get).collect();
    seen.sort_unstable();
    assert_eq!(seen, (0..128).collect::<Vec<_>>());
    for slot in &seen {
        slots.commit(SlotId::new(*slot));
    }
    assert_eq!(slots.begin(words), None);
    give_back(words, SlotId::new(100));
    assert_eq!(slots.begin(words), Some(SlotId::new(100)));
    assert_eq!(slots.begin(words), None);
}

#[test]
fn the_slot_used_last_comes_first() {
    let heap = HeapWords::new(64);
    let words = heap.words();
    let mut slots = WorkerSlots::new(words, LIMITS);
    let [a, b, c] = [(); 3].map(|()| fill(&mut slots, words, KIB));
    give_back(words, b);
    assert_eq!(slots.begin(words), Some(b));
    slots.abandon(b);
    give_back(words, c);
    give_back(words, a);
    let next = [(); 3].map(|()| slots.begin(words).unwrap());
    assert!(next[..2].contains(&a) && next[..2].contains(&c) && next[2] == b, "{next:?}");
}

#[test]
fn growing_counts_granules_and_then_costs_nothing() {
    let heap = HeapWords::new(64);
    let words = heap.words();
    let mut slots = WorkerSlots::new(words, LIMITS);
    let slot = slots.begin(words).unwrap();
    let mut os = Book::default();
    for (end, total) in [(1, 4 * KIB), (4 * KIB, 4 * KIB), (5 * KIB, 8 * KIB), (65 * KIB, 128 * KIB)] {
        assert_eq!(slots.grow(words, slot, end, &mut os).unwrap(), Growth::Ready);
        assert_eq!(words.touched()[slot.index()].load(Ordering::Relaxed), total);
        audit(&slots, words);
    }
    assert_eq!(os.asked, [4 * KIB, 4 * KIB, 120 * KIB]);
    os.exhausted = true;
    assert_eq!(slots.grow(words, slot, 128 * KIB, &mut os).unwrap(), Growth::Ready);
    assert_eq!(os.asked.len(), 3, "bytes that are there are not asked for");
}

#[test]
fn more_than_half_is_oversize() {
    let heap = HeapWords::new(64);
    let words = heap.words();
    let mut slots = WorkerSlots::new(words, LIMITS);
    let slot = slots.begin(words).unwrap();
    let mut os = Book::default();
    assert_eq!(slots.grow(words, slot, LIMITS.half() + 1, &mut os).unwrap(), Growth::Oversize);
    assert_eq!(slots.grow(words, slot, u64::MAX, &mut os).unwrap(), Growth::Oversize);
    assert_eq!(slots.resident(), 0);
    assert_eq!(slots.grow(words, slot, LIMITS.half(), &mut os).unwrap(), Growth::Ready);
}

#[test]
fn room_comes_from_the_free_slots_used_longest_ago() {
    let heap = HeapWords::new(64);
    let words = heap.words();
    let mut slots = WorkerSlots::new(words, LIMITS);
    let [a, b, c] = [256, 256, 512].map(|kib| fill(&mut slots, words, kib * KIB));
    let [d, e] = [(); 2].map(|()| slots.begin(words).unwrap());
    let mut os = Book::default();
    assert_eq!(slots.grow(words, d, KIB, &mut os).unwrap(), Growth::NoRoom);

    give_back(words, b);
    slots.sweep(words);
    give_back(words, a);
    assert_eq!(slots.grow(words, d, 300 * KIB, &mut os).unwrap(), Growth::Ready);
    let expected = [(b.get(), 0..256 * KIB), (a.get(), 192 * KIB..256 * KIB)];
    assert_eq!(os.punched, expected);
    audit(&slots, words);

    os.punched.clear();
    assert_eq!(slots.grow(words, e, 256 * KIB, &mut os).unwrap(), Growth::NoRoom);
    assert_eq!(os.punched, [], "what would not be enough is left warm");
    give_back(words, c);
    assert_eq!(slots.grow(words, e, 256 * KIB, &mut os).unwrap(), Growth::Ready);
    assert_eq!(os.punched, [(a.get(), 0..192 * KIB), (c.get(), 448 * KIB..512 * KIB)]);
    assert_eq!(slots.resident(), LIMITS.share);
    audit(&slots, words);
}

#[test]
fn shrinking_punches_the_free_slots_used_longest_ago() {
    let heap = HeapWords::new(64);
    let words = heap.words();
    let mut slots = WorkerSlots::new(words, LIMITS);
    let [a, b, c] = [256, 256, 512].map(|kib| fill(&mut slots, words, kib * KIB));
    let mut os = Book::default();
    slots.shrink(words, u64::MAX, &mut os);
    assert_eq!(os.punched, [], "all of them are in use");

    give_back(words, b);
    slots.sweep(words);
    give_back(words, a);
    slots.shrink(words, 320 * KIB, &mut os);
    assert_eq!(os.punched, [(b.get(), 0..256 * KIB), (a.get(), 192 * KIB..256 * KIB)]);
    assert_eq!(slots.resident(), (192 + 512) * KIB);
    audit(&slots, words);

    os.punched.clear();
    slots.shrink(words, 1 << 30, &mut os);
    assert_eq!(os.punched, [(a.get(), 0..192 * KIB)]);
    assert_eq!(words.touched()[c.index()].load(Ordering::Relaxed), 512 * KIB);
    audit(&slots, words);
}

#[test]
fn a_shortage_passes_through_and_counts_nothing() {
    let heap = HeapWords::new(64);
    let words = heap.words();
    let mut slots = WorkerSlots::new(words, LIMITS);
    let slot = slots.begin(words).unwrap();
    let mut os = Book { exhausted: true, ..Book::default() };
    assert_eq!(slots.grow(words, slot, KIB, &mut os), Err(Error::Corrupt("available".into())));
    assert_eq!(slots.resident(), 0);
    audit(&slots, words);
}

#[test]
fn a_refused_punch_leaves_the_bytes_counted() {
    let heap = HeapWords::new(64);
    let words = heap.words();
    let mut slots = WorkerSlots::new(words, LIMITS);
    let [returned, other] = [(); 2].map(|()| fill(&mut slots, words, LIMITS.half()));
    let slot = slots.begin(words).unwrap();
    give_back(words, returned);
    let mut os = Book { locked: vec![returned.get()], ..Book::default() };
    assert_eq!(slots.grow(words, slot, KIB, &mut os), Ok(Growth::NoRoom));
    slots.shrink(words, KIB, &mut os);
    assert_eq!(slots.resident(), LIMITS.share);
    assert_eq!(os.asked, [], "nothing was to be taken");
    audit(&slots, words);

    give_back(words, other);
    assert_eq!(slots.grow(words, slot, KIB, &mut os), Ok(Growth::Ready));
    assert_eq!(os.punched, [(other.get(), 508 * KIB..512 * KIB)], "room comes from another slot");
    audit(&slots, words);
}

#[test]
fn counted_are_whole_pages_of_the_machine() {
    for page in [16 * KIB, 64 * KIB] {
        let heap = HeapWords::new(64);
        let words = heap.words();
        let mut slots = WorkerSlots::new(words, Limits { page, ..LIMITS });
        let mut os = Book::default();
        let sizes = [1, 5, 17, 63, 65, 130, 200, 150];
        let filled = sizes.map(|kib| {
            let slot = slots.begin(words).unwrap();
            let growth = slots.grow(words, slot, kib * KIB, &mut os).unwrap();
            assert_eq!(growth, Growth::Ready, "{kib} KiB in pages of {page}");
            slots.commit(slot);
            slot
        });
        filled.into_iter().for_each(|slot| give_back(words, slot));
        let slot = slots.begin(words).unwrap();
        assert_eq!(slots.grow(words, slot, 500 * KIB, &mut os), Ok(Growth::Ready));
        slots.shrink(words, 1, &mut os);
        assert!(os.punched.len() > 1);
        let punched = os.punched.iter().flat_map(|(_, bytes)| [bytes.start, bytes.end]);
        let touched = words.touched().iter().map(|touched| touched.load(Ordering::Relaxed));
        assert!(punched.chain(touched).chain(os.asked).all(|bytes| bytes.is_multiple_of(page)));
    }
}

#[test]
fn a_slot_that_the_worker_leases_is_not_handed_out() {
    let heap = HeapWords::new(64);
    let words = heap.words();
    let mut slots = WorkerSlots::new(words, LIMITS);
    let delivered = slots.begin(words).unwrap();
    assert_eq!(slots.grow(words, delivered, KIB, &mut Book::default()).unwrap(), Growth::Ready);
    let own = [slots.own_lease(delivered), slots.own_lease(delivered)];
    slots.commit(delivered);
    give_back(words, delivered);
    let dropped = slots.begin(words).unwrap();
    assert_ne!(dropped, delivered);
    assert_eq!((slots.own_leased_slots(), slots.own_leased_bytes()), (1, 4 * KIB));
    let lease = slots.own_lease(dropped);
    slots.abandon(dropped);
    assert_eq!((slots.own_leased_slots(), slots.free.len()), (2, 62));

    let [first, second] = own;
    std::thread::spawn(move || drop(first)).join().unwrap();
    slots.sweep(words);
    assert_eq!(slots.own_leased_slots(), 2);
    drop(lease);
    drop(second);
    slots.sweep(words);
    assert_eq!((slots.own_leased_slots(), slots.own_leased_bytes(), slots.free.len()), (0, 0, 64));
    audit(&slots, words);
}

#[test]
fn a_successor_has_what_is_not_held() {
    let heap = HeapWords::new(64);
    let words = heap.words();
    let leases = Leases::new(LIMITS, 64);
    let mut slots = WorkerSlots::new(words, LIMITS);
    let [held, returned, lost, committed] = [8, 12, 16, 20].map(|kib| fill(&mut slots, words, kib * KIB));
    leases.hold(words, held);
    give_back(words, lost);
    slots.sweep(words);
    give_back(words, returned);

    let mut slots = WorkerSlots::take_over(words, LIMITS, &Leases::busy(words));
    audit(&slots, words);
    assert_eq!(slots.free.len(), 63);
    let warmest = [(); 3].map(|()| slots.begin(words).unwrap());
    assert_eq!(warmest, [committed, lost, returned]);
    leases.release(words, held, None);
    assert_eq!(slots.begin(words), Some(held));
}

#[test]
fn a_bit_that_the_predecessor_swept_costs_the_slot_until_the_next_take_over() {
    let heap = HeapWords::new(64);
    let words = heap.words();
    let mut slots = WorkerSlots::new(words, LIMITS);
    let slot = fill(&mut slots, words, KIB);
    // A release between its two stores.
    words.holds[slot.index()].fetch_add(1, Ordering::Relaxed);
    words.free[0].fetch_or(1 << slot.get(), Ordering::Release);
    slots.sweep(words);

    let slots = WorkerSlots::take_over(words, LIMITS, &Leases::busy(words));
    assert_eq!(slots.free.len(), 63);
    words.holds[slot.index()].fetch_sub(1, Ordering::Release);
    assert_eq!(WorkerSlots::take_over(words, LIMITS, &Leases::busy(words)).free.len(), 64);
}

#[test]
fn a_successor_sums_what_a_crash_left() {
    let heap = HeapWords::new(64);
    let words = heap.words();
    let mut slots = WorkerSlots::new(words, LIMITS);
    fill(&mut slots, words, 8 * KIB);
    // Died between the two stores of a growth; and a stray write.
    words.resident.fetch_add(64 * KIB, Ordering::Relaxed);
    words.touched()[9].store(u64::MAX, Ordering::Relaxed);
    let slots = WorkerSlots::take_over(words, LIMITS, &Leases::busy(words));
    audit(&slots, words);
    assert_eq!(slots.resident(), 8 * KIB + LIMITS.window);
}

/// Fills a slot, and registers bytes of it before it comes back.
fn fill_registered(slots: &mut WorkerSlots, words: SlotWords<'_>, bytes: u64, registered: u64) -> SlotId {
    let slot = fill(slots, words, bytes);
    let leases = Leases::new(LIMITS, words.slots());
    leases.hold(words, slot);
    assert!(leases.set_registered(words, slot, registered));
    leases.release(words, slot, None);
    slot
}

#[test]
fn registered_pages_make_no_room() {
    let heap = HeapWords::new(64);
    let words = heap.words();
    let mut slots = WorkerSlots::new(words, LIMITS);
    let [a, b] = [(512, 512), (512, 256)].map(|(kib, registered)| {
        let slot = fill_registered(&mut slots, words, kib * KIB, registered * KIB);
        // Takes the slot, so that the next one is not filled in it.
        let taken = slots.begin(words);
        assert_eq!(taken, Some(slot));
        slot
    });
    let c = slots.begin(words).unwrap();
    for slot in [a, b] {
        slots.abandon(slot);
    }
    let mut os = Book::default();
    slots.shrink(words, u64::MAX, &mut os);
    assert_eq!(os.punched, [(b.get(), 256 * KIB..512 * KIB)]);
    audit(&slots, words);
    os.punched.clear();
    assert_eq!(slots.grow(words, c, 257 * KIB, &mut os), Ok(Growth::NoRoom));
    assert!(!slots.make_room(words, 257 * KIB, &mut os));
    assert_eq!(os.punched, [], "what would not be enough is left warm");
    assert_eq!(slots.grow(words, c, 256 * KIB, &mut os), Ok(Growth::Ready));
    slots.shrink(words, u64::MAX, &mut os);
    assert_eq!(os.punched, []);

    // A successor too, and what is registered no more is room.
    let mut slots = WorkerSlots::take_over(words, LIMITS, &Leases::busy(words));
    slots.shrink(words, u64::MAX, &mut os);
    assert_eq!(os.punched, [(c.get(), 0..256 * KIB)]);
    os.punched.clear();
    assert!(Leases::new(LIMITS, 64).set_registered(words, b, 0));
    slots.shrink(words, u64::MAX, &mut os);
    assert_eq!(os.punched, [(b.get(), 0..256 * KIB)]);
    assert_eq!(slots.resident(), 512 * KIB);
    audit(&slots, words);
}

#[test]
fn registered_slots_leave_room_for_the_largest_batch() {
    let heap = HeapWords::new(64);
    let words = heap.words();
    let mut slots = WorkerSlots::new(words, LIMITS);
    let leases = Leases::new(LIMITS, words.slots());
    let filled = [(); 8].map(|()| fill(&mut slots, words, 128 * KIB));
    for slot in filled {
        leases.hold(words, slot);
    }
    let registered = filled.map(|slot| leases.set_registered(words, slot, 128 * KIB));
    assert_eq!(registered, [true, true, true, true, false, false, false, false]);
    assert_eq!(leases.registered_bytes(), LIMITS.share / 2);
    for slot in filled {
        leases.release(words, slot, None);
    }
    let slot = slots.begin(words).unwrap();
    assert_eq!(slots.grow(words, slot, LIMITS.half(), &mut Book::default()), Ok(Growth::Ready));
    audit(&slots, words);
}
