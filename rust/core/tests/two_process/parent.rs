//! The process that takes batches: it checks each, keeps some, kills workers and starts successors.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use ringloader_core::batch::Token;
use ringloader_core::os::fd_passing;
use ringloader_core::pool::SlotId;
use ringloader_core::sync::Ordering;
use ringloader_core::transport::Transport;
use ringloader_core::transport::engine::Engine;
use ringloader_core::transport::message::{ResultKind, Task, TaskKind};
use ringloader_core::transport::port::{Commit, Port, Room};
use ringloader_core::transport::received::{Backing, Received};

use super::content::{LeafSpec, Profile};
use super::worker;

/// Nothing here takes longer unless it hangs.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// Counts of what a run has seen, for its assertions and the gate.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Seen {
    pub(crate) batches: u64,
    pub(crate) kills: u64,
    pub(crate) oversize: u64,
    pub(crate) in_place: u64,
    /// The number of times that a worker waited for room.
    pub(crate) waits: u64,
    /// Batches that the user was refused a lease of.
    pub(crate) refused: u64,
    /// The number of times that the memfd was seen to keep less than before.
    pub(crate) shrunk: u64,
}

impl std::ops::AddAssign for Seen {
    fn add_assign(&mut self, other: Self) {
        self.batches += other.batches;
        self.kills += other.kills;
        self.oversize += other.oversize;
        self.in_place += other.in_place;
        self.waits += other.waits;
        self.refused += other.refused;
        self.shrunk += other.shrunk;
    }
}

/// A batch that the user keeps.
#[derive(Debug)]
pub(crate) struct Kept {
    seq: u64,
    /// Each leaf, and where it lies in the batch.
    leaves: Vec<(LeafSpec, u64)>,
    backing: Arc<Backing>,
}

impl Kept {
    /// Returns the owner that keeps the batch's memory.
    pub(crate) fn backing(&self) -> &Backing {
        &self.backing
    }

    /// Compares every byte with what the task asked for.
    pub(crate) fn check(&self) {
        let mut bytes = Vec::new();
        for (leaf, offset) in &self.leaves {
            self.backing.copy_out(*offset, leaf.len, &mut bytes).unwrap();
            assert!(leaf.is_in(&bytes), "batch {}: a leaf of {} bytes has changed", self.seq, leaf.len);
        }
    }
}

/// One worker, as its parent sees it.
#[derive(Debug)]
struct Peer {
    child: Option<Child>,
    /// Tasks that were sent and not answered, in order.
    outstanding: VecDeque<u64>,
}

/// A parent with its workers.
#[derive(Debug)]
pub(crate) struct Parent {
    pub(crate) engine: Engine,
    pub(crate) profile: Profile,
    pub(crate) seen: Seen,
    /// A descriptor of the segment that outlives the engine, to look at its memory.
    memfd: OwnedFd,
    peers: Vec<Peer>,
    max_tasks: u32,
    next_seq: u64,
    last_resident: u64,
    descriptors: usize,
}

impl Parent {
    /// A parent whose workers are not started.
    pub(crate) fn new(workers: u32, max_tasks: u32, share: u64, profile: Profile) -> Self {
        let descriptors = open_descriptors();
        let engine = Engine::new(workers, max_tasks, share).unwrap();
        let memfd = engine.worker_fds(0).segment.try_clone_to_owned().unwrap();
        let peers = (0..workers).map(|_| Peer { child: None, outstanding: VecDeque::new() }).collect();
        let seen = Seen::default();
        Self { engine, profile, seen, memfd, peers, max_tasks, next_seq: 0, last_resident: 0, descriptors }
    }

    /// As [`new`](Self::new), with all workers running.
    pub(crate) fn with_workers(workers: u32, max_tasks: u32, share: u64, profile: Profile) -> Self {
        let mut parent = Self::new(workers, max_tasks, share, profile);
        (0..workers).for_each(|worker| parent.start(worker, None, None));
        parent
    }

    /// Starts a worker, with what it inherits from a predecessor and a moment at which it is to die.
    pub(crate) fn start(&mut self, worker: u32, busy: Option<&[u64]>, failpoint: Option<&str>) {
        self.peers[worker as usize].child = Some(start(&self.engine, worker, busy, failpoint));
    }

    /// The process of a worker.
    pub(crate) fn pid(&self, worker: u32) -> rustix::process::Pid {
        rustix::process::Pid::from_child(self.peers[worker as usize].child.as_ref().unwrap())
    }

    /// Gives every worker as many tasks as it may have.
    pub(crate) fn top_up(&mut self) {
        for worker in 0..self.peers.len() {
            while self.peers[worker].outstanding.len() < self.max_tasks as usize {
                self.send(worker as u32);
            }
        }
    }

