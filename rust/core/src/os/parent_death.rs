//! The end of this process soon after that of its parent, whatever it does then: sleeping, computing, holding a lock,
//! stopped by a signal.
//!
//! An idle worker sees the parent's pidfd and ends by itself. This file is for a busy one, which gets half a second to
//! end, and is killed then. It takes no thread: Python warns a program that forks while it has threads, and a dataset
//! may fork.
//!
//! The system sends SIGCONT when the thread that forked this process ends (`PR_SET_PDEATHSIG`). A stopped process gets
//! it too, and goes on; where other code has replaced the handler, SIGCONT does nothing. The handler looks at the
//! parent's pidfd, because that thread may end alone, and then the next thread of the parent takes its place. If the
//! parent has ended, the handler starts a timer that kills this process. The signal comes while the parent ends, which
//! takes seconds for a parent with much memory or many files: until the pidfd shows the end, another timer makes the
//! handler look again.
//!
//! A process that was forked by a server gets SIGCONT from a pipe, whose writing end only the parent has.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::time::Duration;

use rustix::event::PollFlags;
use rustix::io::{Errno, fcntl_dupfd_cloexec};

use super::waiting::poll;
use crate::error::{Error, Result};
use crate::sync::{AtomicU64, Ordering};

/// The data that the handler needs. Never freed.
struct Watch {
    /// The process that has the timer. A forked child has this memory, and no timer.
    pid: i32,
    /// The process that forked this one: the parent, or a server.
    forked_by: i32,
    parent: OwnedFd,
    pipe: Option<OwnedFd>,
    /// Kills this process.
    end: Timer,
    /// Makes the handler look again.
    again: Timer,
    /// The number of times that `again` was started; the highest number once `end` was started.
    looks: AtomicU64,
}

/// A timer that does not run yet, and the time for which it runs once it is started.
struct Timer {
    id: libc::timer_t,
    runs: libc::itimerspec,
}

/// The time between two looks at a parent that may be ending, and the number of looks at most: a parent that lives on
/// may also close the writing end of a pipe.
const NEXT_LOOK: Duration = Duration::from_millis(100);
const MOST_LOOKS: u64 = 600;

/// A command of `fcntl` that libc has no name for.
const F_SETSIG: libc::c_int = 10;

/// The address of the last one; 0 for none.
static WATCH: AtomicU64 = AtomicU64::new(0);

/// Arranges that this process is killed `grace` after the end of `parent`, a pidfd of the process that forked it. Where
/// another has forked it, `pipe` is the reading end of one whose writing end only the parent has.
///
/// A process that is stopped then runs until that. Only the first call in a process has an effect.
///
/// # Errors
/// [`Error::Os`] when the system has no timer for it.
pub fn end_with(parent: BorrowedFd<'_>, pipe: Option<BorrowedFd<'_>>, grace: Duration) -> Result<()> {
    let pid = own_pid();
    if watch().is_some_and(|watch| watch.pid == pid) {
        return Ok(());
    }
    let duplicate = |fd| fcntl_dupfd_cloexec(fd, 3).map_err(|errno| Error::os("fcntl", errno));
    let made: &'static Watch = Box::leak(Box::new(Watch {
        pid,
        forked_by: parent_pid(),
        parent: duplicate(parent)?,
        pipe: pipe.map(duplicate).transpose()?,
        end: Timer::new(libc::SIGKILL, grace)?,
        again: Timer::new(libc::SIGCONT, NEXT_LOOK)?,
        looks: AtomicU64::new(0),
    }));
    // ORDERING: Release: a handler that reads the address reads what is there.
    WATCH.store(ptr::from_ref(made) as u64, Ordering::Release);
    handle()?;
    if let Some(pipe) = pipe {
        send_at_end(pipe, pid)?;
    }
    // If the parent ended before this moment, no signal came.
    look();
    Ok(())
}

impl Timer {
    fn new(signal: libc::c_int, runs_for: Duration) -> Result<Self> {
        // SAFETY: all zero is a value of it.
        let mut event: libc::sigevent = unsafe { std::mem::zeroed() };
        event.sigev_notify = libc::SIGEV_SIGNAL;
        event.sigev_signo = signal;
        // SAFETY: as above.
        let mut runs: libc::itimerspec = unsafe { std::mem::zeroed() };
        runs.it_value.tv_sec = runs_for.as_secs().try_into().unwrap_or(libc::time_t::MAX);
        // A timer of no time is one that is off.
        runs.it_value.tv_nsec = runs_for.subsec_nanos().max(1).into();
        let mut id: libc::timer_t = ptr::null_mut();
        // SAFETY: both are this function's own.
        let made = unsafe { libc::timer_create(libc::CLOCK_MONOTONIC, &raw mut event, &raw mut id) };
        if made == 0 { Ok(Self { id, runs }) } else { Err(last_error("timer_create")) }
    }

