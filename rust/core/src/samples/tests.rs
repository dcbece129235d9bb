//! Samples on pages of every size.

use std::fs::File;
use std::mem::MaybeUninit;

use super::*;
use crate::os::page::tests::for_each_page_size;

const LEN: usize = 1000;

/// A file without a name, on a disk.
fn file() -> OwnedFd {
    let path = std::env::temp_dir().join(format!("ringloader-{:?}", std::thread::current().id()));
    let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    std::fs::remove_file(path).unwrap();
    file.into()
}

fn each_kind(test: impl Fn(&dyn Fn() -> Samples, u64)) {
    for_each_page_size(|page| {
        test(&|| Samples::in_memory(LEN, Bound::of_memory(Some(64 << 20), 1)).unwrap(), page);
        test(&|| Samples::open(file(), LEN, "one", Bound::of_disk(Some(64 << 20))).unwrap(), page);
    });
}

fn bytes(index: usize) -> Vec<u8> {
    vec![index as u8 | 1; record::HEADER + 10 + 70 * index]
}

fn store(samples: &Samples, index: usize) -> Stored {
    let mut record = bytes(index);
    samples.seal(&mut record, index, record::HEADER);
    samples.store(index, &record)
}

fn is_there(samples: &Samples, index: usize) -> bool {
    let Some(found) = samples.find(index) else { return false };
    let mut into = vec![MaybeUninit::uninit(); found.len() as usize];
    let (read, _) = samples.read(&found, &mut into).unwrap();
    assert_eq!(read[record::HEADER..], bytes(index)[record::HEADER..]);
    true
}

/// Bytes that are there of the file.
fn blocks(samples: &Samples) -> u64 {
    rustix::fs::fstat(samples.fd().unwrap()).unwrap().st_blocks as u64 * 512
}

#[test]
fn clearing_gives_all_but_two_pages_back_and_leaves_the_header() {
    each_kind(|make, page| {
        let samples = make();
        for round in 0..3 {
            for index in 0..300 {
                assert_eq!(store(&samples, index), Stored::There);
            }
            assert!((0..300).all(|index| is_there(&samples, index)));
            assert!(blocks(&samples) > 3 << 20);
            samples.count_hit();
            samples.clear().unwrap();
            // A file system may have a block more, of its own.
            assert!(blocks(&samples) <= 2 * page + 4096, "{} bytes, pages of {page}", blocks(&samples));
            assert!(!is_there(&samples, 7));
            assert_eq!(samples.stats().hits, round + 1);
        }
        let theirs = Samples::attach(samples.fd().unwrap().try_clone_to_owned().unwrap(), make().bound);
        assert_eq!(theirs.unwrap().len(), LEN);
    });
}

/// The first store to a mapped page asks for all its blocks: on a full disk, that would be a SIGBUS.
#[test]
fn the_pages_of_words_have_all_their_blocks() {
    for_each_page_size(|page| {
        let samples = Samples::open(file(), LEN, "one", Bound::of_disk(Some(64 << 20))).unwrap();
        assert_eq!(blocks(&samples), page, "the header's page");
        // A process that dies after it has reserved leaves bytes that were never written.
        let _ = samples.table().reserve(3 * page, u64::MAX).unwrap();
        assert_eq!(store(&samples, 0), Stored::There);
        assert!(blocks(&samples) >= 2 * page, "{} bytes, pages of {page}", blocks(&samples));
    });
}

#[test]
fn one_thread_makes_a_sample_and_none_keeps_another_from_its_own() {
    const ROUNDS: usize = 20_000;
    let samples = Samples::in_memory(LEN, Bound::of_memory(Some(64 << 20), 1)).unwrap();
    let (shared, makers) = (LEN - 1, AtomicU64::new(0));
    std::thread::scope(|scope| {
        for index in 0..4 {
            let (samples, makers) = (&samples, &makers);
            scope.spawn(move || {
                for _ in 0..ROUNDS {
                    let own = samples.begin(index).expect("no other thread makes it");
                    assert_eq!(own.is_mine(), Some(true));
                    assert!(samples.begin(index).is_none(), "this thread makes it");
                    if let Some(_claim) = samples.begin(shared) {
                        assert_eq!(makers.fetch_add(1, Ordering::Relaxed), 0, "two threads make it");
                        makers.fetch_sub(1, Ordering::Relaxed);
                    }
                }
            });
        }
    });
    // No claim is left.
    assert!((0..4).chain([shared]).all(|index| samples.begin(index).is_some()));
}