    /// Sends the next task to `worker`.
    pub(crate) fn send(&mut self, worker: u32) {
        self.engine.put(worker, self.profile.task(self.next_seq)).unwrap();
        self.peers[worker as usize].outstanding.push_back(self.next_seq);
        self.next_seq += 1;
    }

    /// The next batch that is there, checked, and whether the user may keep it.
    pub(crate) fn take(&mut self) -> Option<(Kept, bool)> {
        let received = self.engine.try_next().unwrap()?;
        Some(self.receive(received))
    }

    /// Checks a received result.
    pub(crate) fn receive(&mut self, mut received: Received) -> (Kept, bool) {
        assert_eq!(received.kind, ResultKind::Batch);
        let peer = &mut self.peers[received.worker as usize];
        // Answered in order: so none is answered twice, and none is left out.
        assert_eq!(peer.outstanding.pop_front(), Some(received.seq), "of worker {}", received.worker);
        let leased = received.lease();
        self.seen.batches += 1;
        self.seen.oversize += u64::from(received.is_oversize());
        self.seen.refused += u64::from(!leased);

        let (kept, waits) = check(&self.profile, &received);
        self.seen.waits += waits;
        self.check_resident();
        (kept, leased)
    }

    /// Takes batches for `time`, and as long as `more` asks for. Each goes to `keep`.
    pub(crate) fn pump(&mut self, time: Duration, mut keep: impl FnMut(Kept, bool)) {
        let end = Instant::now() + time;
        while Instant::now() < end {
            self.top_up();
            match self.take() {
                Some((kept, leased)) => keep(kept, leased),
                None => self.engine.wait_for(None, Duration::from_millis(20)).unwrap(),
            }
            assert_eq!(self.engine.take_ended(), None, "a worker ended that was not killed");
        }
    }

    /// Takes batches until `worker` has ended, and what it had committed. It has tasks until then.
    pub(crate) fn pump_to_end(&mut self, worker: u32, mut keep: impl FnMut(Kept, bool)) -> ExitStatus {
        let start = Instant::now();
        loop {
            self.top_up();
            if let Some((kept, leased)) = self.take() {
                keep(kept, leased);
                continue;
            }
            if let Some(ended) = self.engine.take_ended() {
                assert_eq!(ended, worker, "a worker ended that was not killed");
                break;
            }
            self.engine.wait_for(None, Duration::from_millis(20)).unwrap();
            assert!(start.elapsed() < PATIENCE, "worker {worker} does not end: {}", self.state(worker));
        }
        while let Some((kept, leased)) = self.take() {
            keep(kept, leased);
        }
        self.peers[worker as usize].child.take().unwrap().wait().unwrap()
    }

    /// Describes what a worker that hangs may be waiting for.
    fn state(&self, worker: u32) -> String {
        let view = self.engine.control().worker(worker);
        let holds: Vec<u32> = view.slots.holds.iter().map(|holds| holds.load(Ordering::Relaxed)).collect();
        let touched: Vec<u64> =
            view.slots.touched().iter().map(|touched| touched.load(Ordering::Relaxed)).collect();
        format!(
            "{:?}, {:?} tasks and {:?} results in the rings, counters {:?}, free {:x?}, holds {holds:?}, \
             touched {touched:?}",
            self.peers[worker as usize],
            view.tasks.len(),
            view.results.len(),
            view.counters.read(0),
            view.slots.free
        )
    }

    /// As [`pump_to_end`](Self::pump_to_end), for a worker that SIGKILL ends.
    pub(crate) fn pump_to_kill(&mut self, worker: u32, keep: impl FnMut(Kept, bool)) {
        let status = self.pump_to_end(worker, keep);
        assert_eq!(status.signal(), Some(9), "worker {worker}: {status}");
        self.check_touched(worker);
        self.seen.kills += 1;
    }

    /// Starts a successor of a worker that has ended, and sends what it had not answered again.
    pub(crate) fn succeed(&mut self, worker: u32, failpoint: Option<&str>) {
        let busy = self.engine.succeed(worker).unwrap();
        assert!(self.engine.control().worker(worker).tasks.is_empty().unwrap());
        self.start(worker, Some(&busy), failpoint);
        for seq in &self.peers[worker as usize].outstanding {
            self.engine.put(worker, self.profile.task(*seq)).unwrap();
        }
    }

    /// Ends all workers, checks that nothing is lost, and closes. What the user still keeps is for the
    /// caller to drop before.
    pub(crate) fn finish(mut self) -> Seen {
        self.end_workers(true);
        self.finish_ended()
    }

