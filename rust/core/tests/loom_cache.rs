//! Models of the table of kept samples. `ci/loom.sh` runs them, and then each with a fault planted that it must
//! catch.
#![cfg(ringloader_loom)]

mod support;

use loom::sync::Mutex;
use ringloader_core::{
    cache::{ALIGN, FIRST, Seen, State, Table, TableMemory},
    sync::{Arc, AtomicU64, Ordering, thread},
    testing::crash::killed_after,
};
use support::{
    model::{explore, explore_all},
    payload::Payload,
};

/// Places for records and tables.
const PLACES: usize = 8;
const WORDS: usize = ALIGN as usize / 8;

struct Shared {
    tail: AtomicU64,
    floor: AtomicU64,
    full: AtomicU64,
    tables: [AtomicU64; 2],
    /// The words of each place. Those that were cleared stay, as where the system takes no pages back.
    words: Vec<AtomicU64>,
    /// A record's bytes, by its place: the place itself.
    records: Vec<Payload>,
    /// Whether a place has blocks. The system changes that of a file under a lock.
    blocks: Mutex<[bool; PLACES]>,
}

impl TableMemory for Shared {
    fn words(&self, at: u64, count: usize) -> Option<&[AtomicU64]> {
        let start = at as usize / 8;
        self.words.get(start..start + count)
    }

    fn make(&self, at: u64, _: u64) -> bool {
        self.blocks.lock().unwrap()[number(at)] = true;
        true
    }

    fn give_back(&self, at: u64, _: u64) {
        self.blocks.lock().unwrap()[number(at)] = false;
    }

    fn give_back_below(&self, at: u64, floor: u64) {
        assert!(at < floor, "a page is given back that is used");
        self.give_back(at, ALIGN);
    }
}

impl Shared {
    fn new() -> Arc<Self> {
        let shared = Self {
            tail: AtomicU64::new(0),
            floor: AtomicU64::new(0),
            full: AtomicU64::new(0),
            tables: [const { 0 }; 2].map(AtomicU64::new),
            words: (0..PLACES * WORDS).map(|_| AtomicU64::new(0)).collect(),
            records: Payload::cells(PLACES),
            blocks: Mutex::new([false; PLACES]),
        };
        shared.table().begin(ALIGN, ALIGN);
        Arc::new(shared)
    }

    /// With the first table.
    fn with_table() -> Arc<Self> {
        let shared = Self::new();
        let _ = shared.table().enter(0, |_| u64::MAX).expect("there is room");
        shared
    }

    fn table(&self) -> Table<'_, Self> {
        Table { tail: &self.tail, floor: &self.floor, full: &self.full, tables: &self.tables, room: self }
    }

    /// Makes the record of an index. Returns whether it is kept; `false` too where one is there.
    fn store(&self, index: usize) -> Option<bool> {
        let (state, seen) = self.table().enter(index, |_| u64::MAX)?;
        if matches!(state, State::At(_)) {
            return Some(false);
        }
        let at = self.table().reserve(ALIGN, u64::MAX)?;
        self.records[number(at)].write(at);
        self.blocks.lock().unwrap()[number(at)] = true;
        let is_kept = self.table().publish(seen, at);
        if !is_kept {
            self.give_back(at, ALIGN);
        }
        Some(is_kept)
    }

    /// Clears the table, and takes bytes of before as the system does: they are zero after, and nothing orders that but
    /// what [`Table::clear`] does.
    fn clear(&self, bytes: std::ops::Range<u64>) -> u64 {
        let cleared = self.table().clear(0);
        assert!(cleared.start <= bytes.start && bytes.end <= cleared.end);
        for word in self.words_in(bytes) {
            // A swap: a page that was taken is not there for an earlier store.
            word.swap(0, Ordering::Relaxed);
        }
        cleared.end
    }

    fn words_in(&self, bytes: std::ops::Range<u64>) -> &[AtomicU64] {
        &self.words[bytes.start as usize / 8..bytes.end as usize / 8]
    }

    /// The place of the record that is found, which is whole.
    fn read(&self, index: usize) -> Option<u64> {
        let State::At(at) = self.table().look(index).0 else { return None };
        assert_eq!(self.records[number(at)].read(), at, "a torn record");
        Some(at)
    }
}

