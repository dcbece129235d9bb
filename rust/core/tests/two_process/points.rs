//! Death, or a long pause, at each named moment between two stores, and what it must leave behind.

use std::thread;
use std::time::{Duration, Instant};

use ringloader_core::Result;
use ringloader_core::pool::Leases;
use ringloader_core::sync::Ordering;
use ringloader_core::testing::failpoint::select;
use ringloader_core::transport::engine::Engine;
use ringloader_core::transport::received::Received;
use ringloader_core::transport::{Transport, WorkerView};

use super::content::Profile;
use super::keeper::Keepers;
use super::parent::{Kept, PATIENCE, Parent, Seen};
use super::storms::Effort;

/// Small shares and large leaves: growth, punching and segments of their own happen all the time.
pub(crate) const SHARE: u64 = 512 << 10;
pub(crate) const LEAF: u64 = 200 << 10;
const MAX_TASKS: u32 = 6;

/// Checks what the parent finds after the death, before anything is repaired. Takes the parent, the number of batches
/// that it got of this worker, and the number of the time (from 1) at which the worker died when it came to the point.
pub(crate) type Outcome = fn(&Parent, u64, u64);

/// The moments of a worker, and what its death there leaves behind.
pub(crate) const DEATHS: &[(&str, Outcome)] = &[
    // The bits are lost: slots with memory that are not held, and no bit says that they are free.
    ("free-swapped", |parent, _, _| {
        let slots = view(parent).slots;
        let returned = slots.free[0].load(Ordering::Relaxed);
        let lost = (0..64).filter(|&slot| {
            slots.holds[slot].load(Ordering::Relaxed) == 0
                && slots.touched()[slot].load(Ordering::Relaxed) > 0
                && returned & (1 << slot) == 0
        });
        assert!(lost.count() > 0, "the swap has taken the bits");
    }),
    // An over-count, of one slot or of the sum.
    ("resident-stored", |parent, _, _| {
        let slots = view(parent).slots;
        assert_ne!(slots.resident.load(Ordering::Relaxed), touched(parent), "died between the two stores");
    }),
    ("touched-stored", |parent, _, _| {
        assert_eq!(view(parent).slots.resident.load(Ordering::Relaxed), touched(parent));
    }),
    ("punched", |parent, _, _| {
        assert_eq!(view(parent).slots.resident.load(Ordering::Relaxed), touched(parent));
    }),
    // Garbage in a slot that was never told of.
    ("chunk-taken", |_, _, _| {}),
    ("filled", |_, batches, nth| assert_eq!(batches, nth - 1)),
    // A descriptor in the socket for which no batch will come.
    ("segment-sent", |_, _, _| {}),
    // Nothing visible; then the whole batch, also where no bit and no notification says so.
    ("words-stored", |_, batches, nth| assert_eq!(batches, nth - 1)),
    ("tail-stored", |_, batches, nth| assert_eq!(batches, nth, "a whole batch was not handed out")),
    ("ready-set", |_, batches, nth| assert_eq!(batches, nth)),
    ("flag-taken", |_, batches, nth| assert!(batches >= nth)),
    // The task is still in the ring; no process has it.
    ("task-taken", |parent, batches, nth| {
        assert_eq!(batches, nth - 1);
        assert_eq!(view(parent).tasks.len().unwrap(), parent.outstanding(0) as u64);
    }),
    ("task-handed-back", |parent, batches, nth| {
        assert_eq!(batches, nth - 1);
        assert_eq!(view(parent).tasks.len().unwrap() + 1, parent.outstanding(0) as u64);
    }),
];

/// The moment of a successor before it serves.
const SUCCESSION: &str = "take-over-swapped";

/// A worker dies at each of its moments, the first time, the second and later.
pub(crate) fn deaths(effort: Effort) -> Seen {
    let mut seen = Seen::default();
    let mut profile = profiles(effort.seed);
    for (point, outcome) in DEATHS {
        for nth in [1, 2, 9] {
            seen += death(point, nth, *outcome, profile());
        }
        println!("point {point}");
    }
    seen += death_in_succession(profile());
    println!("point {SUCCESSION}");
    seen
}

fn profiles(mut seed: u64) -> impl FnMut() -> Profile {
    move || {
        seed += 1;
        Profile { seed, leaves: 3, leaf: LEAF }
    }
}

