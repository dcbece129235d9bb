//! Bells and watches: the system calls of sleeping and waking. The protocol is in [`doorbell`](super::doorbell).

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, epoll, eventfd, poll};
use rustix::io::Errno;

use crate::error::{Error, Result};

/// An eventfd: rung by any process that has it, heard by one.
#[derive(Debug)]
pub struct Bell(OwnedFd);

impl Bell {
    /// A silent bell.
    ///
    /// # Errors
    /// [`Error::Os`] when there are too many open files.
    pub fn new() -> Result<Self> {
        eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map(Self)
            .map_err(|errno| Error::os("eventfd", errno))
    }

    /// A bell that another process made.
    #[must_use]
    pub fn attach(fd: OwnedFd) -> Self {
        Self(fd)
    }

    /// Wakes the sleeper, or lets its next sleep end at once. Never blocks: a counter that is full is loud enough.
    pub fn ring(&self) {
        let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
    }

    fn silence(&self) {
        let _ = rustix::io::read(&self.0, &mut [0u8; 8]);
    }
}

impl AsFd for Bell {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Sleeps until the bell rings, the watched process ends, a signal comes or the time is over.
///
/// Returns whether the watched process has ended.
///
/// # Errors
/// [`Error::Os`] when a descriptor is not valid.
pub fn sleep(bell: &Bell, process: BorrowedFd<'_>, limit: Duration) -> Result<bool> {
    let mut fds = [PollFd::new(bell, PollFlags::IN), PollFd::from_borrowed_fd(process, PollFlags::IN)];
    match poll(&mut fds, Some(&timespec(limit))) {
        Ok(_) | Err(Errno::INTR) => {}
        Err(errno) => return Err(Error::os("poll", errno)),
    }
    let ended = fds[1].revents().contains(PollFlags::IN);
    if fds[0].revents().contains(PollFlags::IN) {
        bell.silence();
    }
    Ok(ended)
}

fn timespec(limit: Duration) -> Timespec {
    Timespec { tv_sec: limit.as_secs().try_into().unwrap_or(i64::MAX), tv_nsec: limit.subsec_nanos().into() }
}

/// The parent's watch: its bell and the handles of its workers in one epoll set.
///
/// The bell is watched edge-triggered and never silenced, which saves each sleep a system call: every ring is an
/// event, whatever the counter says, which would take centuries to fill.
///
/// INVARIANT: who takes the bell's event out of the set is a sleeper, whom it wakes, or rings again. So a ring
/// before a sleep ends it.
#[derive(Debug)]
pub struct Watch {
    epoll: OwnedFd,
    bell: Bell,
}

const BELL: u64 = u64::MAX;

impl Watch {
    /// A watch over `bell` alone.
    ///
    /// # Errors
    /// [`Error::Os`] when there are too many open files.
    pub fn new(bell: Bell) -> Result<Self> {
        let epoll =
            epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|errno| Error::os("epoll_create", errno))?;
        let data = epoll::EventData::new_u64(BELL);
        epoll::add(&epoll, &bell, data, epoll::EventFlags::IN | epoll::EventFlags::ET)
            .map_err(|errno| Error::os("epoll_ctl", errno))?;
        Ok(Self { epoll, bell })
    }

    /// The bell that ends a sleep.
    #[must_use]
    pub fn bell(&self) -> &Bell {
        &self.bell
    }

    /// Watches the process behind `handle` as `worker`.
    ///
    /// # Errors
    /// [`Error::Os`] when the system refuses.
    pub fn add(&self, worker: u32, handle: BorrowedFd<'_>) -> Result<()> {
        let data = epoll::EventData::new_u64(worker.into());
        epoll::add(&self.epoll, handle, data, epoll::EventFlags::IN)
            .map_err(|errno| Error::os("epoll_ctl", errno))
    }

    /// No longer watches `handle`: the end of its process has been noticed.
    pub fn remove(&self, handle: BorrowedFd<'_>) {
        let _ = epoll::delete(&self.epoll, handle);
    }

