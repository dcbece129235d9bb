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
        test(&|| Samples::in_memory(LEN, Bound::new(Some(64 << 20), 1)).unwrap(), page);
        test(&|| Samples::open(file(), LEN, "one", Bound::new(Some(64 << 20), 1)).unwrap(), page);
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

/// Existing bytes of the file.
fn blocks(samples: &Samples) -> u64 {
    rustix::fs::fstat(samples.file().fd().unwrap()).unwrap().st_blocks as u64 * 512
}

/// Pages of words: those that all have, and the table's.
const PAGES: u64 = 4;

#[test]
fn clearing_gives_all_but_the_words_back() {
    each_kind(|make, page| {
        let samples = make();
        for round in 0..3 {
            for index in 0..300 {
                assert_eq!(store(&samples, index), Stored::There);
            }
            assert!((0..300).all(|index| is_there(&samples, index)));
            assert_eq!(samples.stats().items, 300);
            assert!(blocks(&samples) > 3 << 20);
            samples.count_hit();
            samples.clear().unwrap();
            assert!(blocks(&samples) <= PAGES * page, "{} bytes, pages of {page}", blocks(&samples));
            assert!(!is_there(&samples, 7));
            let stats = samples.stats();
            assert_eq!((stats.items, stats.bytes, stats.hits), (0, 0, round + 1));
        }
        assert_eq!(attached(&samples).len(), LEN);
    });
}

/// The same samples, as another process has them.
fn attached(samples: &Samples) -> Samples {
    let (memory, named) = samples.fds().unwrap();
    let owned = |fd: BorrowedFd<'_>| fd.try_clone_to_owned().unwrap();
    let named = named.map(owned).zip(samples.version());
    Samples::attach(owned(memory), named, samples.len(), Bound::new(None, 1)).unwrap()
}

/// Another program, with words of its own.
fn opened_again(samples: &Samples) -> Samples {
    let fd = samples.fds().unwrap().1.unwrap().try_clone_to_owned().unwrap();
    Samples::open(fd, LEN, "one", Bound::new(None, 1)).unwrap()
}

#[test]
fn all_who_share_a_file_find_what_one_of_them_has_kept() {
    let samples = Samples::open(file(), LEN, "one", Bound::new(None, 1)).unwrap();
    for others in [attached(&samples), opened_again(&samples)] {
        assert_eq!(store(&samples, 3), Stored::There);
        assert_eq!(store(&others, 4), Stored::There);
        let bytes = samples.stats().bytes;
        assert_eq!(store(&others, 3), Stored::There);
        assert_eq!(others.stats().bytes, bytes, "it is kept once");
        assert!([&samples, &others].iter().all(|samples| is_there(samples, 3) && is_there(samples, 4)));
        others.clear().unwrap();
        assert!(!is_there(&samples, 3));
        // Another record lies at the same place.
        let found = {
            let _ = store(&others, 5);
            others.find(5).unwrap()
        };
        assert!(samples.read(&RecordRef { index: 6, ..found }, &mut [MaybeUninit::uninit(); 424]).is_none());
        samples.clear().unwrap();
    }
}

#[test]
fn a_file_that_anybody_has_cut_off_is_a_file_of_fewer_samples() {
    let samples = Samples::open(file(), LEN, "one", Bound::new(None, 1)).unwrap();
    let others = opened_again(&samples);
    for len in [0, 40, 4096, 4096 + 17, 8192, 13_000, 14_000, 20_000] {
        for index in 0..10 {
            assert_eq!(store(&samples, index), Stored::There);
        }
        let found: Vec<_> = (0..10).map(|index| samples.find(index).unwrap()).collect();
        samples.file().truncate(len).unwrap();
        for found in found {
            let mut into = vec![MaybeUninit::uninit(); found.len() as usize];
            if let Some((read, _)) = samples.read(&found, &mut into) {
                assert_eq!(read[record::HEADER..], bytes(found.index)[record::HEADER..]);
            }
        }
        for index in 0..10 {
            assert!(is_there(&others, index) || store(&others, index) == Stored::There, "{len} {index}");
            assert!(is_there(&samples, index), "{len} {index}");
        }
        assert_eq!(opened_again(&samples).stats().items, 10, "the header is there again");
        samples.clear().unwrap();
    }
}
