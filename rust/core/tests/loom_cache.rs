//! Models of the table of kept samples. `ci/loom.sh` runs them, and then each with a fault planted that it must
//! catch.
#![cfg(ringloader_loom)]

mod support;

use loom::sync::Mutex;
use ringloader_core::{
    cache::{ALIGN, SampleState, Table},
    sync::{Arc, AtomicU64, Ordering, thread},
    testing::crash::killed_after,
};
use support::{
    model::{explore, explore_all},
    payload::Payload,
};

/// Places for records.
const PLACES: usize = 6;
const WORDS: usize = ALIGN as usize / 8;
/// Samples of the dataset.
const LEN: usize = 2;

struct Shared {
    tail: AtomicU64,
    floor: AtomicU64,
    full: AtomicU64,
    words: [AtomicU64; LEN],
    /// The bytes of each place, for records that are read while they are cleared. Those that were cleared stay, as where
    /// the system takes no pages back.
    bytes: Vec<AtomicU64>,
    /// A record's bytes, by its place: the place itself.
    records: Vec<Payload>,
    /// Whether a place has blocks. The system changes that of a file under a lock.
    blocks: Mutex<[bool; PLACES]>,
}

impl Shared {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            tail: AtomicU64::new(ALIGN),
            floor: AtomicU64::new(ALIGN),
            full: AtomicU64::new(0),
            words: [const { 0 }; LEN].map(AtomicU64::new),
            bytes: (0..PLACES * WORDS).map(|_| AtomicU64::new(0)).collect(),
            records: Payload::cells(PLACES),
            blocks: Mutex::new([false; PLACES]),
        })
    }

    fn table(&self) -> Table<'_> {
        Table { tail: &self.tail, floor: &self.floor, full: &self.full, words: &self.words }
    }

    /// Makes the record of an index. Returns whether it is kept; `false` too where one is there.
    fn store(&self, index: usize) -> bool {
        let (state, seen) = self.table().look(index);
        if matches!(state, SampleState::At(_)) {
            return false;
        }
        let at = self.table().reserve(ALIGN, u64::MAX).expect("there is room");
        self.records[number(at)].write(at);
        self.blocks.lock().unwrap()[number(at)] = true;
        let is_kept = self.table().publish(seen, at);
        if !is_kept {
            self.blocks.lock().unwrap()[number(at)] = false;
        }
        is_kept
    }

    /// Clears the table, and takes bytes of before as the system does: they are zero after, and nothing orders that but
    /// what [`Table::clear`] does.
    fn clear(&self, bytes: std::ops::Range<u64>) {
        let cleared = self.table().clear();
        assert!(cleared.start <= bytes.start && bytes.end <= cleared.end);
        for word in self.bytes_in(bytes) {
            word.store(0, Ordering::Relaxed);
        }
    }

    fn bytes_in(&self, bytes: std::ops::Range<u64>) -> &[AtomicU64] {
        &self.bytes[bytes.start as usize / 8..bytes.end as usize / 8]
    }

    /// The place of the record that is found, which is whole.
    fn read(&self, index: usize) -> Option<u64> {
        let SampleState::At(at) = self.table().look(index).0 else { return None };
        assert_eq!(self.records[number(at)].read(), at, "a torn record");
        Some(at)
    }
}

fn number(at: u64) -> usize {
    (at / ALIGN) as usize
}

#[test]
fn two_that_make_one_sample_keep_one() {
    explore_all("two_that_make_one_sample_keep_one", &["read", "missing", "both stored"], |seen| {
        let shared = Shared::new();
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
        let mine = shared.store(0);
        let theirs = other.join().expect("no panic");
        let found = reader.join().expect("no panic");
        let kept = shared.read(0).expect("one of two is kept");
        assert!(found.is_none_or(|found| found == kept), "a kept sample was replaced");
        assert!(mine || theirs, "both were refused");
        if shared.table().used() == 2 * ALIGN {
            seen.note("both stored");
        }
    });
}

#[test]
fn clearing_leaves_no_bytes_and_no_sample_of_before() {
    let situations = ["kept", "cleared"];
    explore_all("clearing_leaves_no_bytes_and_no_sample_of_before", &situations, |seen| {
        let shared = Shared::new();
        let peer = Arc::clone(&shared);
        let maker = thread::spawn(move || peer.store(0));
        let cleared = shared.table().clear();
        shared.blocks.lock().unwrap()[number(cleared.start)..number(cleared.end)].fill(false);
        let is_kept = maker.join().expect("no panic");
        let blocks = *shared.blocks.lock().unwrap();
        match shared.table().look(0).0 {
            SampleState::At(at) => {
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
        let shared = Shared::new();
        assert!(shared.store(0));
        let SampleState::At(at) = shared.table().look(0).0 else { panic!("it is kept") };
        // A part of the record: two pages, of one word each.
        let part = at..at + 16;
        shared.bytes_in(part.clone()).iter().for_each(|word| word.store(7, Ordering::Relaxed));
        let (peer, bytes) = (Arc::clone(&shared), part.clone());
        let clearing = thread::spawn(move || peer.clear(bytes));
        let is_whole = shared.bytes_in(part).iter().all(|word| word.load(Ordering::Relaxed) == 7);
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

#[test]
fn a_maker_may_die_before_any_store() {
    // Its stores: the tail, and the word.
    for stores in 0..3 {
        explore(&format!("a_maker_may_die_before_any_store, after {stores}"), move || {
            let shared = Shared::new();
            let peer = Arc::clone(&shared);
            let maker = thread::spawn(move || killed_after(stores, || peer.store(0)));
            let kept = shared.store(0);
            maker.join().expect("no panic");
            assert!(kept || shared.read(0).is_some(), "a dead maker is in the way");
            assert!(shared.read(0).is_some(), "a kept sample is lost");
            assert!(shared.table().used() <= 2 * ALIGN, "more was lost than what it had reserved");
        });
    }
}
