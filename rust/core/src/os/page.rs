//! The machine's page: memory is mapped and given back in whole ones. Linux on aarch64 has pages of 4, 16 or 64 KiB.

use std::ops::Range;

/// Bytes of a page of this machine, a power of two.
pub(crate) fn page_size() -> u64 {
    #[cfg(test)]
    if let Some(bytes) = tests::INJECTED.get() {
        return bytes;
    }
    rustix::param::page_size() as u64
}

/// Returns the pages that have a part of `start .. end`.
pub(crate) fn pages_around(start: u64, end: u64) -> Range<u64> {
    let page = page_size();
    start / page * page..end.next_multiple_of(page)
}

/// Returns the pages that lie wholly inside `start .. end`, which may be none.
pub(crate) fn pages_within(start: u64, end: u64) -> Range<u64> {
    let page = page_size();
    start.next_multiple_of(page)..end / page * page
}

#[cfg(test)]
pub(crate) mod tests {
    use std::cell::Cell;

    use super::*;

    thread_local! {
        pub(super) static INJECTED: Cell<Option<u64>> = const { Cell::new(None) };
    }

    /// Runs a test with each size of pages that is not smaller than this machine's: what holds for large ones can be
    /// tried on smaller ones.
    pub(crate) fn for_each_page_size(test: impl Fn(u64)) {
        for kib in [4, 16, 64] {
            let page = kib << 10;
            if page >= rustix::param::page_size() as u64 {
                for_page_size(page, || test(page));
            }
        }
    }

    /// Runs a test as on a machine with pages of this size, on this thread.
    pub(crate) fn for_page_size(page: u64, test: impl FnOnce()) {
        INJECTED.set(Some(page));
        test();
        INJECTED.set(None);
    }

    #[test]
    fn ranges_in_pages() {
        for_each_page_size(|page| {
            assert_eq!(page_size(), page);
            assert_eq!(pages_around(1, page), 0..page);
            assert_eq!(pages_around(page, page + 1), page..2 * page);
            assert_eq!(pages_within(1, 3 * page - 1), page..2 * page);
            assert!(pages_within(1, 2 * page - 1).is_empty());
            assert!(pages_within(page + 1, page + 2).is_empty());
        });
    }
}