    /// As [`finish`](Self::finish), of workers that have ended.
    pub(crate) fn finish_ended(mut self) -> Seen {
        for worker in 0..self.peers.len() as u32 {
            self.audit_slots(worker);
        }
        for worker in 0..self.peers.len() {
            let counters = self.engine.control().worker(worker as u32).counters;
            self.seen.in_place += counters.now().in_place.load(Ordering::Relaxed);
        }
        self.engine.close();
        self.check_empty();
        let Self { engine, seen, memfd, descriptors, .. } = self;
        drop(engine);
        drop(memfd);
        assert_eq!(open_descriptors(), descriptors, "descriptors are left");
        seen
    }

    /// Starts the next epoch, with other workers in place of those that have ended.
    pub(crate) fn next_epoch(self) -> Self {
        self.next_epoch_after(|| {})
    }

    /// As [`next_epoch`](Self::next_epoch), with something done while the segment is cached.
    pub(crate) fn next_epoch_after(mut self, between: impl FnOnce()) -> Self {
        let workers = self.peers.len() as u32;
        let most = u64::from(workers) * self.engine.share();
        let cached = self.engine.store(most).expect("all workers have ended");
        between();
        self.engine = cached.take().unwrap();
        for worker in 0..workers {
            self.check_touched(worker);
            self.start(worker, None, None);
        }
        self
    }

    /// Sends the end to all workers and takes what they still answer. They may be asked whether all
    /// slots have come back to them.
    pub(crate) fn end_workers(&mut self, audit: bool) {
        for worker in 0..self.peers.len() as u32 {
            let end = Task { seq: 0, kind: TaskKind::End, bytes: vec![1; audit.into()] };
            self.engine.put(worker, end).unwrap();
        }
        let mut left = self.peers.len();
        let start = Instant::now();
        while left > 0 {
            while self.take().is_some() {}
            match self.engine.take_ended() {
                Some(worker) => {
                    let status = self.peers[worker as usize].child.take().unwrap().wait().unwrap();
                    assert!(status.success(), "worker {worker}: {status}");
                    left -= 1;
                }
                None => self.engine.wait_for(None, Duration::from_millis(20)).unwrap(),
            }
            assert!(start.elapsed() < PATIENCE, "workers do not end: {}", self.state(0));
        }
        while self.take().is_some() {}
        assert!(self.peers.iter().all(|peer| peer.outstanding.is_empty()), "{:?}", self.peers);
    }

    /// All slots of a worker that has ended can be filled: none is lost for good, and none is held.
    pub(crate) fn audit_slots(&self, worker: u32) {
        let busy = self.engine.succeed(worker).unwrap();
        assert!(busy.iter().all(|word| *word == 0), "worker {worker}: {busy:x?} must not be held");
        assert_eq!(self.count_slots(worker), self.engine.control().geometry().slots, "of worker {worker}");
    }

    /// Returns the number of slots that a successor of a worker that has ended would have. The successor fills nothing.
    pub(crate) fn count_slots(&self, worker: u32) -> u32 {
        let busy = self.engine.succeed(worker).unwrap();
        let fds = self.engine.worker_fds(worker).for_port().unwrap();
        let control = self.engine.control().clone();
        let port = Port::attach(control, worker, self.engine.share(), fds, Some(&busy)).unwrap();
        let mut commits: Vec<Commit<'_>> = Vec::new();
        loop {
            let mut commit = port.begin_commit();
            // No bytes: the memory that all slots would need at once is more than the share.
            match commit.reserve(0).unwrap() {
                Room::Ready => commits.push(commit),
                Room::Later | Room::Oversize => break,
            }
        }
        commits.len() as u32
    }

    /// Each slot of a worker that has ended keeps no page beyond what it is said to have touched.
    pub(crate) fn check_touched(&self, worker: u32) {
        let control = self.engine.control();
        let touched = control.worker(worker).slots.touched();
        for (slot, touched) in (0..).map(SlotId::new).zip(touched) {
            let window = control.window(worker, slot);
            let end = window.start + touched.load(Ordering::Relaxed);
            let data = rustix::fs::seek(&self.memfd, rustix::fs::SeekFrom::Data(end)).unwrap_or(u64::MAX);
            assert!(data >= window.end, "slot {slot} has a page at {data}, touched ends at {end}");
        }
    }

    /// Bytes that the segment keeps.
    pub(crate) fn resident(&self) -> u64 {
        rustix::fs::fstat(&self.memfd).unwrap().st_blocks as u64 * 512
    }

