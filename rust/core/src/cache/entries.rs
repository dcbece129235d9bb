//! Hash tables that hold the words of indices, each twice as large as the one before it.
//!
//! An entry is a key, which is the index and one more, and a word. An index has one bucket in each table. Its entry is
//! the first that was free when it was looked for, from the smallest table on. A key stays as long as its table, so a
//! bucket that is full stays full, and all who look for an index come to the same entry. There is no room in any
//! bucket: a table is added. So the tables grow with the samples that are kept, and not with the length of the dataset.
//!
//! A table lies among the records: it is reserved as they are, counts as they do, and is cleared with them.

use super::{Seen, State, Table, TableMemory, sealed};
use crate::sync::{AtomicU64, Ordering, acquire_unless, release_unless};
use crate::testing::failpoint::failpoint;
use crate::testing::fault::fault;

/// Bytes of the first table, and what all tables are aligned to.
pub const FIRST: u64 = if cfg!(ringloader_loom) { 64 } else { 4096 };
/// The most tables.
pub const TABLES: usize = 36;
/// Entries of a bucket.
const BUCKET: usize = if cfg!(ringloader_loom) { 1 } else { 8 };
const ENTRY: u64 = 16;

/// Bytes of a table.
const fn len(number: usize) -> u64 {
    FIRST << number
}

