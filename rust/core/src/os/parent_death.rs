//! The end of this process soon after that of its parent, whatever it does then: sleeping, computing, holding a lock,
//! stopped by a signal.
//!
//! The system sends SIGCONT when the thread that forked this process ends, which a stopped process gets too. Its
//! handler looks at the parent's pidfd, because that thread may end alone, and then the next thread of the parent takes
//! its place. Where the parent has ended, the handler starts a timer that kills this process: by then it may have ended
//! in its own way.
//!
//! A process that was forked by a server gets SIGCONT from a pipe, whose writing end only the parent has.

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, fcntl_dupfd_cloexec};

use crate::error::{Error, Result};
use crate::sync::{AtomicU64, Ordering};

/// What the handler needs. Stays for good.
struct Watch {
    /// The process that has the timer. A forked child has this memory, and no timer.
    pid: i32,
    /// Which forked this process: the parent, or a server.
    forked_by: i32,
    parent: OwnedFd,
    has_pipe: bool,
    timer: libc::timer_t,
    grace: libc::itimerspec,
    /// The handler before this one, which runs as before.
    replaced: libc::sigaction,
}

/// Which libc does not name.
const F_SETSIG: libc::c_int = 10;

/// The address of the last one; 0 for none.
static WATCH: AtomicU64 = AtomicU64::new(0);

/// Has this process killed `grace` after the end of `parent`, a pidfd of the process that forked it. Where another has
/// forked it, `pipe` is the reading end of one whose writing end only the parent has.
///
/// A process that is stopped then goes on until that. Only the first call in a process has an effect.
///
/// # Errors
/// [`Error::Os`] when the system has no timer for it.
pub fn end_with(parent: BorrowedFd<'_>, pipe: Option<BorrowedFd<'_>>, grace: Duration) -> Result<()> {
    let pid = own_pid();
    if watch().is_some_and(|watch| watch.pid == pid) {
        return Ok(());
    }
    let parent = fcntl_dupfd_cloexec(parent, 3).map_err(|errno| Error::os("fcntl", errno))?;
    // SAFETY: all zero is a value of it.
    let mut once: libc::itimerspec = unsafe { std::mem::zeroed() };
    once.it_value.tv_sec = grace.as_secs().try_into().unwrap_or(libc::time_t::MAX);
    // A timer of no time is one that is off.
    once.it_value.tv_nsec = grace.subsec_nanos().max(1).into();
    let made: &'static Watch = Box::leak(Box::new(Watch {
        pid,
        // SAFETY: has no conditions.
        forked_by: unsafe { libc::getppid() },
        parent,
        has_pipe: pipe.is_some(),
        timer: killing_timer()?,
        grace: once,
        replaced: handler()?,
    }));
    // ORDERING: Release: a handler that reads the address reads what is there.
    WATCH.store(ptr::from_ref(made) as u64, Ordering::Release);
    handle()?;
    if let Some(pipe) = pipe {
        send_at_end(pipe, pid)?;
    }
    // Its end before this moment has sent nothing.
    if has_ended(&made.parent, Duration::ZERO) {
        look();
    }
    Ok(())
}

fn watch() -> Option<&'static Watch> {
    // ORDERING: Acquire, of the store in `end_with`. Another thread may run the handler.
    let address = WATCH.load(Ordering::Acquire) as *const Watch;
    // SAFETY: null, or that of a box that was leaked, which nobody writes to.
    unsafe { address.as_ref() }
}

/// Starts the timer if the parent has ended.
fn look() {
    let Some(watch) = watch() else { return };
    // The signals come while the parent ends, a moment before its pidfd says so. By then the system has given this
    // process another parent. Other signals, of people and of shells, are not waited for.
    // SAFETY: has no conditions, and is safe in a handler.
    let may_be_ending = watch.has_pipe || unsafe { libc::getppid() } != watch.forked_by;
    let limit = if may_be_ending { Duration::from_millis(100) } else { Duration::ZERO };
    if watch.pid != own_pid() || !has_ended(&watch.parent, limit) {
        return;
    }
    // SAFETY: the timer is this process's, and is never deleted. The call is safe in a handler.
    unsafe { libc::timer_settime(watch.timer, 0, &raw const watch.grace, ptr::null_mut()) };
}

extern "C" fn on_signal(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the address of this thread's errno, which the interrupted code may be about to read.
    let errno = unsafe { libc::__errno_location() };
    // SAFETY: as above.
    let before = unsafe { *errno };
    look();
    // SAFETY: as above.
    unsafe { *errno = before };
    let Some(Watch { replaced, .. }) = watch() else { return };
    if replaced.sa_sigaction == libc::SIG_DFL || replaced.sa_sigaction == libc::SIG_IGN {
        return;
    }
    if replaced.sa_flags & libc::SA_SIGINFO == 0 {
        // SAFETY: whoever set a handler without that flag set one of this type.
        let handler: extern "C" fn(libc::c_int) = unsafe { std::mem::transmute(replaced.sa_sigaction) };
        handler(signal);
    } else {
        // SAFETY: and with it, one of this type, that of this function.
        let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) =
            unsafe { std::mem::transmute(replaced.sa_sigaction) };
        handler(signal, info, context);
    }
}

fn own_pid() -> i32 {
    // SAFETY: has no conditions, and is safe in a handler.
    unsafe { libc::getpid() }
}

/// Whether the parent ends within `limit`, of less than a second. Safe in a handler: system calls.
fn has_ended(pidfd: &OwnedFd, limit: Duration) -> bool {
    let limit = Timespec { tv_sec: 0, tv_nsec: limit.subsec_nanos().into() };
    let mut one = [PollFd::new(pidfd, PollFlags::IN)];
    (0..10).map(|_| poll(&mut one, Some(&limit))).find(|found| *found != Err(Errno::INTR)) == Some(Ok(1))
}

/// That of SIGCONT now; where it is this module's, of the process that forked this one, that which it replaced.
fn handler() -> Result<libc::sigaction> {
    // SAFETY: all zero is a value of it.
    let mut now: libc::sigaction = unsafe { std::mem::zeroed() };
    // SAFETY: asks for what there is, and writes to this function's own.
    if unsafe { libc::sigaction(libc::SIGCONT, ptr::null(), &raw mut now) } != 0 {
        return Err(last_error("sigaction"));
    }
    let is_ours = now.sa_sigaction == on_signal as *const () as usize;
    Ok(watch().filter(|_| is_ours).map_or(now, |before| before.replaced))
}

/// A timer that is not started.
fn killing_timer() -> Result<libc::timer_t> {
    // SAFETY: all zero is a value of it.
    let mut event: libc::sigevent = unsafe { std::mem::zeroed() };
    event.sigev_notify = libc::SIGEV_SIGNAL;
    event.sigev_signo = libc::SIGKILL;
    let mut timer: libc::timer_t = ptr::null_mut();
    // SAFETY: both are this function's own.
    let made = unsafe { libc::timer_create(libc::CLOCK_MONOTONIC, &raw mut event, &raw mut timer) };
    if made == 0 { Ok(timer) } else { Err(last_error("timer_create")) }
}

/// Has SIGCONT handled, and sent at the end of the thread that forked this process.
fn handle() -> Result<()> {
    // SAFETY: all zero is a value of it: no flags, no signal blocked.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    action.sa_sigaction = on_signal as *const () as usize;
    action.sa_flags = libc::SA_RESTART | libc::SA_ONSTACK | libc::SA_SIGINFO;
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

/// Has SIGCONT sent to this process when the last writer of `pipe` has gone.
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