fn death(point: &str, nth: u64, outcome: Outcome, profile: Profile) -> Seen {
    let mut parent = Parent::new(1, MAX_TASKS, SHARE, profile);
    parent.start(0, None, Some(&format!("{point}:kill:{nth}")));
    let mut batches = 0;
    parent.pump_to_kill(0, |batch, _| {
        drop(batch);
        batches += 1;
    });
    outcome(&parent, batches, nth);
    parent.succeed(0, None);
    // One round of filling has repaired the sums.
    let mut keepers = Keepers::new(profile.seed, Duration::from_millis(5));
    parent.pump(Duration::from_millis(60), |batch, leased| keepers.keep(batch, leased));
    keepers.finish();
    parent.finish()
}

fn death_in_succession(profile: Profile) -> Seen {
    let mut parent = Parent::with_workers(1, MAX_TASKS, SHARE, profile);
    let mut kept: Vec<Kept> = Vec::new();
    parent.pump(Duration::from_millis(30), |batch, leased| {
        if leased && kept.len() < 3 {
            kept.push(batch);
        }
    });
    rustix::process::kill_process(parent.pid(0), rustix::process::Signal::KILL).unwrap();
    parent.pump_to_kill(0, |_, _| {});
    // Each successor dies as it swaps; what is held stays held.
    for _ in 0..3 {
        parent.succeed(0, Some(&format!("{SUCCESSION}:kill")));
        parent.pump_to_kill(0, |_, _| panic!("a batch of a worker that never served"));
    }
    parent.succeed(0, None);
    parent.pump(Duration::from_millis(30), |_, _| {});
    kept.drain(..).for_each(|batch| batch.check());
    parent.finish()
}

/// A release that rests between its two stores while its slot comes round again: filled, taken, held.
/// The worker dies, and another: neither successor gets the slot while it is held, and all slots in the end.
pub(crate) fn slow_release(effort: Effort) -> Seen {
    let profile = small(effort);
    let mut parent = Parent::with_workers(1, MAX_TASKS, SHARE, profile);
    let first = next(&mut parent);
    let slot = first.address();
    rest(&parent);
    select("returned-held:400000:1");
    println!("point returned-held");
    let releaser = thread::spawn(move || drop(first));
    until(|| view(&parent).slots.free[0].load(Ordering::Relaxed) != 0);
    // Keeps all that comes, until the slot has come round.
    let mut kept = vec![next(&mut parent)];
    while kept.last().is_none_or(|batch| batch.address() != slot) {
        assert!(!releaser.is_finished(), "the slot did not come round within the pause");
        kept.push(next(&mut parent));
    }
    releaser.join().unwrap();
    let held: u32 = view(&parent).slots.holds.iter().map(|holds| holds.load(Ordering::Relaxed)).sum();
    assert_eq!(held as usize, kept.len(), "a hold is lost");
    for _ in 0..2 {
        rustix::process::kill_process(parent.pid(0), rustix::process::Signal::KILL).unwrap();
        parent.pump_to_kill(0, |_, _| {});
        parent.succeed(0, None);
        parent.pump(Duration::from_millis(30), |_, _| {});
        kept.iter().for_each(Kept::check);
    }
    kept.clear();
    parent.finish()
}

/// A release that rests over a death and the take-over after it: the successor must not be told again,
/// later, that the slot is free.
pub(crate) fn slow_release_over_a_death(effort: Effort) -> Seen {
    let profile = small(effort);
    let mut parent = Parent::with_workers(1, MAX_TASKS, SHARE, profile);
    let first = next(&mut parent);
    rest(&parent);
    // The slot comes round with the successor only.
    parent.kill_untaken(0);
    select("returned-held:400000:1");
    println!("point returned-held");
    let releaser = thread::spawn(move || drop(first));
    // No one else holds or sweeps: its first store, whichever that is, shows.
    until(|| {
        view(&parent).slots.free[0].load(Ordering::Relaxed) != 0 || Leases::busy(view(&parent).slots) == [0]
    });
    let mut kept = Vec::new();
    while parent.engine.committed().unwrap() > 0 {
        kept.extend(parent.take().map(|(batch, _)| batch));
    }
    parent.note_death(0);
    parent.succeed(0, None);
    for _ in 0..20 {
        kept.push(next(&mut parent));
    }
    assert!(!releaser.is_finished(), "the take-over did not happen within the pause");
    releaser.join().unwrap();
    parent.pump(Duration::from_millis(30), |_, _| {});
    kept.iter().for_each(Kept::check);
    kept.clear();
    parent.finish()
}

