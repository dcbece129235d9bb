//! The scheduler over worker processes that are killed: what the scheduler hands out, and when it says that a
//! worker is lost.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::process::Child;
use std::sync::mpsc::channel;
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use ringloader_core::os::process::pidfd;
use ringloader_core::plan::ResultOrder;
use ringloader_core::ring::Producer;
use ringloader_core::scheduler::{EPOCH_SHIFT, Poll, Scheduler};
use ringloader_core::transport::engine::Engine;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, Signal, kill_process};

use super::content::{Profile, Random};
use super::parent::{PATIENCE, Seen, check, open_descriptors, start};
use super::storms::Effort;

/// In order twice: there one worker can be in the way of another.
const ORDERS: [ResultOrder; 4] = [
    ResultOrder::InOrder,
    ResultOrder::InOrder,
    ResultOrder::AsCompleted,
    ResultOrder::AsCompletedRoundRobin,
];

/// The latest that a parent with nothing else to do may learn of a death.
const NOTICE: Duration = Duration::from_millis(100);
/// The time for which a stopped worker keeps the parent waiting. A delay of less than that, and of more than `NOTICE`,
/// is another process that had the processor.
const STOPPED: Duration = Duration::from_millis(300);

/// One worker, as its parent sees it.
struct Peer {
    child: Child,
    /// When its process ended, and the thread that looks.
    death: Arc<OnceLock<Instant>>,
    looks: Option<JoinHandle<()>>,
    /// The number of tasks that it was sent in epochs before.
    before: u64,
    /// The number of tasks of this epoch that it has answered.
    answered: u64,
    /// Tasks of this epoch that it has not answered.
    open: VecDeque<u64>,
    /// Since when this worker owes the result that is its next.
    owes_since: Instant,
    /// The time for which the parent has slept although this worker had ended and nothing of it was to come.
    overdue: Duration,
    lost: bool,
}

struct Scheduled {
    engine: Engine,
    scheduler: Scheduler<u64>,
    order: ResultOrder,
    profile: Profile,
    peers: Vec<Peer>,
    epoch: u64,
    /// Batches that the epoch still has.
    left: u64,
    /// In order: what comes next, or later.
    handed_out: u64,
    seen: Seen,
    /// The time for which the news of each lost worker was overdue.
    notices: Vec<Duration>,
}

/// The outcome of `next`.
#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    Batch,
    End,
    Lost(u32),
}

impl Scheduled {
    fn new(workers: u32, prefetch_factor: u32, order: ResultOrder, share: u64, profile: Profile) -> Self {
        Self {
            engine: Engine::new(workers, workers * prefetch_factor, share).unwrap(),
            scheduler: Scheduler::new(workers, prefetch_factor, order),
            order,
            profile,
            peers: Vec::new(),
            epoch: 0,
            left: 0,
            handed_out: 0,
            seen: Seen::default(),
            notices: Vec::new(),
        }
    }

    /// Starts the next worker, with a moment at which it is to die.
    fn start(&mut self, failpoint: Option<&str>) {
        let child = start(&self.engine, self.peers.len() as u32, None, failpoint);
        let handle = pidfd(child.id()).unwrap();
        let death = Arc::new(OnceLock::new());
        let looks = thread::spawn({
            let death = death.clone();
            move || death.set(end_of(&handle)).unwrap()
        });
        self.peers.push(Peer {
            child,
            death,
            looks: Some(looks),
            before: 0,
            answered: 0,
            open: VecDeque::new(),
            owes_since: Instant::now(),
            overdue: Duration::ZERO,
            lost: false,
        });
    }

    fn pid(&self, worker: u32) -> Pid {
        Pid::from_child(&self.peers[worker as usize].child)
    }