    /// Sleeps until the bell rings, a worker ends, a signal comes or the time is over. Returns the workers that ended.
    ///
    /// # Errors
    /// [`Error::Os`] when the system refuses.
    pub fn sleep(&self, limit: Duration) -> Result<Vec<u32>> {
        self.wait(limit).map(|(ended, _)| ended)
    }

    /// The workers that have ended, without sleeping and without hearing the bell.
    ///
    /// # Errors
    /// [`Error::Os`] when the system refuses.
    pub fn ended(&self) -> Result<Vec<u32>> {
        let (ended, rung) = self.wait(Duration::ZERO)?;
        if rung {
            self.bell.ring();
        }
        Ok(ended)
    }

    fn wait(&self, limit: Duration) -> Result<(Vec<u32>, bool)> {
        let mut events = [MaybeUninit::<epoll::Event>::uninit(); 16];
        let events = match epoll::wait(&self.epoll, &mut events, Some(&timespec(limit))) {
            Ok((events, _)) => events,
            Err(Errno::INTR) => &mut [],
            Err(errno) => return Err(Error::os("epoll_wait", errno)),
        };
        let sources = events.iter().map(|event| event.data.u64());
        let ended = sources.clone().filter(|&source| source != BELL).map(|worker| worker as u32).collect();
        Ok((ended, sources.clone().any(|source| source == BELL)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::os::process::process_handle;

    #[test]
    fn a_bell_rung_before_the_sleep_ends_it() {
        let bell = Bell::new().unwrap();
        let own = process_handle(0).unwrap();
        bell.ring();
        bell.ring();
        assert!(!sleep(&bell, own.as_fd(), Duration::from_secs(60)).unwrap());
        assert!(!sleep(&bell, own.as_fd(), Duration::ZERO).unwrap());
    }

    #[test]
    fn a_ring_ends_one_sleep_of_the_watch() {
        let watch = Watch::new(Bell::new().unwrap()).unwrap();
        for _ in 0..3 {
            watch.bell().ring();
            watch.bell().ring();
            assert_eq!(watch.wait(Duration::from_secs(60)), Ok((vec![], true)));
            assert_eq!(watch.wait(Duration::ZERO), Ok((vec![], false)), "each ring was heard");
        }
    }

    #[test]
    fn who_asks_for_the_ended_leaves_the_ring_to_the_sleeper() {
        let watch = Watch::new(Bell::new().unwrap()).unwrap();
        watch.bell().ring();
        assert_eq!(watch.ended(), Ok(vec![]));
        assert_eq!(watch.wait(Duration::ZERO), Ok((vec![], true)));
        assert_eq!(watch.ended(), Ok(vec![]));
        assert_eq!(watch.wait(Duration::ZERO), Ok((vec![], false)), "nobody rang");
    }

    #[test]
    fn a_ring_ends_the_sleep_of_another_thread() {
        let watch = Watch::new(Bell::new().unwrap()).unwrap();
        for _ in 0..100 {
            std::thread::scope(|scope| {
                let sleeper = scope.spawn(|| watch.wait(Duration::from_secs(60)));
                watch.bell().ring();
                // Whether this takes the ring or the sleeper does, the sleeper is woken.
                assert_eq!(watch.ended(), Ok(vec![]));
                assert_eq!(sleeper.join().unwrap(), Ok((vec![], true)));
            });
            assert_eq!(watch.wait(Duration::ZERO), Ok((vec![], false)), "the ring was heard once");
        }
    }

    #[test]
    fn the_watch_names_the_worker_that_ended() {
        let watch = Watch::new(Bell::new().unwrap()).unwrap();
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let handle = process_handle(child.id()).unwrap();
        watch.add(3, handle.as_fd()).unwrap();
        assert_eq!(watch.sleep(Duration::ZERO).unwrap(), []);
        child.kill().unwrap();
        assert_eq!(watch.sleep(Duration::from_secs(60)).unwrap(), [3]);
        assert_eq!(watch.ended().unwrap(), [3]);
        watch.remove(handle.as_fd());
        assert_eq!(watch.sleep(Duration::ZERO).unwrap(), []);
        child.wait().unwrap();
        watch.bell().ring();
        assert_eq!(watch.sleep(Duration::from_secs(60)).unwrap(), []);
    }
}