    /// Bytes that the control structures keep, which always stay.
    fn control_bytes(&self) -> u64 {
        use rustix::fs::{SeekFrom, seek};
        let (mut kept, mut at, end) = (0, 0, self.engine.control().arena(0).start);
        while let Some(data) = seek(&self.memfd, SeekFrom::Data(at)).ok().filter(|&data| data < end) {
            at = seek(&self.memfd, SeekFrom::Hole(data)).unwrap().min(end);
            kept += at - data;
        }
        kept
    }

    /// Within the budget: the shares, beside the control structures and the tasks' bytes.
    pub(crate) fn check_resident(&mut self) {
        let resident = self.resident();
        let workers = self.peers.len() as u64;
        let tasks = (u64::from(self.max_tasks) + 2) * 1024;
        let budget = workers
            * (self.engine.share() + tasks.next_multiple_of(rustix::param::page_size() as u64))
            + self.control_bytes();
        assert!(resident <= budget, "{resident} bytes are resident, the budget is {budget}");
        self.seen.shrunk += u64::from(resident < self.last_resident);
        self.last_resident = resident;
    }

    /// After closing, and when nothing is kept.
    pub(crate) fn check_empty(&self) {
        assert!(self.resident() <= self.control_bytes(), "{} bytes are left after closing", self.resident());
    }
}

/// Starts and watches the process of a worker, as [`Parent::start`].
pub(crate) fn start(engine: &Engine, worker: u32, busy: Option<&[u64]>, failpoint: Option<&str>) -> Child {
    let (ours, theirs) = fd_passing::pair().unwrap();
    let fds = engine.worker_fds(worker);
    let socket = fds.socket.unwrap();
    for (tag, fd) in
        (0..).zip([fds.segment, fds.worker_eventfd, fds.parent_eventfd, fds.parent_pidfd, socket.as_fd()])
    {
        assert_eq!(fd_passing::send(ours.as_fd(), fd, tag).unwrap(), fd_passing::SendOutcome::Yes);
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.env(worker::ORDERS, worker::orders(worker, engine.share(), busy));
    command
        .env_remove("RINGLOADER_FAILPOINT")
        .envs(failpoint.map(|failpoint| ("RINGLOADER_FAILPOINT", failpoint)));
    let child = command.stdin(Stdio::from(theirs)).spawn().unwrap();
    engine.watch_worker(worker, child.id()).unwrap();
    child
}

/// Compares a received result with what its task asked for, and says how often its worker waited for room.
pub(crate) fn check(profile: &Profile, received: &Received) -> (Kept, u64) {
    let specs = profile.batch(received.seq);
    let meta = received.meta().unwrap();
    let tokens = meta.skeleton().collect::<Result<Vec<_>, _>>().unwrap();
    assert_eq!(tokens.len(), specs.len() + 2, "batch {} is another one", received.seq);
    let Some(Token::Int(waits)) = tokens.last() else { panic!("{tokens:?}") };
    assert_eq!(meta.storage_count() as usize, specs.len());
    let storages = (0..meta.storage_count()).filter_map(|number| meta.storage(number));
    let leaves = specs.into_iter().zip(storages).map(|(spec, record)| {
        assert_eq!(record.nbytes, spec.len, "batch {} is another one", received.seq);
        (spec, record.offset)
    });
    let kept = Kept { seq: received.seq, leaves: leaves.collect(), backing: received.backing().clone() };
    kept.check();
    (kept, *waits as u64)
}

/// For deaths at a chosen moment.
#[cfg(ringloader_failpoints)]
impl Parent {
    /// Tasks that `worker` has not answered.
    pub(crate) fn outstanding(&self, worker: u32) -> usize {
        self.peers[worker as usize].outstanding.len()
    }

    /// Kills a worker, and takes nothing of what it had committed.
    pub(crate) fn kill_untaken(&mut self, worker: u32) {
        rustix::process::kill_process(self.pid(worker), rustix::process::Signal::KILL).unwrap();
        self.peers[worker as usize].child.take().unwrap().wait().unwrap();
    }

    /// Waits until the engine has noticed the death of a worker whose results were all taken.
    pub(crate) fn note_death(&mut self, worker: u32) {
        let start = Instant::now();
        while self.engine.take_ended() != Some(worker) {
            self.engine.wait_for(None, Duration::from_millis(20)).unwrap();
            assert!(start.elapsed() < PATIENCE, "the death of worker {worker} is not noticed");
        }
        self.seen.kills += 1;
    }
}

#[cfg(ringloader_failpoints)]
impl Kept {
    /// Returns the batch's address in this process. Two batches in slots have the same address if they are in the same
    /// slot.
    pub(crate) fn address(&self) -> usize {
        self.backing.pointer(0, 0).unwrap().as_ptr() as usize
    }
}

/// Descriptors of this process.
pub(crate) fn open_descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}