fn number(at: u64) -> usize {
    (at / ALIGN) as usize
}

/// Two indices whose entry in the first table is the same.
fn colliding() -> (usize, usize) {
    assert_eq!(FIRST, ALIGN, "a table is one place");
    let first_of = |index| {
        let shared = Shared::new();
        let seen: Seen = shared.table().enter(index, |_| u64::MAX).expect("there is room").1;
        format!("{seen:?}")
    };
    let first = first_of(0);
    (0, (1..).find(|&index| first_of(index) == first).expect("few entries"))
}

#[test]
fn two_that_make_one_sample_keep_one() {
    explore_all("two_that_make_one_sample_keep_one", &["read", "missing", "both stored"], |seen| {
        let shared = Shared::with_table();
        let peer = Arc::clone(&shared);
        let other = thread::spawn(move || peer.store(0));
        let reader = {
            let (peer, seen) = (Arc::clone(&shared), seen.clone());
            thread::spawn(move || {
                let found = peer.read(0);
                seen.note(if found.is_some() { "read" } else { "missing" });
                found
            })
        };
        let mine = shared.store(0).expect("there is room");
        let theirs = other.join().expect("no panic").expect("there is room");
        let found = reader.join().expect("no panic");
        let kept = shared.read(0).expect("one of two is kept");
        assert!(found.is_none_or(|found| found == kept), "a kept sample was replaced");
        assert!(mine || theirs, "both were refused");
        if shared.table().used() == 3 * ALIGN {
            seen.note("both stored");
        }
    });
}

#[test]
fn two_that_add_a_table_use_one() {
    let situations = ["both made one", "one made one"];
    explore_all("two_that_add_a_table_use_one", &situations, |seen| {
        let shared = Shared::new();
        let peer = Arc::clone(&shared);
        let other = thread::spawn(move || peer.table().enter(0, |_| u64::MAX).expect("there is room").1);
        let mine = shared.table().enter(0, |_| u64::MAX).expect("there is room").1;
        assert_eq!(mine, other.join().expect("no panic"), "one index has two entries");
        assert_eq!(shared.blocks.lock().unwrap().iter().filter(|&&has| has).count(), 1, "bytes are left");
        seen.note(if shared.table().used() == FIRST { "one made one" } else { "both made one" });
    });
}

#[test]
fn two_indices_of_one_bucket_have_an_entry_each() {
    // In a model of its own: loom's atomics are nowhere else, and each execution has to have the same.
    static PAIR: std::sync::OnceLock<(usize, usize)> = std::sync::OnceLock::new();
    loom::model(|| {
        PAIR.get_or_init(colliding);
    });
    explore("two_indices_of_one_bucket_have_an_entry_each", || {
        let &(one, two) = PAIR.get().expect("the model above");
        let shared = Shared::new();
        let peer = Arc::clone(&shared);
        // The first table, with no entry taken in this bucket.
        let other_bucket = (1..).find(|index| ![one, two].contains(index)).expect("indices");
        let _ = shared.table().enter(other_bucket, |_| u64::MAX);
        let other = thread::spawn(move || peer.store(one));
        let stored = [shared.store(two), other.join().expect("no panic")];
        assert_eq!(stored, [Some(true); 2], "an index is taken for another");
        let found = [one, two].map(|index| shared.read(index).expect("both are kept"));
        assert_ne!(found[0], found[1], "two indices have one entry");
        assert_eq!(shared.table().items(), 2);
    });
}

