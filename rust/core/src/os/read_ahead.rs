//! Files' pages, fetched before they are read.

use crate::number::usize_from;
use std::ffi::c_void;

use rustix::mm::{Advice, madvise};

use super::page::{page_size, pages_around};

/// Asks the system to fetch the pages of `len` bytes at `address`, if they are of a file, without waiting for them.
///
/// Whatever lies there, or does not, stays as it is; what the system says of it is of no use.
pub fn read_ahead(address: usize, len: usize) {
    let begin = usize_from(pages_around(address as u64, address as u64).start);
    // SAFETY: this advice changes no byte and no mapping, and the system checks the range.
    let _ = unsafe { madvise(begin as *mut c_void, address - begin + len, Advice::WillNeed) };
}

/// Returns an address within `len` bytes at `address` for each page that they lie in.
pub fn one_of_each_page(address: usize, len: usize) -> impl Iterator<Item = usize> {
    let pages = pages_around(address as u64, (address + len) as u64);
    let within = pages.step_by(usize_from(page_size())).map(move |page| address.max(usize_from(page)));
    within.take_while(move |&at| at < address + len)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::os::page::tests::for_each_page_size;

    #[test]
    fn each_page_has_one_address() {
        for_each_page_size(|page| {
            let page = page as usize;
            let found = |address, len| one_of_each_page(address, len).collect::<Vec<_>>();
            assert_eq!(found(3 * page, page), [3 * page]);
            assert_eq!(found(3 * page - 1, 2), [3 * page - 1, 3 * page], "a row over a boundary");
            assert_eq!(found(page + 7, 2 * page), [page + 7, 2 * page, 3 * page]);
            assert_eq!(found(page + 7, 1), [page + 7]);
            assert_eq!(found(page + 7, 0), []);
        });
    }
}