    /// Safe in a handler.
    fn start(&self) {
        // SAFETY: the timer is this process's, and is never deleted. The call is safe in a handler.
        unsafe { libc::timer_settime(self.id, 0, &raw const self.runs, ptr::null_mut()) };
    }
}

fn watch() -> Option<&'static Watch> {
    // ORDERING: Acquire, of the store in `end_with`. Another thread may run the handler.
    let address = WATCH.load(Ordering::Acquire) as *const Watch;
    // SAFETY: null, or that of a box that was leaked, which nobody writes to.
    unsafe { address.as_ref() }
}

/// Starts the timer that kills if the parent has ended; that for another look if it may be ending.
fn look() {
    let Some(watch) = watch().filter(|watch| watch.pid == own_pid()) else { return };
    // ORDERING: Relaxed, here and below: a count that nothing hangs on.
    if is_there(&watch.parent, PollFlags::IN) {
        // Only once: a later signal that started the timer again would put the end off.
        if watch.looks.swap(u64::MAX, Ordering::Relaxed) != u64::MAX {
            watch.end.start();
        }
        return;
    }
    // Other signals, of people and of shells, are of no concern.
    let may_be_ending = match &watch.pipe {
        Some(pipe) => is_there(pipe, PollFlags::HUP),
        // Once the parent is gone, the system has given this process another parent.
        None => parent_pid() != watch.forked_by,
    };
    if may_be_ending && watch.looks.fetch_add(1, Ordering::Relaxed) < MOST_LOOKS {
        watch.again.start();
    }
}

extern "C" fn on_signal(_signal: libc::c_int) {
    // SAFETY: the address of this thread's errno, which the interrupted code may be about to read.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: as above.
    let before = unsafe { *errno };
    look();
    // SAFETY: as above.
    unsafe { *errno = before };
}

fn own_pid() -> i32 {
    // SAFETY: has no conditions, and is safe in a handler.
    unsafe { libc::getpid() }
}

fn parent_pid() -> i32 {
    // SAFETY: has no conditions, and is safe in a handler.
    unsafe { libc::getppid() }
}

/// Returns true if `event` is set now. Safe in a handler: a system call.
fn is_there(fd: &OwnedFd, event: PollFlags) -> bool {
    (0..10)
        .map(|_| poll([(fd.as_fd(), event)], Duration::ZERO))
        .find(|found| *found != Err(Errno::INTR))
        .is_some_and(|found| found.is_ok_and(|[found]| !found.is_empty()))
}

/// Handles SIGCONT, in place of the program's handler if there is one, and lets the system send it at the end of the
/// thread that forked this process.
fn handle() -> Result<()> {
    // SAFETY: all zero is a value of it: no flags, no signal blocked.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = on_signal as *const () as usize;
    action.sa_flags = libc::SA_RESTART | libc::SA_ONSTACK;
    // SAFETY: the handler calls nothing that a handler may not call.
    if unsafe { libc::sigaction(libc::SIGCONT, &raw const action, ptr::null_mut()) } != 0 {
        return Err(last_error("sigaction"));
    }
    // SAFETY: all zero is an empty set here.
    let mut these: libc::sigset_t = unsafe { std::mem::zeroed() };
    // SAFETY: the set is this function's own; only this thread's mask changes.
    unsafe {
        libc::sigemptyset(&raw mut these);
        libc::sigaddset(&raw mut these, libc::SIGCONT);
        libc::pthread_sigmask(libc::SIG_UNBLOCK, &raw const these, ptr::null_mut());
    }
    // SAFETY: changes which signal this process gets, and no memory.
    if unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGCONT as libc::c_ulong, 0, 0, 0) } != 0 {
        return Err(last_error("prctl"));
    }
    Ok(())
}

/// Lets the system send SIGCONT to this process when the last writer of `pipe` has gone.
fn send_at_end(pipe: BorrowedFd<'_>, pid: i32) -> Result<()> {
    let raw = pipe.as_raw_fd();
    // SAFETY: changes who gets a signal of the pipe, and no memory.
    let is_set = unsafe {
        libc::fcntl(raw, libc::F_SETOWN, pid) == 0
            && libc::fcntl(raw, F_SETSIG, libc::SIGCONT) == 0
            && libc::fcntl(raw, libc::F_SETFL, libc::fcntl(raw, libc::F_GETFL) | libc::O_ASYNC) == 0
    };
    if is_set { Ok(()) } else { Err(last_error("fcntl")) }
}

fn last_error(call: &'static str) -> Error {
    let raw = std::io::Error::last_os_error().raw_os_error().unwrap_or_default();
    Error::os(call, Errno::from_raw_os_error(raw))
}