/// A release that rests between its two stores, as in [`slow_release`], while the worker dies with the bit: the slot is
/// unused until the take-over after next.
pub(crate) fn slow_release_of_a_lost_bit(effort: Effort) -> Seen {
    let profile = small(effort);
    let mut parent = Parent::new(1, MAX_TASKS, SHARE, profile);
    parent.start(0, None, Some("free-swapped:kill:1"));
    let first = next(&mut parent);
    select("returned-held:400000:1");
    println!("point returned-held");
    let releaser = thread::spawn(move || drop(first));
    let mut kept = Vec::new();
    // A batch that was copied has no slot.
    parent.pump_to_kill(0, |batch, leased| kept.extend(leased.then_some(batch)));
    assert!(!releaser.is_finished(), "the worker did not die within the pause");
    let slots = parent.engine.control().geometry().slots - u32::try_from(kept.len()).unwrap();
    assert_eq!(parent.count_slots(0), slots - 1, "the slot between the two stores is not free");
    releaser.join().unwrap();
    assert_eq!(parent.count_slots(0), slots, "it is free at the next take-over");
    parent.seen
}

/// Another thread closes while this one has taken a descriptor and not yet raised its hold.
pub(crate) fn close_during_drain(effort: Effort) -> Seen {
    close_during(effort, Engine::try_next)
}

/// Does what [`close_during_drain`] does, while the parent takes results in order.
pub(crate) fn close_during_drain_in_order(effort: Effort) -> Seen {
    close_during(effort, |engine| engine.try_next_of(0))
}

fn close_during(effort: Effort, take: fn(&Engine) -> Result<Option<Received>>) -> Seen {
    let profile = small(effort);
    let mut parent = Parent::with_workers(1, MAX_TASKS, SHARE, profile);
    parent.top_up();
    let start = Instant::now();
    while parent.engine.committed().unwrap() < u64::from(MAX_TASKS) {
        thread::sleep(Duration::from_millis(1));
        assert!(start.elapsed() < PATIENCE);
    }
    parent.kill_untaken(0);
    select("drained-unheld:100000:1");
    let taken = thread::scope(|scope| {
        let engine = &parent.engine;
        scope.spawn(|| {
            thread::sleep(Duration::from_millis(30));
            engine.close();
        });
        take(engine).unwrap()
    });
    select("");
    let (batch, _) = parent.receive(taken.expect("a batch was committed"));
    println!("point drained-unheld");
    batch.check();
    assert!(take(&parent.engine).unwrap().is_none(), "nothing is handed out after closing");
    drop(batch);
    parent.check_empty();
    parent.seen
}

fn small(effort: Effort) -> Profile {
    Profile { seed: effort.seed, leaves: 1, leaf: 1000 }
}

fn next(parent: &mut Parent) -> Kept {
    let start = Instant::now();
    loop {
        parent.top_up();
        match parent.take() {
            Some((batch, leased)) => {
                assert!(leased, "the user may keep half the slots");
                return batch;
            }
            None => parent.engine.wait_for(None, Duration::from_millis(20)).unwrap(),
        }
        assert!(start.elapsed() < PATIENCE);
    }
}

/// Waits until the worker has answered all of its tasks: it takes no slot until it gets the next.
fn rest(parent: &Parent) {
    until(|| parent.engine.committed().unwrap() == u64::from(MAX_TASKS) - 1);
}

fn until(is_so: impl Fn() -> bool) {
    let start = Instant::now();
    while !is_so() {
        thread::sleep(Duration::from_micros(100));
        assert!(start.elapsed() < PATIENCE);
    }
}

fn view(parent: &Parent) -> &WorkerView<'_> {
    parent.engine.control().worker(0)
}

/// The sum that a successor starts from.
fn touched(parent: &Parent) -> u64 {
    view(parent).slots.touched().iter().map(|touched| touched.load(Ordering::Relaxed)).sum()
}
