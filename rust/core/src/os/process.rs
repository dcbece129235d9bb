//! Processes: handles, pipes that tell when all writers have gone, numbers that no other process has.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use rustix::event::PollFlags;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::waiting::poll;
use crate::error::{Error, Result};

/// A pidfd of `pid`, or of this process for 0: readable once the process has ended.
///
/// # Errors
/// [`Error::Os`] when the system has none (before Linux 5.3, some sandboxes) or the process is gone.
pub fn pidfd(pid: u32) -> Result<OwnedFd> {
    let pid = if pid == 0 { rustix::process::getpid() } else { raw_pid(pid)? };
    pidfd_open(pid, PidfdFlags::empty()).map_err(|errno| Error::os("pidfd_open", errno))
}

fn raw_pid(pid: u32) -> Result<Pid> {
    let raw = i32::try_from(pid).ok().and_then(Pid::from_raw);
    raw.ok_or_else(|| Error::Config(format!("{pid} is no process id")))
}

/// A number that no other process will draw.
pub(crate) fn random() -> u64 {
    let mut bytes = [0; 8];
    match rustix::rand::getrandom(&mut bytes[..], rustix::rand::GetRandomFlags::empty()) {
        Ok(8) => u64::from_ne_bytes(bytes),
        _ => {
            let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
            let pid = u64::from(std::process::id());
            (now.tv_sec as u64).rotate_left(32) ^ (now.tv_nsec as u64) ^ pid.rotate_left(48)
        }
    }
}

/// A pipe: its reading end, its writing end.
pub(crate) fn end_pipe() -> Option<(OwnedFd, OwnedFd)> {
    pipe_with(PipeFlags::CLOEXEC).ok()
}

/// Returns true if no process has the other end any more.
pub(crate) fn is_hung_up(fd: impl AsFd) -> bool {
    poll([(fd.as_fd(), PollFlags::empty())], Duration::ZERO)
        .is_ok_and(|[found]| found.contains(PollFlags::HUP))
}
