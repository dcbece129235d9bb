//! System calls, and nothing of what they are made for.
//!
//! | module | about |
//! |---|---|
//! | [`segment`] | one memfd, mapped |
//! | [`frozen`] | one memfd, written once and then only read |
//! | [`memory`] | what the machine has left |
//! | [`fd_passing`] | a descriptor over a socket pair |
//! | [`eventfd`] | one process wakes another |
//! | [`poller`] | sleeping for an eventfd and the ends of processes at once |
//! | [`process`] | handles of processes, and pipes that tell of a child's end |
//! | [`mod@read_ahead`] | files' pages, fetched before they are read |

pub mod eventfd;
pub mod fd_passing;
#[allow(unsafe_code, reason = "maps memory that nobody writes to, and refers to it")]
pub mod frozen;
pub mod memory;
pub mod poller;
pub mod process;
#[allow(unsafe_code, reason = "advises the system of memory by its address")]
pub mod read_ahead;
#[allow(unsafe_code, reason = "maps and unmaps memory, copies bytes in and out")]
pub mod segment;

pub use read_ahead::read_ahead;
pub use segment::Segment;

use std::os::fd::OwnedFd;

use rustix::fs::MemfdFlags;

use crate::error::{Error, Result};

/// Memory without a name in any file system, of no length, that children do not inherit over `exec`.
fn memfd(name: &str) -> Result<OwnedFd> {
    rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
        .map_err(|errno| Error::os("memfd_create", errno))
}

impl Error {
    /// A refused system call.
    pub(crate) fn os(call: &'static str, errno: rustix::io::Errno) -> Self {
        Self::Os { call, message: errno.to_string(), errno: errno.raw_os_error() }
    }
}
