//! System calls, and nothing of what they are made for.
//!
//! | module | about |
//! |---|---|
//! | `page` | the size of the machine's pages |
//! | [`segment`] | one memfd, mapped |
//! | [`frozen`] | one memfd, written once and then only read |
//! | [`shared_file`] | a file that other processes have too, read and written by system calls |
//! | [`word_file`] | a file in memory of which words are atomics, and whose other bytes are read and written |
//! | [`record_lock`] | locks on single bytes of a file, which end with their process |
//! | [`clock`] | clocks |
//! | [`memory`] | what the machine has left |
//! | [`fd_passing`] | a descriptor over a socket pair |
//! | [`eventfd`] | one process wakes another |
//! | [`poller`] | sleeping for an eventfd and the ends of processes at once |
//! | [`parent_death`] | the end of this process soon after that of its parent |
//! | [`process`] | handles of processes, and pipes that tell of a child's end |
//! | `waiting` | waiting for descriptors |
//! | [`sockets`] | waiting for connections, and their buffers |
//! | [`read_ahead`] | files' pages, fetched before they are read |

pub mod clock;
pub mod eventfd;
pub mod fd_passing;
#[allow(unsafe_code, reason = "maps memory that nobody writes to, and refers to it")]
pub mod frozen;
#[allow(unsafe_code, reason = "maps a file")]
mod mapping;
pub mod memory;
pub(crate) mod page;
#[allow(unsafe_code, reason = "handles a signal, and has a timer kill the process")]
pub mod parent_death;
pub mod poller;
pub mod process;
#[allow(unsafe_code, reason = "advises the system of memory by its address")]
pub mod read_ahead;
#[allow(unsafe_code, reason = "calls C's function that locks")]
pub mod record_lock;
#[allow(unsafe_code, reason = "maps and unmaps memory, copies bytes in and out")]
pub mod segment;
#[allow(unsafe_code, reason = "vouches for the bytes that a system call has written")]
pub mod shared_file;
pub mod sockets;
#[allow(unsafe_code, reason = "calls C's functions that wait")]
mod waiting;
#[allow(unsafe_code, reason = "maps words, and refers to them")]
pub mod word_file;

pub use segment::Segment;

use std::os::fd::OwnedFd;

use rustix::fs::MemfdFlags;
use rustix::io::Errno;

use crate::error::{Error, Result};

/// Memory without a name in any file system, of no length, that children do not inherit over `exec`, and that is no
/// program: a system may refuse any other (`vm.memfd_noexec=2`).
///
/// # Errors
/// When the system refuses.
pub fn memfd(name: &str) -> Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    match rustix::fs::memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL) {
        // Before Linux 6.3.
        Err(Errno::INVAL) => rustix::fs::memfd_create(name, flags),
        other => other,
    }
    .map_err(|errno| Error::os("memfd_create", errno))
}

impl Error {
    /// A refused system call.
    pub(crate) fn os(call: &'static str, errno: rustix::io::Errno) -> Self {
        Self::Os { call, message: errno.to_string(), errno: errno.raw_os_error() }
    }

    /// A call of the standard library that was refused.
    pub(crate) fn io(call: &'static str, error: &std::io::Error) -> Self {
        Self::Os { call, message: error.to_string(), errno: error.raw_os_error().unwrap_or(0) }
    }
}
