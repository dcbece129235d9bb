//! Tells this process from its forked children, and knows which children may have its memory.
//!
//! A forked child inherits every object, lock and number of its parent. Which process owns a thing is read from a page
//! that the system wipes at a fork. Where the system has no such page, the process id is asked for each time.
//!
//! That children have gone is told by a pipe for each fork: the child, and all that it forks, keep the writing end open
//! until they end or run another program, which closes it; the parent has the reading end. A program that forks calls
//! [`before_fork`], [`after_fork_in_parent`] and [`after_fork_in_child`]; children of a fork that does not are unknown.

pub mod deadline;
#[allow(unsafe_code, reason = "turns a page of its own, and boxes that are leaked, into references")]
mod own_page;

use std::cell::RefCell;
use std::os::fd::OwnedFd;
use std::sync::Weak;
use std::time::{Duration, Instant};

pub(crate) use self::own_page::Leaked;
use self::own_page::{OwnPage, own_page};
use crate::forks::{Child, Forks, Moment};
use crate::os::process::{end_pipe, is_hung_up, random};
use crate::sync::{AtomicU64, Lock, Ordering};
use crate::testing::failpoint::failpoint;

/// A process: this one, or in a forked child perhaps its parent.
#[derive(Debug)]
pub struct Process {
    page: &'static OwnPage,
    /// True if the page is wiped at a fork.
    is_wiped: bool,
    /// The identity that stands on the page in this process alone.
    identity: u64,
    pid: u32,
    forks: Forks<Pipe>,
    /// Whatever may lend memory.
    lenders: Lock<Vec<Weak<dyn Lender>>>,
    /// Things that are lent by none of `lenders`.
    lent: AtomicU64,
    began: Instant,
    /// When children were last [glanced](Self::glance) at, in milliseconds since then.
    looked: AtomicU64,
}

/// To look at children is a system call for each.
const GLANCE: Duration = Duration::from_millis(10);

/// Something that lends memory that a forked child would have too.
pub trait Lender: Send + Sync {
    /// Returns true if any memory is lent.
    fn is_lending(&self) -> bool;
}

/// The process that came last. A forked child finds its parent there.
static LAST: Leaked<Process> = Leaked::none();

/// This process. A forked child waits for no thread of its parent's, which may be in here at the fork.
#[inline]
pub fn current() -> &'static Process {
    known().unwrap_or_else(make)
}

/// This process, if it was ever asked for.
fn known() -> Option<&'static Process> {
    LAST.get().filter(|process| process.is_current())
}