    /// Begins an epoch, also in the middle of one.
    fn begin(&mut self, batches: u64, first: bool) {
        if !first {
            self.scheduler.reset();
            self.epoch += 1;
        }
        for peer in &mut self.peers {
            peer.before += peer.answered + peer.open.len() as u64;
            peer.answered = 0;
            peer.open.clear();
            peer.lost = false;
            peer.overdue = Duration::ZERO;
        }
        self.left = batches;
        while !self.scheduler.is_full() && self.send() {}
    }

    fn send(&mut self) -> bool {
        if self.left == 0 {
            return false;
        }
        self.left -= 1;
        let seq = (self.epoch << EPOCH_SHIFT) | self.scheduler.positions().0;
        let task = self.profile.task(seq);
        let Some(worker) = self.scheduler.send(&self.engine, (task.kind, task.bytes)).unwrap() else {
            assert!(self.peers.iter().all(|peer| peer.lost), "a worker is there, and none was asked");
            return false;
        };
        let peer = &mut self.peers[worker as usize];
        assert!(!peer.lost, "a worker is asked that is lost");
        if peer.open.is_empty() {
            peer.owes_since = Instant::now();
        }
        peer.open.push_back(seq);
        true
    }

    /// The next batch, checked.
    fn next(&mut self) -> Outcome {
        let start = Instant::now();
        loop {
            match self.scheduler.poll(Some(&self.engine)).unwrap() {
                Poll::Failed { seq, error } => panic!("task {seq}: {error}"),
                Poll::Early { seq, .. } => panic!("task {seq} of an epoch that was not begun"),
                Poll::End => {
                    let open = |peer: &Peer| !peer.lost && !peer.open.is_empty();
                    // Torch sends a task for each batch, and so does this: with a lost worker's tasks, those that would
                    // follow them are lost.
                    assert!(self.left == 0 || self.peers.iter().any(|peer| peer.lost), "indices are left");
                    assert!(!self.peers.iter().any(open), "the epoch ended before its batches");
                    return Outcome::End;
                }
                Poll::Ready { worker, data, .. } => return self.hand_out(worker, data, start),
                Poll::Arrived { seq, received } => {
                    let number = received.seq;
                    assert_eq!(number, (self.epoch << EPOCH_SHIFT) | seq, "a batch of another epoch");
                    let peer = &mut self.peers[received.worker as usize];
                    // In the order of its tasks: none is answered twice, and none is left out.
                    assert_eq!(peer.open.pop_front(), Some(number), "of worker {}", received.worker);
                    peer.answered += 1;
                    peer.owes_since = Instant::now();
                    let (kept, waits) = check(&self.profile, &received);
                    drop((kept, received));
                    self.seen.waits += waits;
                    self.seen.batches += 1;
                    if let Some((worker, number)) = self.scheduler.accept(seq, number).unwrap() {
                        return self.hand_out(worker, number, start);
                    }
                    // Only what a worker had committed before it ended is taken before its turn.
                    assert_eq!(self.order, ResultOrder::InOrder);
                }
                Poll::Wait { worker, limit } => {
                    assert_eq!(worker.is_some(), self.order == ResultOrder::InOrder);
                    self.engine.wait_for(worker, limit).unwrap();
                    assert!(start.elapsed() < PATIENCE, "hangs: {:?}", self.scheduler);
                }
                Poll::Lost { worker } => {
                    self.note_overdue(start);
                    self.lost(worker);
                    return Outcome::Lost(worker);
                }
            }
        }
    }

    fn hand_out(&mut self, worker: u32, number: u64, start: Instant) -> Outcome {
        if self.order == ResultOrder::InOrder {
            let earlier = self.peers.iter().filter(|peer| !peer.lost);
            assert!(earlier.flat_map(|peer| &peer.open).all(|open| *open > number), "{number} too soon");
            assert!(number >= self.handed_out, "{number} after its turn");
            self.handed_out = number + 1;
        }
        self.scheduler.record_delivered(worker);
        self.send();
        self.note_overdue(start);
        Outcome::Batch
    }

