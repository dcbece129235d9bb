//! Sleeping for an eventfd and the ends of processes at once.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::Duration;

use rustix::event::epoll;
use rustix::io::Errno;

use super::eventfd::EventFd;
use super::waiting::epoll_wait;
use crate::error::{Error, Result};
use crate::number::u32_from;

/// The parent's eventfd and the pidfds of its workers in one epoll set.
///
/// The eventfd is watched edge-triggered and never read, which saves each sleep a system call: every notification is
/// an event, whatever the counter says, which would take centuries to fill.
///
/// INVARIANT: the thread that takes the eventfd's event out of the set is a sleeper, which it wakes, or notifies
/// again. So a notification before a sleep ends it.
#[derive(Debug)]
pub struct Poller {
    epoll: OwnedFd,
    eventfd: EventFd,
}

const EVENTFD: u64 = u64::MAX;

impl Poller {
    /// A poller of `eventfd` alone.
    ///
    /// # Errors
    /// [`Error::Os`] when there are too many open files, or the system lets nobody wait.
    pub fn new(eventfd: EventFd) -> Result<Self> {
        let epoll =
            epoll::create(epoll::CreateFlags::CLOEXEC).map_err(|errno| Error::os("epoll_create", errno))?;
        let data = epoll::EventData::new_u64(EVENTFD);
        epoll::add(&epoll, &eventfd, data, epoll::EventFlags::IN | epoll::EventFlags::ET)
            .map_err(|errno| Error::os("epoll_ctl", errno))?;
        let made = Self { epoll, eventfd };
        // A sandbox that refuses it should do so before a worker is started.
        made.ended()?;
        Ok(made)
    }

    /// The eventfd that ends a sleep.
    #[must_use]
    pub fn eventfd(&self) -> &EventFd {
        &self.eventfd
    }

    /// Watches the process of `pidfd` as `worker`.
    ///
    /// # Errors
    /// [`Error::Os`] when the system refuses.
    pub fn add(&self, worker: u32, pidfd: BorrowedFd<'_>) -> Result<()> {
        let data = epoll::EventData::new_u64(worker.into());
        epoll::add(&self.epoll, pidfd, data, epoll::EventFlags::IN)
            .map_err(|errno| Error::os("epoll_ctl", errno))
    }

    /// No longer watches `pidfd`: the end of its process has been noticed.
    pub fn remove(&self, pidfd: BorrowedFd<'_>) {
        let _ = epoll::delete(&self.epoll, pidfd);
    }

    /// Sleeps until a notification comes, a worker ends, a signal comes or the time is over. Returns the workers that
    /// ended.
    ///
    /// # Errors
    /// [`Error::Os`] when the system refuses.
    pub fn sleep(&self, limit: Duration) -> Result<Vec<u32>> {
        self.wait(limit).map(|(ended, _)| ended)
    }

    /// The workers that have ended, without sleeping and without taking a notification.
    ///
    /// # Errors
    /// [`Error::Os`] when the system refuses.
    pub fn ended(&self) -> Result<Vec<u32>> {
        let (ended, is_notified) = self.wait(Duration::ZERO)?;
        if is_notified {
            self.eventfd.notify();
        }
        Ok(ended)
    }

    fn wait(&self, limit: Duration) -> Result<(Vec<u32>, bool)> {
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; 16];
        let found = match epoll_wait(self.epoll.as_fd(), &mut events, limit) {
            Ok(found) => found,
            Err(Errno::INTR) => 0,
            Err(errno) => return Err(Error::os("epoll_wait", errno)),
        };
        let sources = events[..found].iter().map(|event| event.u64);
        let ended = sources.clone().filter(|&source| source != EVENTFD).map(u32_from).collect();
        Ok((ended, sources.clone().any(|source| source == EVENTFD)))
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::os::process::pidfd;

    #[test]
    fn a_notification_ends_one_sleep() {
        let poller = Poller::new(EventFd::new().unwrap()).unwrap();
        for _ in 0..3 {
            poller.eventfd().notify();
            poller.eventfd().notify();
            assert_eq!(poller.wait(Duration::from_secs(60)), Ok((vec![], true)));
            assert_eq!(poller.wait(Duration::ZERO), Ok((vec![], false)), "each notification was taken");
        }
    }

    #[test]
    fn asking_for_the_ended_leaves_the_notification_to_the_sleeper() {
        let poller = Poller::new(EventFd::new().unwrap()).unwrap();
        poller.eventfd().notify();
        assert_eq!(poller.ended(), Ok(vec![]));
        assert_eq!(poller.wait(Duration::ZERO), Ok((vec![], true)));
        assert_eq!(poller.ended(), Ok(vec![]));
        assert_eq!(poller.wait(Duration::ZERO), Ok((vec![], false)), "there was no other");
    }

    #[test]
    fn a_notification_ends_the_sleep_of_another_thread() {
        let poller = Poller::new(EventFd::new().unwrap()).unwrap();
        for _ in 0..100 {
            std::thread::scope(|scope| {
                let sleeper = scope.spawn(|| poller.wait(Duration::from_secs(60)));
                poller.eventfd().notify();
                // Either this call or the sleeper takes the notification. The sleeper is woken in both cases.
                assert_eq!(poller.ended(), Ok(vec![]));
                assert_eq!(sleeper.join().unwrap(), Ok((vec![], true)));
            });
            assert_eq!(poller.wait(Duration::ZERO), Ok((vec![], false)), "it was taken once");
        }
    }

    #[test]
    fn the_poller_names_the_worker_that_ended() {
        let poller = Poller::new(EventFd::new().unwrap()).unwrap();
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let handle = pidfd(child.id()).unwrap();
        poller.add(3, handle.as_fd()).unwrap();
        assert_eq!(poller.sleep(Duration::ZERO).unwrap(), []);
        child.kill().unwrap();
        assert_eq!(poller.sleep(Duration::from_secs(60)).unwrap(), [3]);
        assert_eq!(poller.ended().unwrap(), [3]);
        poller.remove(handle.as_fd());
        assert_eq!(poller.sleep(Duration::ZERO).unwrap(), []);
        child.wait().unwrap();
        poller.eventfd().notify();
        assert_eq!(poller.sleep(Duration::from_secs(60)).unwrap(), []);
    }
}
