//! Models of the table of kept samples. `ci/loom.sh` runs them, and then each with a fault planted that it must
//! catch.
#![cfg(ringloader_loom)]

mod support;

use ringloader_core::{
    cache::{ALIGN, Table},
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
    words: [AtomicU64; LEN],
    /// The bytes of each place, for records that are read while they are cleared. Those that were cleared stay, as where
    /// the system takes no pages back.
    bytes: Vec<AtomicU64>,
    /// A record's bytes, by its place: the place itself.
    records: Vec<Payload>,
}

impl Shared {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            tail: AtomicU64::new(ALIGN),
            floor: AtomicU64::new(ALIGN),
            words: [const { 0 }; LEN].map(AtomicU64::new),
            bytes: (0..PLACES * WORDS).map(|_| AtomicU64::new(0)).collect(),
            records: Payload::cells(PLACES),
        })
    }

    fn table(&self) -> Table<'_> {
        Table { tail: &self.tail, floor: &self.floor, words: &self.words }
    }

    /// Keeps the record of an index, unless one is there. Returns its place.
    fn store(&self, index: usize) -> Option<u64> {
        if self.table().look(index).is_some() {
            return None;
        }
        let at = self.table().reserve(ALIGN, u64::MAX).expect("there is room");
        self.records[number(at)].write(at);
        self.table().publish(index, at);
        Some(at)
    }

    /// Clears the table, and takes bytes of before as the system does: they are zero after, and nothing orders that but
    /// what [`Table::clear`] does.
    fn clear(&self, bytes: std::ops::Range<u64>) {
        assert!(bytes.end <= self.table().clear());
        for word in self.bytes_in(bytes) {
            word.store(0, Ordering::Relaxed);
        }
    }

    fn bytes_in(&self, bytes: std::ops::Range<u64>) -> &[AtomicU64] {
        &self.bytes[bytes.start as usize / 8..bytes.end as usize / 8]
    }

    /// The place of the record that is found, which is whole.
    fn read(&self, index: usize) -> Option<u64> {
        let at = self.table().look(index)?;
        assert_eq!(self.records[number(at)].read(), at, "a torn record");
        Some(at)
    }
}

fn number(at: u64) -> usize {
    (at / ALIGN) as usize
}

#[test]
fn two_that_make_one_sample_keep_one_of_theirs() {
    explore_all("two_that_make_one_sample_keep_one_of_theirs", &["read", "missing", "both stored"], |seen| {
        let shared = Shared::new();
        let peer = Arc::clone(&shared);
        let other = thread::spawn(move || peer.store(0));
        let reader = {
            let (peer, seen) = (Arc::clone(&shared), seen.clone());
            thread::spawn(move || seen.note(if peer.read(0).is_some() { "read" } else { "missing" }))
        };
        let mine = shared.store(0);
        let theirs = other.join().expect("no panic");
        reader.join().expect("no panic");
        let kept = shared.read(0).expect("one of two is kept");
        assert!([mine, theirs].contains(&Some(kept)), "nobody has kept it");
        if mine.is_some() && theirs.is_some() {
            seen.note("both stored");
        }
    });
}

#[test]
fn clearing_leaves_no_sample_of_before() {
    explore_all("clearing_leaves_no_sample_of_before", &["kept", "cleared"], |seen| {
        let shared = Shared::new();
        let peer = Arc::clone(&shared);
        let clearing = thread::spawn(move || peer.table().clear());
        shared.store(0);
        let end = clearing.join().expect("no panic");
        match shared.table().look(0) {
            Some(at) => {
                assert!(at >= end, "a sample of before is there");
                seen.note("kept");
            }
            None => seen.note("cleared"),
        }
    });
}

/// The bytes of a record are a seqlock's: they are read, and then the floor.
#[test]
fn a_record_that_is_cleared_while_it_is_read_is_not_taken() {
    let situations = ["there", "cleared after it was read", "cleared before"];
    explore_all("a_record_that_is_cleared_while_it_is_read_is_not_taken", &situations, |seen| {
        let shared = Shared::new();
        let at = shared.store(0).expect("it is kept");
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
            shared.store(0);
            maker.join().expect("no panic");
            assert!(shared.read(0).is_some(), "a kept sample is lost");
            assert!(shared.table().used() <= 2 * ALIGN, "more was lost than what it had reserved");
        });
    }
}