/// Makes this process, unless another thread of it does: then waits for that.
#[cold]
fn make() -> &'static Process {
    static PAGE: Leaked<(&'static OwnPage, bool)> = Leaked::none();
    let &(page, is_wiped) = PAGE.get().unwrap_or_else(|| {
        let made = own_page().map_or_else(|| (&*Box::leak(Box::default()), false), |page| (page, true));
        PAGE.replace(None, made)
    });
    let pid = std::process::id();
    loop {
        let parent = LAST.get();
        if let Some(process) = parent.filter(|process| process.is_current()) {
            return process;
        }
        let maker = page.maker.load(Ordering::Relaxed);
        let claims = || page.maker.compare_exchange(maker, pid, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        if maker != pid && claims() {
            return LAST.replace(parent, Process::on(page, is_wiped));
        }
        std::thread::yield_now();
    }
}

impl Process {
    fn on(page: &'static OwnPage, is_wiped: bool) -> Self {
        let identity = random() | 1;
        page.clock.start(random());
        page.identity.store(identity, Ordering::Relaxed);
        Self {
            page,
            is_wiped,
            identity,
            pid: std::process::id(),
            forks: Forks::new(),
            lenders: Lock::default(),
            lent: AtomicU64::new(0),
            began: Instant::now(),
            looked: AtomicU64::new(0),
        }
    }

    /// Returns true if this is the process that runs, not its forked child. Any thread may call this; it takes no lock.
    #[inline]
    #[must_use]
    pub fn is_current(&self) -> bool {
        let is_same = self.page.identity.load(Ordering::Relaxed) == self.identity;
        is_same && (self.is_wiped || self.pid == std::process::id())
    }

    /// Returns the process's id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// A number that no process has with which this one shares memory.
    #[must_use]
    pub fn identity(&self) -> u64 {
        self.identity
    }

    /// The moment at which something is lent.
    #[inline]
    #[must_use]
    pub fn now(&self) -> Moment {
        let now = self.page.clock.now();
        if self.is_wiped { now } else { now.unsure() }
    }

    /// Returns true if this process runs, and has not forked since `then`.
    #[inline]
    #[must_use]
    pub fn is_still(&self, then: Moment) -> bool {
        self.page.clock.is_still(then)
    }

    /// Drops `thing`, which was lent at a moment that is not [still](Self::is_still), once no child may have it. In a
    /// forked child nothing is given back, and there is no thing: the memory is the parent's.
    pub fn give_back<T: Send + 'static>(&self, lent: Moment, thing: impl FnOnce() -> T) {
        if self.is_current() {
            self.forks.give_back(lent, Box::new(thing()));
        }
    }

    /// Looks whether children have gone for which something is kept. A load where nothing is.
    #[inline]
    pub fn look(&self) {
        if self.retains_anything() && self.is_current() {
            self.forks.look();
        }
    }

    /// Does what [`look`](Self::look) does, but no more than once in ten milliseconds: for callers that come by often.
    #[inline]
    pub fn glance(&self) {
        if self.retains_anything() {
            self.glance_at_children();
        }
    }

    #[cold]
    #[expect(clippy::cast_possible_truncation, reason = "no process lives so many milliseconds")]
    fn glance_at_children(&self) {
        let now = self.began.elapsed().as_millis() as u64;
        if now.saturating_sub(self.looked.load(Ordering::Relaxed)) >= GLANCE.as_millis() as u64 {
            self.looked.store(now, Ordering::Relaxed);
            self.look();
        }
    }

    /// Lets go of the handles of children that have gone, also where nothing is kept.
    pub(crate) fn tidy(&self) {
        if self.is_current() {
            self.forks.look();
        }
    }

    /// Returns true if anything is kept for a child.
    #[must_use]
    pub fn retains_anything(&self) -> bool {
        self.forks.retains_anything()
    }

    /// Asks `lender` at each fork whether it lends anything, for as long as it lives.
    pub fn register(&self, lender: Weak<dyn Lender>) {
        let mut lenders = self.lenders.lock();
        lenders.retain(|lender| lender.strong_count() > 0);
        lenders.push(lender);
    }

    /// Counts a thing that is lent by itself.
    pub(crate) fn count_lent(&self) {
        self.lent.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a thing as lent no longer.
    pub(crate) fn discount_lent(&self) {
        self.lent.fetch_sub(1, Ordering::Relaxed);
    }

    fn is_lending(&self) -> bool {
        let lending = |lender: &Weak<dyn Lender>| lender.upgrade().is_some_and(|lender| lender.is_lending());
        self.lent.load(Ordering::Relaxed) > 0 || self.lenders.lock().iter().any(lending)
    }
}

/// The reading end of a fork's pipe. `None` if none could be made: then the child counts as alive for good.
struct Pipe(Option<OwnedFd>);

impl Child for Pipe {
    fn has_gone(&self) -> bool {
        self.0.as_ref().is_some_and(is_hung_up)
    }
}

/// A fork of this thread that is under way.
struct ForkUnderWay {
    process: &'static Process,
    number: u64,
    writing: Option<OwnedFd>,
}

thread_local! {
    /// The innermost fork last: what runs around a fork may fork.
    static UNDER_WAY: RefCell<Vec<ForkUnderWay>> = const { RefCell::new(Vec::new()) };
}

/// Called by the thread that is about to fork. Does nothing in a process that has made no engine or port.
pub fn before_fork() {
    let Some(process) = known() else { return };
    let (reading, writing) = end_pipe().unzip();
    let number = process.forks.begin(&process.page.clock, Pipe(reading));
    UNDER_WAY.with_borrow_mut(|under_way| under_way.push(ForkUnderWay { process, number, writing }));
    failpoint("fork-begun");
}

/// Called by that thread after the fork, or after the fork that failed.
pub fn after_fork_in_parent() {
    if let Some(ForkUnderWay { process, number, writing }) = UNDER_WAY.with_borrow_mut(Vec::pop) {
        failpoint("fork-happened");
        process.forks.end(&process.page.clock, number, process.is_lending());
        drop(writing);
    }
}

/// Called in the child.
pub fn after_fork_in_child() {
    let Some(ForkUnderWay { process, writing, .. }) = UNDER_WAY.with_borrow_mut(Vec::pop) else { return };
    // The parent's memory, as it was at the fork. A lock that another thread had then stays locked.
    let is_lending = process.lenders.try_lock().is_none() || process.is_lending();
    process.forks.forget_children();
    if is_lending {
        // Open until this process ends: its end is what it tells.
        std::mem::forget(writing);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_itself() {
        let process = current();
        assert!(process.is_current() && std::ptr::eq(process, current()));
        assert!(process.is_wiped, "this system wipes pages");
        assert!(process.is_still(process.now()));
        assert_eq!(process.pid(), std::process::id());
    }

    #[test]
    fn what_a_child_finds_of_its_parent_is_not_itself() {
        let page: &'static OwnPage = Box::leak(Box::default());
        let parent = Process::on(page, true);
        let lent = parent.now();
        assert!(parent.is_current() && parent.is_still(lent));
        let child = Process::on(page, true);
        assert!(child.is_current() && !parent.is_current() && !parent.is_still(lent));
    }

    #[test]
    fn without_a_wiped_page_nothing_is_still() {
        let page: &'static OwnPage = Box::leak(Box::default());
        let process = Process::on(page, false);
        assert!(process.is_current());
        assert!(!process.is_still(process.now()));
    }
}