/// Returns the start of an index's bucket in a table.
fn bucket(index: usize, number: usize) -> u64 {
    // SplitMix64's last steps: each bit of the index has a part in each bit.
    let mut hash = (index as u64).wrapping_add((number as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    hash = (hash ^ hash >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    hash = (hash ^ hash >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    hash ^= hash >> 31;
    // A table has a power of two of bytes.
    hash & (len(number) - 1) & !(ENTRY * BUCKET as u64 - 1)
}

impl<R: TableMemory> Table<'_, R> {
    /// Returns the state of an index, and what says it.
    #[must_use]
    pub fn look(&self, index: usize) -> (State, Seen) {
        // Half of all entries are in the last table.
        for number in (0..self.count()).rev() {
            let Some(at) = self.place(number).0 else { continue };
            let at = at + bucket(index, number);
            let Some(words) = self.room.words(at, 2 * BUCKET) else { continue };
            let keys = words.iter().step_by(2).map(|key| key.load(Ordering::Relaxed));
            for (entry, key) in keys.enumerate().take_while(|&(_, key)| key != 0) {
                if key == index as u64 + 1 {
                    return self.state(at + ENTRY * entry as u64, &words[2 * entry + 1]);
                }
            }
        }
        (State::Missing, Seen { entry: 0, word: 0 })
    }

    /// Returns the same, and makes an entry for the index if it has none. `None`: there is no room for it. `bound` gets
    /// the number of bytes to be added, and returns how many bytes may be used then.
    #[must_use]
    pub fn enter(&self, index: usize, bound: impl Fn(u64) -> u64) -> Option<(State, Seen)> {
        let key = index as u64 + 1;
        let mut number = 0;
        while number < self.tables.len() {
            let (Some(at), _) = self.place(number) else {
                self.add(number, &bound)?;
                continue;
            };
            let bucket = at + bucket(index, number);
            let words = self.room.words(bucket, 2 * BUCKET)?;
            number += 1;
            for entry in 0..BUCKET {
                let mut found = words[2 * entry].load(Ordering::Relaxed);
                if found == 0 {
                    found = self.take(&words[2 * entry], key);
                    if found == 0 && at < self.floor() {
                        // Cleared meanwhile: the key has brought the page back.
                        self.room.give_back_below(bucket, self.floor());
                        number = 0;
                        break;
                    }
                }
                if found == 0 || found == key {
                    return Some(self.state(bucket + ENTRY * entry as u64, &words[2 * entry + 1]));
                }
            }
        }
        None
    }

    /// Takes a free entry. Returns zero, or the key that is there.
    fn take(&self, entry: &AtomicU64, key: u64) -> u64 {
        if fault("key_by_store") {
            entry.store(key, Ordering::Relaxed);
            return 0;
        }
        // Relaxed: a key says nothing of the word next to it.
        entry.compare_exchange(0, key, Ordering::Relaxed, Ordering::Relaxed).err().unwrap_or(0)
    }

    fn state(&self, entry: u64, word: &AtomicU64) -> (State, Seen) {
        // ORDERING there: a record that the word names is whole.
        let word = word.load(acquire_unless("there_load_relaxed"));
        (self.state_of(word), Seen { entry, word })
    }

    /// Returns the start of a table, and the word that names it. `None`: the table is not there.
    fn place(&self, number: usize) -> (Option<u64>, u64) {
        // ORDERING there: a table that the word names has its bytes.
        let word = self.tables[number].load(acquire_unless("there_load_relaxed"));
        let is_there = |at: &u64| *at > 0 && at.is_multiple_of(FIRST) && *at >= self.floor();
        (sealed::open(word).filter(is_there), word)
    }

    /// Tables that are there.
    fn count(&self) -> usize {
        (0..self.tables.len()).take_while(|&number| self.place(number).0.is_some()).count()
    }

    /// Adds a table where there is none; another may do so at once, or clear all meanwhile. `None`: there is no room.
    fn add(&self, number: usize, bound: impl Fn(u64) -> u64) -> Option<()> {
        let (None, word) = self.place(number) else { return Some(()) };
        let len = len(number);
        let at = self.reserve_at(len, FIRST, bound(len))?;
        failpoint("table-reserved");
        if !self.room.make(at, len) {
            self.room.give_back(at, len);
            self.unreserve(at, len);
            self.record_full();
            return None;
        }
        failpoint("table-made");
        // ORDERING there: the table has its bytes before the word names it.
        let order = release_unless("there_relaxed");
        if fault("table_by_store") {
            self.tables[number].store(sealed::seal(at), order);
            return Some(());
        }
        let named = self.tables[number].compare_exchange(word, sealed::seal(at), order, Ordering::Relaxed);
        if named.is_err() || at < self.floor() {
            self.room.give_back(at, len);
        }
        if named.is_err() {
            self.unreserve(at, len);
        }
        Some(())
    }

    /// Records that are there.
    #[must_use]
    pub fn items(&self) -> usize {
        let mut items = 0;
        for number in 0..self.count() {
            let Some(start) = self.place(number).0 else { continue };
            for at in (start..start + len(number)).step_by(FIRST as usize) {
                let Some(words) = self.room.words(at, FIRST as usize / 8) else { continue };
                let states = words.iter().skip(1).step_by(2);
                let there = states.map(|word| self.state_of(word.load(Ordering::Relaxed)));
                items += there.filter(|state| matches!(state, State::At(_))).count();
            }
        }
        items
    }

    /// True if no word outside the tables is damaged, and the file of `len` bytes has all tables.
    #[must_use]
    pub fn is_whole(&self, len: impl FnOnce() -> u64) -> bool {
        let value = |word: &AtomicU64| sealed::open(word.load(Ordering::Relaxed));
        let (Some(floor), Some(_)) = (value(self.floor), value(self.full)) else { return false };
        let Some(tail) = value(self.tail) else { return false };
        let mut end = 0;
        for (number, word) in self.tables.iter().enumerate() {
            match value(word) {
                Some(at) if at > 0 && at >= floor => end = end.max(at + self::len(number)),
                Some(_) => {}
                None => return false,
            }
        }
        floor <= tail && end <= len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn indices_of_any_pattern_are_spread() {
        for step in [1, 2, 64, 4096, 1 << 32] {
            let number = 4;
            let mut counts = vec![0; (len(number) / (ENTRY * BUCKET as u64)) as usize];
            let many = 4 * counts.len();
            for index in 0..many {
                counts[(bucket(index * step, number) / (ENTRY * BUCKET as u64)) as usize] += 1;
            }
            assert!(counts.iter().all(|&count| count < 20), "{step}: {:?}", counts.iter().max());
        }
    }
}
