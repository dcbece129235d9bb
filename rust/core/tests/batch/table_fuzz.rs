//! The parser of tables under damage: a fixed number of inputs, each a valid table with some bytes changed. What was
//! found once, and inputs that reach each refusal, are kept in `tests/batch/corpus`, one file an input. Its name begins
//! with what must come of it, and ends with the payload's length. One that breaks a bound is written there as
//! `found-..`, to be renamed once it is mended.
//!
//! `RINGLOADER_TEST_INPUTS` says how many inputs; else ten thousand. With `RINGLOADER_TEST_SEED`, others.

use std::path::Path;

use proptest::strategy::{Strategy, ValueTree};
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};
use ringloader_core::batch::Meta;
use ringloader_core::batch::wire::repeats;

use crate::table_model::*;
use crate::table_props::legal_table;

const INPUTS: u64 = 10_000;
/// Damaged forms of one table.
const FORMS: u64 = 50;
/// The folder in which a table is kept that breaks a bound.
const CORPUS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/batch/corpus");

fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// A generator of random numbers: splitmix64.
struct Chance(u64);

impl Chance {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    fn below(&mut self, limit: usize) -> usize {
        (self.next() % limit.max(1) as u64) as usize
    }

    /// Numbers at which unchecked arithmetic goes wrong, those near to what stood there, and others.
    fn value(&mut self, before: u64) -> u64 {
        match self.below(8) {
            0 => 0,
            1 => u64::MAX >> self.below(64),
            2 => 1 << self.below(64),
            3 => before.wrapping_add(1 + self.next() % 64),
            4 => before.wrapping_sub(1 + self.next() % 64),
            5 => before ^ 1 << self.below(64),
            6 => self.next() % 256,
            _ => self.next(),
        }
    }
}

/// Changes one to four places of `block`, of one to eight bytes each, as its fields are; seldom its length.
fn damage(block: &mut Vec<u8>, other: &[u8], chance: &mut Chance) {
    for _ in 0..1 + chance.below(4) {
        let width = 1 << chance.below(4);
        if block.len() < 8 {
            return;
        }
        // The counts of the header are what all else follows from.
        let end = if chance.below(4) == 0 { 40.min(block.len()) } else { block.len() };
        let at = chance.below(end - width + 1);
        let at = if chance.below(3) == 0 { at } else { at / width * width };
        match chance.below(16) {
            0 => block.truncate(at),
            1 => block.insert(at, chance.next() as u8),
            2 => {
                block.remove(at);
            }
            3 => {
                // A piece of another table.
                let len = chance.below(64).min(other.len()).min(block.len() - at);
                let from = chance.below(other.len() - len + 1);
                block[at..at + len].copy_from_slice(&other[from..from + len]);
            }
            _ => {
                let mut bytes = [0; 8];
                bytes[..width].copy_from_slice(&block[at..at + width]);
                let value = chance.value(u64::from_le_bytes(bytes)).to_le_bytes();
                block[at..at + width].copy_from_slice(&value[..width]);
            }
        }
    }
}

/// Reads a block in all ways; the bounds must hold of what is accepted. Whether it is.
fn read(block: &[u8], payload: u64) -> bool {
    let accepted =
        Meta::parse(block, GENERATION, payload).inspect(|meta| assert_bounds(meta, payload)).is_ok();
    assert!(!accepted || repeats(block, GENERATION, block));
    accepted
}

#[test]
fn damaged_tables_keep_the_bounds() {
    let inputs = number("RINGLOADER_TEST_INPUTS").unwrap_or(INPUTS);
    let seed = number("RINGLOADER_TEST_SEED").unwrap_or(1);
    let mut chance = Chance(seed);
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    let mut runner = TestRunner::new_with_rng(Config::default(), rng);
    let mut other = write(&[], &[]);
    let (mut done, mut accepted) = (0, 0);
    while done < inputs {
        let (storages, leaves) = legal_table().new_tree(&mut runner).unwrap().current();
        let whole = write(&storages, &leaves);
        for _ in 0..FORMS.min(inputs - done) {
            let mut block = whole.clone();
            damage(&mut block, &other, &mut chance);
            let payload = if chance.below(4) == 0 { chance.next() % 20_000 } else { PAYLOAD };
            match std::panic::catch_unwind(|| read(&block, payload)) {
                Ok(was) => accepted += u64::from(was),
                Err(panic) => {
                    let name = format!("{CORPUS}/found-{seed}-{done}-{payload}");
                    std::fs::write(&name, &block).unwrap();
                    eprintln!("the input is kept as {name}");
                    std::panic::resume_unwind(panic);
                }
            }
            done += 1;
        }
        other = whole;
    }
    println!("{done} damaged tables, {accepted} accepted");
    assert!(accepted > done / 100 && accepted < done, "{accepted} of {done}");
}

#[test]
fn the_corpus_keeps_the_bounds() {
    let mut accepted = (0, 0);
    for entry in std::fs::read_dir(Path::new(CORPUS)).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        let payload = name.rsplit('-').next().unwrap().parse().expect(name);
        let was = read(&std::fs::read(&path).unwrap(), payload);
        accepted = if was { (accepted.0 + 1, accepted.1) } else { (accepted.0, accepted.1 + 1) };
        assert_eq!(was, name.starts_with("accepted"), "{name}");
    }
    assert!(accepted.0 >= 4 && accepted.1 >= 12, "{accepted:?}");
}

/// Writes the inputs of the corpus by the messages that refuse them: the first table for each, and some that are
/// accepted. `cargo test -p ringloader-core --test batch -- --ignored corpus`
#[test]
#[ignore = "writes the corpus"]
fn write_the_corpus() {
    let (mut chance, mut runner) = (Chance(7), TestRunner::deterministic());
    let mut kept = std::collections::BTreeMap::<String, Vec<u8>>::new();
    for _ in 0..4000 {
        let (storages, leaves) = legal_table().new_tree(&mut runner).unwrap().current();
        if leaves.len() > 12 {
            continue;
        }
        let whole = write(&storages, &leaves);
        for _ in 0..FORMS {
            let mut block = whole.clone();
            damage(&mut block, &whole, &mut chance);
            let name = match Meta::parse(&block, GENERATION, PAYLOAD) {
                Ok(meta) => match meta.skeleton().find_map(|token| token.err()) {
                    Some(error) => format!("accepted-skeleton-{}", words(&error.to_string())),
                    None if block != whole => format!("accepted-{}", leaves.len()),
                    None => continue,
                },
                Err(error) => format!("refused-{}", words(&error.to_string())),
            };
            let small = kept.entry(name).or_insert_with(|| block.clone());
            if block.len() < small.len() {
                *small = block;
            }
        }
    }
    std::fs::create_dir_all(CORPUS).unwrap();
    for (name, block) in kept {
        std::fs::write(format!("{CORPUS}/{name}-{PAYLOAD}"), block).unwrap();
    }
}

/// The words of a message, without its figures.
fn words(text: &str) -> String {
    let text =
        text.split("; its record").next().unwrap_or_default().split("expected").next().unwrap_or_default();
    let words = text.split(|char: char| !char.is_ascii_alphabetic()).filter(|word| word.len() > 2);
    words.skip(4).take(7).collect::<Vec<_>>().join("_").to_lowercase()
}
