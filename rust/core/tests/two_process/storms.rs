//! Runs of random length, size and holding, without and with SIGKILL.

use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Signal, kill_process};

use super::content::{Profile, Random};
use super::keeper::Keepers;
use super::parent::{Kept, Parent, Seen};

const MIB: u64 = 1 << 20;

/// The time of a run, and the seed of its random numbers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Effort {
    pub(crate) time: Duration,
    pub(crate) seed: u64,
}

/// Small batches, dropped at once.
pub(crate) fn plain(effort: Effort) -> Seen {
    let profile = Profile { seed: effort.seed, leaves: 5, leaf: 8 << 10 };
    let mut parent = Parent::with_workers(2, 8, 4 * MIB, profile);
    parent.pump(effort.time, |batch, leased| {
        assert!(leased);
        drop(batch);
    });
    let seen = parent.finish();
    assert!(seen.batches > 100 && seen.oversize == 0 && seen.in_place > 0, "{seen:?}");
    seen
}

/// Batches around half a share, above which they travel in a segment of their own.
pub(crate) fn oversize(effort: Effort) -> Seen {
    let profile = Profile { seed: effort.seed, leaves: 3, leaf: 3 * MIB };
    let mut parent = Parent::with_workers(2, 4, 2 * MIB, profile);
    let mut keepers = Keepers::new(effort.seed, Duration::from_millis(20));
    parent.pump(effort.time, |batch, leased| keepers.keep(batch, leased));
    keepers.finish();
    let seen = parent.finish();
    assert!(seen.oversize > 10 && seen.oversize < seen.batches && seen.in_place > 0, "{seen:?}");
    seen
}

/// A share that a few batches exhaust, and a parent that lets them lie: workers wait for room, and
/// free slots lose their pages to others.
pub(crate) fn no_room(effort: Effort) -> Seen {
    let profile = Profile { seed: effort.seed, leaves: 2, leaf: 200 << 10 };
    let mut parent = Parent::with_workers(2, 12, MIB / 2, profile);
    let mut random = Random(effort.seed);
    parent.pump(effort.time, |batch, _| {
        drop(batch);
        if random.once_in(8) {
            thread::sleep(Duration::from_millis(2));
        }
    });
    let seen = parent.finish();
    assert!(seen.waits > 0 && seen.shrunk > 0, "{seen:?}");
    seen
}

/// A user that keeps more than half of what there is.
pub(crate) fn hoard(effort: Effort) -> Seen {
    let profile = Profile { seed: effort.seed, leaves: 3, leaf: 100 << 10 };
    let mut parent = Parent::with_workers(2, 8, MIB, profile);
    let mut hoard: Vec<Kept> = Vec::new();
    let mut keepers = Keepers::new(effort.seed, Duration::from_millis(50));
    let mut random = Random(effort.seed);
    parent.pump(effort.time, |batch, leased| {
        if leased && random.once_in(20) {
            hoard.push(batch);
        } else {
            keepers.keep(batch, leased);
        }
        if hoard.len() > 300 {
            hoard.drain(..).for_each(|batch| batch.check());
        }
    });
    keepers.finish();
    hoard.drain(..).for_each(|batch| batch.check());
    let seen = parent.finish();
    assert!(seen.refused > 0 && seen.refused < seen.batches, "{seen:?}");
    seen
}

/// Workers that are killed at any time, each with a successor, while batches of all sizes are kept.
pub(crate) fn kills(effort: Effort) -> Seen {
    let end = Instant::now() + effort.time;
    let mut random = Random(effort.seed);
    let mut seen = Seen::default();
    while Instant::now() < end {
        // Another transport every second or so: its end is what checks that nothing was lost.
        let until = end.min(Instant::now() + Duration::from_secs(1));
        let leaf = [500, 20 << 10, 400 << 10][random.below(3) as usize];
        let profile = Profile { seed: random.next(), leaves: 4, leaf };
        let mut parent = Parent::with_workers(2, 6, MIB, profile);
        let mut keepers = Keepers::new(random.next(), Duration::from_millis(30));
        while Instant::now() < until {
            let worker = random.below(2) as u32;
            let (pid, delay) = (parent.pid(worker), Duration::from_micros(random.magnitude(10_000)));
            let killer = thread::spawn(move || {
                thread::sleep(delay);
                kill_process(pid, Signal::KILL).unwrap();
            });
            let stop = Instant::now() + delay;
            while Instant::now() < stop {
                parent.top_up();
                match parent.take() {
                    Some((batch, leased)) => keepers.keep(batch, leased),
                    None => parent.engine.wait_for(None, Duration::from_millis(1)).unwrap(),
                }
            }
            parent.pump_to_kill(worker, |batch, leased| keepers.keep(batch, leased));
            killer.join().unwrap();
            parent.succeed(worker, None);
        }
        parent.pump(Duration::from_millis(50), |batch, leased| keepers.keep(batch, leased));
        keepers.finish();
        seen += parent.finish();
    }
    assert!(seen.kills > 10 && seen.batches > seen.kills, "{seen:?}");
    seen
}

/// Workers that end with their epoch, and others that go on in their slots, while batches of all epochs are kept.
pub(crate) fn epochs(effort: Effort) -> Seen {
    let profile = Profile { seed: effort.seed, leaves: 3, leaf: 60 << 10 };
    let mut parent = Parent::with_workers(2, 8, 2 * MIB, profile);
    let mut keepers = Keepers::new(effort.seed, Duration::from_millis(50));
    let (end, mut epochs) = (Instant::now() + effort.time, 0);
    while epochs < 4 || Instant::now() < end {
        parent.pump(Duration::from_millis(40), |batch, leased| keepers.keep(batch, leased));
        parent.end_workers(false);
        parent = parent.next_epoch();
        epochs += 1;
    }
    keepers.finish();
    let seen = parent.finish();
    assert!(seen.batches > 4 * epochs, "{epochs} epochs, {seen:?}");
    seen
}

/// Batches that are kept over the end of their workers, of the transport, and of its owner.
pub(crate) fn kept_over_the_end(effort: Effort) -> Seen {
    let profile = Profile { seed: effort.seed, leaves: 3, leaf: 60 << 10 };
    let descriptors = super::parent::open_descriptors();
    let mut parent = Parent::with_workers(2, 8, 2 * MIB, profile);
    let mut kept = Vec::new();
    parent.pump(effort.time.min(Duration::from_millis(300)), |batch, leased| {
        if leased && kept.len() < 8 {
            kept.push(batch);
        }
    });
    parent.end_workers(false);
    parent.engine.close();
    assert_eq!(kept.len(), 8);
    kept.iter().for_each(Kept::check);
    for batch in kept.drain(..4) {
        thread::spawn(move || drop(batch)).join().unwrap();
    }
    kept.iter().for_each(Kept::check);
    let seen = parent.seen;
    kept.clear();
    parent.check_empty();
    drop(parent);
    assert_eq!(super::parent::open_descriptors(), descriptors, "descriptors are left");
    seen
}
