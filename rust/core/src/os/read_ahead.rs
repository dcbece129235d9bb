//! Files' pages, fetched before they are read.

use std::ffi::c_void;

use rustix::mm::{Advice, madvise};

/// Asks the system to fetch the pages of `len` bytes at `address`, if they are of a file, without waiting for them.
///
/// Whatever lies there, or does not, stays as it is; what the system says of it is of no use.
pub fn read_ahead(address: usize, len: usize) {
    let begin = address - address % rustix::param::page_size();
    // SAFETY: this advice changes no byte and no mapping, and the system checks the range.
    let _ = unsafe { madvise(begin as *mut c_void, address - begin + len, Advice::WillNeed) };
}