    /// Notes for how long the news of each worker is overdue. `start`: when the parent asked for what it now has.
    fn note_overdue(&mut self, start: Instant) {
        for worker in 0..self.peers.len() {
            let (committed, peer) = (self.committed(worker), &mut self.peers[worker]);
            let Some(death) = peer.death.get().filter(|_| !peer.lost && !peer.open.is_empty()) else {
                continue;
            };
            if committed > peer.before + peer.answered {
                continue;
            }
            // In order, batches of other workers that are there come first; but the news is late if the parent sleeps
            // for such a batch.
            let asked = if self.order == ResultOrder::InOrder { start } else { *death };
            peer.overdue = peer.overdue.max(peer.owes_since.max(*death).max(asked).elapsed());
        }
    }

    /// Returns the number of batches that a worker has committed in all its life: the tail of its ring.
    fn committed(&self, worker: usize) -> u64 {
        Producer::attach(self.engine.control().worker(worker as u32).results).unwrap().tail()
    }

    fn lost(&mut self, worker: u32) {
        let committed = self.committed(worker as usize);
        let peer = &mut self.peers[worker as usize];
        assert!(!peer.lost, "lost twice in an epoch");
        peer.lost = true;
        peer.looks.take().into_iter().for_each(|looks| looks.join().unwrap());
        assert!(!peer.open.is_empty(), "nothing of a lost worker is missing");
        let taken = peer.before + peer.answered;
        assert!(committed <= taken, "lost with {} batches that were not handed out", committed - taken);
        self.notices.push(peer.overdue);
        self.scheduler.give_up(worker);
    }

    /// Takes the rest of the epoch; batches of a worker that is lost meanwhile are missing, and no other.
    fn rest(&mut self) {
        while self.next() != Outcome::End {}
    }

    fn finish(mut self) -> (Seen, Vec<Duration>) {
        self.engine.set_done();
        for mut peer in std::mem::take(&mut self.peers) {
            kill_process(Pid::from_child(&peer.child), Signal::CONT).unwrap();
            let status = peer.child.wait().unwrap();
            peer.looks.take().into_iter().for_each(|looks| looks.join().unwrap());
            self.seen.kills += u64::from(!status.success());
        }
        self.engine.close();
        (self.seen, self.notices)
    }
}

/// Waits for the end of a process; when it was.
fn end_of(handle: &OwnedFd) -> Instant {
    while poll(&mut [PollFd::from_borrowed_fd(handle.as_fd(), PollFlags::IN)], None).is_err() {}
    Instant::now()
}

