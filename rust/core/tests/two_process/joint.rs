//! Processes that make batches together and are killed at any moment: each batch comes once, of all its samples.

use std::os::fd::AsFd;
#[cfg(ringloader_failpoints)]
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, Instant};

use ringloader_core::joint::{Batch, JointPlan, MOST_RUNS, Part, WORDS};
use ringloader_core::os::word_file::WordFile;
use ringloader_core::sync::AtomicU64;

use super::content::Random;
use super::parent::{PATIENCE, Seen};
use super::storms::Effort;
use super::worker;

/// The first word of a worker's orders.
pub(crate) const NAME: &str = "joint";

const PLACES: usize = 3;
const WORKERS: u32 = 3;
/// Words of a place: the batch, its parts, and its result with the number of its task.
const OF_PLACE: usize = WORDS + MOST_RUNS as usize + 2;

/// What stands for a sample.
fn sample(seq: u64, number: u64) -> u64 {
    (seq + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(number as u32 % 64) ^ number
}

/// Makes samples `from..to`, in a time that differs.
fn made(seq: u64, from: u64, to: u64) -> u64 {
    (from..to).fold(0, |sum, number| {
        if (seq + number).is_multiple_of(5) {
            thread::sleep(Duration::from_micros(20));
        }
        sum ^ sample(seq, number)
    })
}

struct Memory(WordFile);

impl Memory {
    fn batch(&self, place: usize) -> &Batch {
        Batch::over(&self.0.words()[place * OF_PLACE..])
    }

    fn part(&self, place: usize, run: u32) -> &AtomicU64 {
        &self.0.words()[place * OF_PLACE + WORDS + run as usize]
    }

    /// The result of a place, and the number of its task, plus one.
    fn result(&self, place: usize) -> [&AtomicU64; 2] {
        [0, 1].map(|at| self.part(place, MOST_RUNS + at))
    }
}

/// Makes runs and collates, until it is killed.
pub(crate) fn work(orders: &str) {
    let number = orders.split(' ').nth(1).unwrap().parse().unwrap();
    let fd = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
    let memory = Memory(WordFile::map(fd, PLACES * OF_PLACE, false).unwrap());
    loop {
        let open = (0..PLACES).filter(|&place| memory.batch(place).is_open());
        let Some(place) = open.min_by_key(|&place| memory.batch(place).seq()) else {
            thread::sleep(Duration::from_micros(50));
            continue;
        };
        let batch = memory.batch(place);
        let Some(claim) = batch.claim(number, |_| true) else { continue };
        let plan = batch.plan();
        if let Some(run) = claim.run {
            let from = u64::from(run) * plan.per_run;
            let part = made(plan.seq, from, (from + plan.per_run).min(plan.samples));
            memory.part(place, run).store(part, Ordering::Relaxed);
            if !batch.finish(claim, Part::Bytes { offset: run.into(), len: 1 }) {
                continue;
            }
        }
        let parts = (0..plan.runs()).map(|run| match batch.part(run) {
            Some(Part::Bytes { offset, len: 1 }) => memory.part(place, offset as u32).load(Ordering::Relaxed),
            part => panic!("{part:?} of a batch that is to be collated"),
        });
        let [result, seq] = memory.result(place);
        result.store(parts.fold(0, |sum, part| sum ^ part), Ordering::Relaxed);
        seq.store(plan.seq + 1, Ordering::Release);
        batch.note_sent(claim);
    }
}

/// The main process, with its workers.
struct Parent {
    memory: Memory,
    workers: Vec<Child>,
    random: Random,
    next: u64,
    seen: Seen,
}

impl Parent {
    fn new(seed: u64) -> Self {
        let memory = Memory(WordFile::in_memory("ringloader-storm", PLACES * OF_PLACE, false).unwrap());
        let mut parent =
            Self { memory, workers: Vec::new(), random: Random(seed), next: 0, seen: Seen::default() };
        (0..PLACES).for_each(|place| parent.lay_out(place));
        parent
    }

    fn lay_out(&mut self, place: usize) {
        let samples = 1 + self.random.below(100);
        let least = samples.div_ceil(MOST_RUNS.into());
        let per_run = least + self.random.below(samples);
        let plan = JointPlan { seq: self.next, samples, per_run, kind: 0, len: 0, window: 0 };
        self.memory.batch(place).lay_out(&plan, 0);
        self.next += 1;
    }

    fn start(&self, worker: u32, failpoint: Option<&str>) -> Child {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.env(worker::ORDERS, format!("{NAME} {worker}")).env_remove("RINGLOADER_FAILPOINT");
        command.envs(failpoint.map(|failpoint| ("RINGLOADER_FAILPOINT", failpoint)));
        command.stdin(Stdio::from(self.memory.0.fd().unwrap().try_clone_to_owned().unwrap()));
        command.spawn().unwrap()
    }

    /// Takes all results that are there, and lays out others.
    fn take(&mut self) {
        for place in 0..PLACES {
            let [result, seq] = self.memory.result(place);
            let plan = self.memory.batch(place).plan();
            let is_left = self.memory.batch(place).is_left();
            let is_there = seq.load(Ordering::Acquire) == plan.seq + 1;
            assert!(is_left || is_there, "a batch is not left, and not there");
            if is_there {
                let expected = (0..plan.samples).fold(0, |sum, number| sum ^ sample(plan.seq, number));
                assert_eq!(result.load(Ordering::Relaxed), expected, "a batch is wrong");
                self.memory.batch(place).close();
                self.seen.batches += 1;
                self.lay_out(place);
            }
        }
    }

    /// Waits for more batches.
    fn take_more(&mut self, batches: u64) {
        let (until, begun) = (self.seen.batches + batches, Instant::now());
        while self.seen.batches < until {
            self.take();
            assert!(begun.elapsed() < PATIENCE / 4, "a batch does not come");
            thread::sleep(Duration::from_micros(20));
        }
    }

    /// Puts another worker in the place of one that has ended.
    fn replace(&mut self, worker: u32, failpoint: Option<&str>) {
        self.seen.kills += 1;
        self.take();
        (0..PLACES).for_each(|place| self.memory.batch(place).lose(worker));
        self.workers[worker as usize] = self.start(worker, failpoint);
    }

    fn finish(mut self) -> Seen {
        self.take_more(2 * PLACES as u64);
        for worker in &mut self.workers {
            assert!(worker.try_wait().unwrap().is_none(), "a worker has ended that was not killed");
        }
        self.seen
    }
}

impl Drop for Parent {
    fn drop(&mut self) {
        for worker in &mut self.workers {
            let _ = worker.kill();
            let _ = worker.wait();
        }
    }
}

/// Kills one of three workers again and again.
pub(crate) fn kills(effort: Effort) -> Seen {
    let mut parent = Parent::new(effort.seed);
    parent.workers = (0..WORKERS).map(|worker| parent.start(worker, None)).collect();
    let end = Instant::now() + effort.time;
    while Instant::now() < end || parent.seen.kills < 3 {
        let pause = parent.random.below(20);
        parent.take_more(pause);
        let victim = parent.random.below(WORKERS.into()) as u32;
        parent.workers[victim as usize].kill().unwrap();
        parent.workers[victim as usize].wait().unwrap();
        parent.replace(victim, None);
    }
    parent.finish()
}

/// A worker dies at each of its moments, beside two others, and so does its successor.
#[cfg(ringloader_failpoints)]
pub(crate) fn deaths(effort: Effort) -> Seen {
    let mut seen = Seen::default();
    for point in ["joint-claimed", "joint-written", "joint-made", "joint-collates", "joint-committed"] {
        for nth in [1, 2, 9] {
            let mut parent = Parent::new(effort.seed + nth);
            let failpoint = format!("{point}:kill:{nth}");
            // The others begin once the first has died: it meets each moment.
            parent.workers.push(parent.start(0, Some(&failpoint)));
            for successor in [Some(&*failpoint), None] {
                let begun = Instant::now();
                let ended = loop {
                    parent.take();
                    if let Some(ended) = parent.workers[0].try_wait().unwrap() {
                        break ended;
                    }
                    assert!(begun.elapsed() < PATIENCE, "{point} was not reached");
                    thread::sleep(Duration::from_micros(50));
                };
                assert_eq!(ended.signal(), Some(9), "{point}");
                parent.replace(0, successor);
            }
            (1..WORKERS).for_each(|worker| parent.workers.push(parent.start(worker, None)));
            parent.take_more(20);
            seen += parent.finish();
        }
        println!("point {point}");
    }
    seen
}
