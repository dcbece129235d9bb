//! Children that the parent forks while batches are held, taken and dropped: each has what it found, until it ends.
#![allow(unsafe_code, reason = "forks: what is under test is what a forked child has")]

use std::io::{PipeReader, PipeWriter, Read, pipe};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use ringloader_core::process;
use ringloader_core::sync::{AtomicBool, Ordering};

use super::content::{Profile, Random};
use super::parent::{Kept, PATIENCE, Parent, Seen, open_descriptors};
use super::storms::Effort;

const MIB: u64 = 1 << 20;

/// Batches that threads of the parent hold, and drop at any time.
type Held = Arc<Vec<Mutex<Option<Kept>>>>;

/// A child that is there.
struct Child {
    pid: libc::pid_t,
    /// When it is killed, if it has not ended before.
    until: Instant,
}

impl Child {
    /// Forks one that looks at all of `held` again and again, for `time`. Half of them leave that to a child of theirs.
    fn fork(held: &Held, time: Duration, random: &mut Random) -> Self {
        let (grandchild, killed) = (random.once_in(2), random.once_in(3));
        process::before_fork();
        // SAFETY: the child calls nothing but what is here: it reads memory, allocates (glibc's allocator may be used
        // after a fork), and ends by `_exit`.
        let pid = unsafe { libc::fork() };
        assert!(pid >= 0, "no fork");
        if pid == 0 {
            process::after_fork_in_child();
            // SAFETY: as above.
            if grandchild && unsafe { libc::fork() } > 0 {
                Self::exit(true);
            }
            Self::exit(look(held, time));
        }
        process::after_fork_in_parent();
        let until = Instant::now() + if killed { time / 2 } else { PATIENCE };
        Self { pid, until }
    }

    fn exit(right: bool) -> ! {
        // SAFETY: ends the process.
        unsafe { libc::_exit(i32::from(!right)) }
    }

    /// Returns true if the child has ended. Fails if it has not ended as it should.
    fn has_ended(&self) -> bool {
        if Instant::now() > self.until {
            // SAFETY: a child that was not waited for: the number is its own.
            unsafe { libc::kill(self.pid, libc::SIGKILL) };
        }
        let mut status = 0;
        // SAFETY: `status` is valid for the call.
        let ended = unsafe { libc::waitpid(self.pid, &raw mut status, libc::WNOHANG) } == self.pid;
        let killed = libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGKILL;
        assert!(!ended || status == 0 || killed, "a child found a batch changed: status {status:x}");
        ended
    }
}

/// In a child: returns true if what the child has stays as it was. At the fork, the child takes the last reference to
/// it.
fn look(held: &Held, time: Duration) -> bool {
    // A lock that another thread had at the fork stays locked: that thread was about to drop the batch.
    let found: Vec<_> = held.iter().filter_map(|place| place.try_lock().ok()?.take()).collect();
    let end = Instant::now() + time;
    let right = catch_unwind(AssertUnwindSafe(|| {
        while Instant::now() < end {
            found.iter().for_each(Kept::check);
            thread::sleep(Duration::from_millis(1));
        }
    }));
    right.is_ok()
}

/// Forks while another thread asks which process this is: the child asks too, and waits for no lock of that thread.
fn ask_after_forks() {
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                let _ = process::current();
            }
        });
        let ended_well = (0..300).all(|_| {
            // SAFETY: the child asks which process it is, which allocates, and ends; it is killed where it waits.
            let pid = unsafe { libc::fork() };
            if pid == 0 {
                // SAFETY: as above.
                unsafe { libc::alarm(5) };
                Child::exit(process::current().is_current());
            }
            let mut status = 0;
            // SAFETY: `status` is valid for the call.
            let ended = unsafe { libc::waitpid(pid, &raw mut status, 0) };
            (ended, status) == (pid, 0)
        });
        is_over.store(true, Ordering::Relaxed);
        assert!(ended_well, "a child waits for a thread of its parent's");
    });
}

/// Forks all the time, while other threads drop what they hold, over several epochs.
pub(crate) fn forks(effort: Effort) -> Seen {
    ask_after_forks();
    let mut seen = Seen::default();
    let end = Instant::now() + effort.time;
    let mut round = 0;
    while round < 2 || Instant::now() < end {
        round += 1;
        for leaf in [60 << 10, 900 << 10] {
            seen += storm(Profile { seed: effort.seed ^ round, leaves: 2, leaf }, Duration::from_millis(300));
        }
    }
    seen
}

fn storm(profile: Profile, time: Duration) -> Seen {
    let before = open_descriptors();
    let mut random = Random(profile.seed);
    let mut parent = Parent::with_workers(2, 6, 2 * MIB, profile);
    let held: Held = Arc::new((0..6).map(|_| Mutex::new(None)).collect());
    let (mut children, mut forked) = (Vec::<Child>::new(), 0);
    // Each child has the writing end, and each of its own.
    let alive = pipe().unwrap();
    for _ in 0..3 {
        let end = Instant::now() + time / 3;
        thread::scope(|scope| {
            for thread in 0..2 {
                let (held, mut random) = (held.clone(), Random(random.next() ^ thread));
                scope.spawn(move || {
                    while Instant::now() < end {
                        let place = &held[random.below(held.len() as u64) as usize];
                        // Dropped behind the lock, as an object without a reference.
                        let batch = place.lock().unwrap().take();
                        drop(batch);
                        thread::sleep(Duration::from_micros(random.magnitude(2000)));
                    }
                });
            }
            while Instant::now() < end {
                parent.pump(Duration::from_millis(2), |batch, leased| {
                    let place = &held[random.below(held.len() as u64) as usize];
                    let old = if leased { place.lock().unwrap().replace(batch) } else { None };
                    drop(old);
                });
                children.retain(|child| !child.has_ended());
                if children.len() < 6 {
                    let time = Duration::from_micros(random.magnitude(40_000));
                    children.push(Child::fork(&held, time, &mut random));
                    forked += 1;
                }
            }
        });
        parent.end_workers(false);
        parent = parent.next_epoch_after(|| {
            children.extend((0..3).map(|_| Child::fork(&held, Duration::from_millis(60), &mut random)));
        });
    }
    held.iter().for_each(|place| drop(place.lock().unwrap().take()));
    wait_for(&mut children, alive);
    assert!(forked > 5, "{forked} forks");
    let seen = parent.finish();
    assert_eq!(open_descriptors(), before, "descriptors are left");
    seen
}

/// Until all of them, and theirs, have ended, and what was kept for them has come back.
fn wait_for(children: &mut Vec<Child>, (mut reading, writing): (PipeReader, PipeWriter)) {
    let start = Instant::now();
    drop(writing);
    assert_eq!(reading.read(&mut [0]).unwrap(), 0, "no process writes");
    while !children.is_empty() || process::current().retains_anything() {
        children.retain(|child| !child.has_ended());
        process::current().look();
        thread::sleep(Duration::from_millis(1));
        assert!(start.elapsed() < PATIENCE, "something is kept for children that have gone");
    }
}

/// Does what [`forks`] does, while the parent rests at a moment between two stores.
#[cfg(ringloader_failpoints)]
pub(crate) fn slow_forks(effort: Effort) -> Seen {
    let mut seen = Seen::default();
    for point in ["fork-begun", "fork-happened", "given-back"] {
        ringloader_core::testing::failpoint::select(&format!("{point}:500"));
        let profile = Profile { seed: effort.seed, leaves: 2, leaf: 60 << 10 };
        seen += storm(profile, Duration::from_millis(600));
        println!("point {point}");
    }
    ringloader_core::testing::failpoint::select("");
    seen
}