#[test]
fn clearing_leaves_no_bytes_and_no_sample_of_before() {
    let situations = ["kept", "cleared"];
    explore_all("clearing_leaves_no_bytes_and_no_sample_of_before", &situations, |seen| {
        let shared = Shared::with_table();
        let peer = Arc::clone(&shared);
        let maker = thread::spawn(move || peer.store(0));
        let cleared = shared.table().clear(0);
        shared.blocks.lock().unwrap()[number(cleared.start)..number(cleared.end)].fill(false);
        let is_kept = maker.join().expect("no panic") == Some(true);
        let blocks = *shared.blocks.lock().unwrap();
        match shared.table().look(0).0 {
            State::At(at) => {
                assert!(at >= cleared.end, "a sample of before is there");
                assert!(blocks[number(at)], "a kept sample has no bytes");
                assert!(is_kept, "a sample is there that is not kept");
                seen.note("kept");
            }
            _ => seen.note("cleared"),
        }
        assert!(!blocks[..number(cleared.end)].contains(&true), "bytes are left that nobody names");
    });
}

/// The bytes of a record are a seqlock's: they are read, and then the floor.
#[test]
fn a_record_that_is_cleared_while_it_is_read_is_not_taken() {
    let situations = ["there", "cleared after it was read", "cleared before"];
    explore_all("a_record_that_is_cleared_while_it_is_read_is_not_taken", &situations, |seen| {
        let shared = Shared::with_table();
        assert_eq!(shared.store(0), Some(true));
        let State::At(at) = shared.table().look(0).0 else { panic!("it is kept") };
        // A part of the record: two pages, of one word each.
        let part = at..at + 16;
        shared.words_in(part.clone()).iter().for_each(|word| word.store(7, Ordering::Relaxed));
        let (peer, bytes) = (Arc::clone(&shared), part.clone());
        let clearing = thread::spawn(move || peer.clear(bytes));
        let is_whole = shared.words_in(part).iter().all(|word| word.load(Ordering::Relaxed) == 7);
        let was_cleared = shared.table().was_cleared(at);
        assert!(was_cleared || is_whole, "bytes that are gone are taken for a record");
        seen.note(match (was_cleared, is_whole) {
            (false, _) => "there",
            (true, true) => "cleared after it was read",
            (true, false) => "cleared before",
        });
        clearing.join().expect("no panic");
    });
}

/// The store of a word can bring a page back that was given back; the system does not tell.
#[test]
fn a_word_that_is_written_after_a_clear_does_not_stay() {
    let situations = ["gone", "given back"];
    explore_all("a_word_that_is_written_after_a_clear_does_not_stay", &situations, |seen| {
        let shared = Shared::with_table();
        let (_, entry) = shared.table().enter(0, |_| u64::MAX).expect("there is room");
        let at = shared.table().reserve(ALIGN, u64::MAX).expect("there is room");
        let peer = Arc::clone(&shared);
        // The table is the first place.
        let clearing = thread::spawn(move || peer.clear(ALIGN..2 * ALIGN));
        let is_kept = shared.table().publish(entry, at);
        let end = clearing.join().expect("no panic");
        // A model's plain load may find an older value than the last.
        let last = |word: &AtomicU64| word.fetch_add(0, Ordering::AcqRel);
        let is_back = shared.words_in(0..end).iter().any(|word| last(word) == at);
        assert!(!(is_back && is_kept), "bytes are left that nobody names");
        seen.note(if is_back { "given back" } else { "gone" });
    });
}

#[test]
fn a_maker_may_die_before_any_store() {
    // Its stores: the tail, a table, a key, the tail, and the word.
    for stores in 0..6 {
        explore(&format!("a_maker_may_die_before_any_store, after {stores}"), move || {
            let shared = Shared::new();
            let peer = Arc::clone(&shared);
            let maker = thread::spawn(move || killed_after(stores, || peer.store(0)));
            let kept = shared.store(0).expect("there is room");
            maker.join().expect("no panic");
            assert!(kept || shared.read(0).is_some(), "a dead maker is in the way");
            assert!(shared.read(0).is_some(), "a kept sample is lost");
            assert!(shared.table().used() <= 4 * ALIGN, "more was lost than what it had reserved");
        });
    }
}