/// Workers that are killed at any time, of which one may hold up the order meanwhile; epochs that end or are
/// left half-way, also with workers that were lost in one before.
pub(crate) fn kills(effort: Effort) -> Seen {
    let end = Instant::now() + effort.time;
    let mut random = Random(effort.seed);
    let (mut seen, mut notices) = (Seen::default(), Vec::new());
    let descriptors = open_descriptors();
    while Instant::now() < end {
        let workers = 2 + random.below(3) as u32;
        let leaf = [500, 20 << 10, 400 << 10][random.below(3) as usize];
        let profile = Profile { seed: random.next(), leaves: 3, leaf };
        let order = ORDERS[random.below(4) as usize];
        let mut parent = Scheduled::new(workers, 1 + random.below(3) as u32, order, 1 << 20, profile);
        (0..workers).for_each(|_| parent.start(None));
        for epoch in 0..3 {
            parent.begin(random.below(300), epoch == 0);
            if random.once_in(3) {
                (0..random.below(40)).for_each(|_| _ = parent.next());
            } else {
                parent.rest();
            }
        }
        let victim = random.below(workers.into()) as u32;
        let stopped = (!random.once_in(3))
            .then(|| (victim + 1 + random.below(u64::from(workers) - 1) as u32) % workers);
        let pids = (parent.pid(victim), stopped.map(|worker| parent.pid(worker)));
        if random.once_in(2)
            && let Some(stopped) = pids.1
        {
            // Neither has anything of the epoch to come.
            [pids.0, stopped].iter().for_each(|pid| kill_process(*pid, Signal::STOP).unwrap());
        }
        parent.begin(u64::MAX, false);
        let [delay, behind] = [10_000, 3_000].map(|most| Duration::from_micros(random.magnitude(most)));
        let (told, waits) = channel::<()>();
        let killer = thread::spawn(move || {
            thread::sleep(delay);
            pids.1.into_iter().for_each(|pid| kill_process(pid, Signal::STOP).unwrap());
            // The victim may commit something now that lies behind what the stopped worker owes.
            thread::sleep(behind);
            kill_process(pids.0, Signal::KILL).unwrap();
            let _ = waits.recv_timeout(STOPPED);
            pids.1.into_iter().for_each(|pid| kill_process(pid, Signal::CONT).unwrap());
        });
        let mut lost = Vec::new();
        while lost.is_empty() {
            match parent.next() {
                Outcome::Lost(worker) => lost.push(worker),
                outcome => assert_eq!(outcome, Outcome::Batch, "an epoch without end"),
            }
        }
        drop(told);
        assert_eq!(lost, [victim]);
        // The others go on, and each new epoch says once more which one is missing.
        (0..random.below(30)).for_each(|_| assert_ne!(parent.next(), Outcome::Lost(victim)));
        killer.join().unwrap();
        for _ in 0..2 {
            parent.begin(10 + random.below(50), false);
            parent.rest();
            assert!(parent.peers[victim as usize].lost);
        }
        let (one, more) = parent.finish();
        assert_eq!(one.kills, 1, "a worker ended that was not killed");
        assert_eq!(open_descriptors(), descriptors, "descriptors are left");
        seen += one;
        notices.extend(more);
    }
    assert!(seen.kills > 0 && seen.batches > seen.kills, "{seen:?}");
    check_notices(&mut notices);
    seen
}

/// Another process may have the processor for longer, now and then.
fn check_notices(notices: &mut [Duration]) {
    notices.sort();
    let (usual, latest) = (notices[notices.len() * 3 / 4], notices[notices.len() - 1]);
    println!("deaths told after {usual:?} mostly, {latest:?} at the latest");
    assert!(usual <= NOTICE && latest < STOPPED * 4 / 5, "deaths are told late");
}

/// A worker dies at each of its moments, in order and not, while another one serves.
#[cfg(ringloader_failpoints)]
pub(crate) fn deaths(effort: Effort) -> Seen {
    use super::points::{DEATHS, LEAF, SHARE};

    let (mut seen, mut notices) = (Seen::default(), Vec::new());
    for (at, (point, _)) in DEATHS.iter().enumerate() {
        for order in [ResultOrder::InOrder, ResultOrder::AsCompleted] {
            let profile = Profile { seed: effort.seed + at as u64, leaves: 3, leaf: LEAF };
            let mut parent = Scheduled::new(2, 3, order, SHARE, profile);
            parent.start(Some(&format!("{point}:kill:{}", [1, 9][at % 2])));
            parent.start(None);
            // Epoch after epoch, of which every other one is left half-way.
            for epoch in 0.. {
                parent.begin(40, epoch == 0);
                let steps = if epoch % 2 == 0 { usize::MAX } else { 10 };
                let mut outcomes = (0..steps).map(|_| parent.next());
                if outcomes.by_ref().any(|outcome| outcome != Outcome::Batch) && parent.peers[0].lost {
                    break;
                }
                assert!(epoch < 1000, "no worker died at {point}");
            }
            parent.rest();
            parent.begin(20, false);
            parent.rest();
            assert!(parent.peers[0].lost && !parent.peers[1].lost, "{point}");
            let (one, more) = parent.finish();
            assert_eq!(one.kills, 1, "{point}");
            seen += one;
            notices.extend(more);
        }
    }
    check_notices(&mut notices);
    seen
}
