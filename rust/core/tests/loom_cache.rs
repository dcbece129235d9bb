//! Models of the table of kept samples. `ci/loom.sh` runs them, and then each with a fault planted that it must
//! catch.
#![cfg(ringloader_loom)]

mod support;

use loom::sync::Mutex;
use ringloader_core::{
    cache::{ALIGN, State, Table},
    sync::{Arc, AtomicU64, thread},
    testing::crash::killed_after,
};
use support::{
    model::{explore, explore_all},
    payload::Payload,
};

/// Places for records.
const PLACES: usize = 6;

struct Shared {
    tail: AtomicU64,
    floor: AtomicU64,
    full: AtomicU64,
    words: [AtomicU64; 1],
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
            words: [AtomicU64::new(0)],
            records: Payload::cells(PLACES),
            blocks: Mutex::new([false; PLACES]),
        })
    }

    fn table(&self) -> Table<'_> {
        Table { tail: &self.tail, floor: &self.floor, full: &self.full, words: &self.words }
    }

    /// Makes the record of the only index. Returns whether it is kept; `false` too where one is there.
    fn store(&self) -> Option<bool> {
        let (state, seen) = self.table().look(0);
        if matches!(state, State::At(_)) {
            return Some(false);
        }
        let at = self.table().reserve(ALIGN, u64::MAX)?;
        self.records[number(at)].write(at);
        Some(self.table().publish(0, seen, at))
    }

    /// The place of the record that is found, which is whole.
    fn read(&self) -> Option<u64> {
        let State::At(at) = self.table().look(0).0 else { return None };
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
        let other = thread::spawn(move || peer.store());
        let reader = {
            let (peer, seen) = (Arc::clone(&shared), seen.clone());
            thread::spawn(move || {
                let found = peer.read();
                seen.note(if found.is_some() { "read" } else { "missing" });
                found
            })
        };
        let mine = shared.store().expect("there is room");
        let theirs = other.join().expect("no panic").expect("there is room");
        let found = reader.join().expect("no panic");
        let kept = shared.read().expect("one of two is kept");
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
        let maker = thread::spawn(move || {
            let table = peer.table();
            let (_, seen) = table.look(0);
            let at = table.reserve(ALIGN, u64::MAX).expect("there is room");
            peer.blocks.lock().unwrap()[number(at)] = true;
            if !table.publish(0, seen, at) {
                peer.blocks.lock().unwrap()[number(at)] = false;
            }
        });
        let cleared = shared.table().clear();
        shared.blocks.lock().unwrap()[number(cleared.start)..number(cleared.end)].fill(false);
        maker.join().expect("no panic");
        let blocks = *shared.blocks.lock().unwrap();
        match shared.table().look(0).0 {
            State::At(at) => {
                assert!(at >= cleared.end, "a sample of before is there");
                assert!(blocks[number(at)], "a kept sample has no bytes");
                seen.note("kept");
            }
            _ => seen.note("cleared"),
        }
        assert!(!blocks[..number(cleared.end)].contains(&true), "bytes are left that nobody names");
    });
}

#[test]
fn a_maker_may_die_before_any_store() {
    // Its stores: the tail, and the word.
    for stores in 0..3 {
        explore(&format!("a_maker_may_die_before_any_store, after {stores}"), move || {
            let shared = Shared::new();
            let peer = Arc::clone(&shared);
            let maker = thread::spawn(move || killed_after(stores, || peer.store()));
            let kept = shared.store().expect("there is room");
            maker.join().expect("no panic");
            assert!(kept || shared.read().is_some(), "a dead maker is in the way");
            assert!(shared.read().is_some(), "a kept sample is lost");
            assert!(shared.table().used() <= 2 * ALIGN, "more was lost than what it had reserved");
        });
    }
}
