//! Tasks that all workers of an engine share, in two memfds of their own: the words of [`joint`](crate::joint), and the
//! bytes of each batch. Composition only.
//!
//! The bytes of a batch are a range of addresses that stays in place. Its index lies at the start, then come the parts.

use std::collections::VecDeque;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::error::{Error, Result};
use crate::joint::{Batch, Claim, Cost, Part, Plan, WORDS, mean, per_run};
use crate::os::Segment;
use crate::os::memory::MemoryProbe;
use crate::os::word_file::WordFile;
use crate::sync::{AtomicU64, Ordering};
use crate::timing::Stamps;
use crate::transport::message::{TaskIndex, TaskKind};
use crate::transport::run_times::{self, TimedRun};

/// Words before those of the batches.
const HEADER: usize = 8;
/// The two words of a [`Cost`].
const MAKING: usize = 0;
const SENDING: usize = 1;
/// Runs whose samples could not be sent.
const UNSENT: usize = 2;

/// After this many runs that cannot be sent, batches are cut no more.
const FEW: u64 = 4;

/// The memory of shared tasks, in any process.
#[derive(Debug)]
pub struct SharedTasks {
    words: WordFile,
    bytes: Segment,
    places: u32,
    /// Bytes of a batch.
    window: u64,
}

impl SharedTasks {
    /// Makes the memory for `places` batches at a time, each of `window` bytes at most, with the times of their runs if
    /// they are `timed`. The descriptor is for workers that shall map the bytes.
    ///
    /// # Errors
    /// [`Error::Os`] when the system refuses.
    pub fn create(places: u32, window: u64, timed: bool) -> Result<(Self, OwnedFd)> {
        let words = WordFile::in_memory("ringloader-claims", words_for(places, timed))?;
        let len = window.checked_mul(places.into()).ok_or_else(|| too_many(places, window))?;
        let (bytes, fd) = Segment::create("ringloader-parts", len)?;
        Ok((Self { words, bytes, places, window }, fd))
    }

    /// Maps the memory that the main process has made with the same numbers.
    ///
    /// # Errors
    /// [`Error::Corrupt`] when it is smaller, [`Error::Os`] when it cannot be mapped.
    pub fn attach(
        words: OwnedFd,
        bytes: BorrowedFd<'_>,
        places: u32,
        window: u64,
        timed: bool,
    ) -> Result<Self> {
        let words = WordFile::map(words, words_for(places, timed))?;
        let bytes = Segment::attach(bytes)?;
        if window.checked_mul(places.into()) != Some(bytes.len()) {
            return Err(too_many(places, window));
        }
        Ok(Self { words, bytes, places, window })
    }

    /// The descriptor of the words.
    ///
    /// # Errors
    /// [`Error::Os`] where other code has closed it.
    pub fn words_fd(&self) -> Result<BorrowedFd<'_>> {
        self.words.fd()
    }

    fn word(&self, word: usize) -> &AtomicU64 {
        &self.words.words()[word]
    }

    fn batch(&self, place: usize) -> Batch<'_> {
        Batch::new(&self.words.words()[HEADER + place * WORDS..])
    }

    /// The times of a batch's runs; `None` where they are not timed.
    fn times(&self, place: usize) -> Option<&[AtomicU64]> {
        self.words.words()[words_for(self.places, false)..].chunks_exact(run_times::WORDS).nth(place)
    }

    /// Notes when a worker has made a run, before it finishes it or sends its batch.
    pub fn note_times(&self, claimed: &Claimed, worker: u32, stamps: &Stamps) {
        if let (Some(times), Some(run)) = (self.times(claimed.place), claimed.claim.run) {
            run_times::note(times, run, worker, stamps);
        }
    }

    fn places(&self) -> Range<usize> {
        0..self.places as usize
    }

    fn start(&self, place: usize) -> u64 {
        place as u64 * self.window
    }

    /// Returns true if `worker` may claim something of a task that `is_wanted`.
    pub fn is_open(&self, is_wanted: impl Fn(u64) -> bool) -> bool {
        self.places().map(|place| self.batch(place)).any(|batch| is_wanted(batch.seq()) && batch.is_open())
    }

    /// Claims something of the earliest batch of which something is free, if its task `is_wanted`.
    pub fn claim(&self, worker: u32, is_wanted: impl Fn(u64) -> bool) -> Option<Claimed> {
        loop {
            let open = self.places().filter(|&place| self.batch(place).is_open());
            let place = open
                .filter(|&place| is_wanted(self.batch(place).seq()))
                .min_by_key(|&place| self.batch(place).seq())?;
            let batch = self.batch(place);
            let Some(claim) = batch.claim(worker) else { continue };
            let plan = batch.plan();
            if is_wanted(plan.seq) {
                return Some(Claimed { place, plan, claim });
            }
            // Another batch was laid out there meanwhile.
            batch.give_back(claim);
        }
    }

    /// The index of a task, as it was sent.
    ///
    /// # Errors
    /// [`Error::Corrupt`] for what the main process does not write.
    pub fn index(&self, claimed: &Claimed) -> Result<TaskIndex> {
        let Plan { kind, len, .. } = claimed.plan;
        let kind = TaskKind::from_number(kind)
            .ok_or_else(|| Error::Corrupt(format!("{kind} is no kind of task")))?;
        let mut bytes = Vec::new();
        if len > self.window {
            return Err(Error::Corrupt(format!("a task of {len} bytes")));
        }
        self.bytes.copy_out(self.start(claimed.place), len, &mut bytes)?;
        Ok((kind, bytes))
    }

    /// Takes the collation of a batch whose other runs are made. See [`Batch::begin_last`].
    pub fn begin_last(&self, claimed: &Claimed) -> bool {
        self.batch(claimed.place).begin_last(claimed.claim)
    }

    /// Reserves bytes for a part, and returns where they begin in the batch; `None`: there is no room.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`] when the machine or the control group has not enough left.
    pub fn reserve(&self, claimed: &Claimed, len: u64, probe: &MemoryProbe) -> Result<Option<u64>> {
        probe.require(len)?;
        Ok(self.batch(claimed.place).reserve(len, self.window))
    }

    /// The address of bytes of a batch, which this process may use as [`joint`](crate::joint) says.
    ///
    /// # Errors
    /// [`Error::Corrupt`] when they do not lie in it.
    pub fn pointer(&self, claimed: &Claimed, offset: u64, len: u64) -> Result<NonNull<u8>> {
        self.bytes.pointer(self.location(claimed, offset, len)?, len)
    }

    /// Replaces `into` by a copy of bytes of a batch.
    ///
    /// # Errors
    /// As [`pointer`](Self::pointer).
    pub fn copy_out(&self, claimed: &Claimed, offset: u64, len: u64, into: &mut Vec<u8>) -> Result<()> {
        self.bytes.copy_out(self.location(claimed, offset, len)?, len, into)
    }

    /// Copies bytes of a batch to memory of the caller's.
    ///
    /// # Errors
    /// As [`pointer`](Self::pointer).
    pub fn fill(&self, claimed: &Claimed, offset: u64, into: &mut [MaybeUninit<u8>]) -> Result<()> {
        self.bytes.fill(self.location(claimed, offset, into.len() as u64)?, into)
    }

    fn location(&self, claimed: &Claimed, offset: u64, len: u64) -> Result<u64> {
        if offset.checked_add(len).is_none_or(|end| end > self.window) {
            return Err(Error::Corrupt(format!("{len} bytes at {offset} of a batch of {}", self.window)));
        }
        Ok(self.start(claimed.place) + offset)
    }

    /// The run was made, and its part is in the bytes reserved for it; `None`: it cannot be sent. Returns true if this
    /// worker is to collate the batch.
    pub fn finish(&self, claimed: &Claimed, part: Option<(u64, u64)>) -> bool {
        let part = part.map_or(Part::Unsent, |(offset, len)| Part::Bytes { offset, len });
        self.batch(claimed.place).finish(claimed.claim, part)
    }

    /// The part of a run; `None` of one that is not made.
    #[must_use]
    pub fn part(&self, claimed: &Claimed, run: u32) -> Option<Part> {
        self.batch(claimed.place).part(run)
    }

    /// Notes the nanoseconds that each sample of a run took to make.
    pub fn note_making(&self, nanoseconds: u64) {
        self.note(MAKING, nanoseconds);
    }

    /// Notes the nanoseconds that each sample of a run took to send.
    pub fn note_sending(&self, nanoseconds: u64) {
        self.note(SENDING, nanoseconds);
    }

    /// Publishes nothing: of two notes at once, one may be lost.
    fn note(&self, word: usize, nanoseconds: u64) {
        let word = self.word(word);
        word.store(mean(word.load(Ordering::Relaxed), nanoseconds), Ordering::Relaxed);
    }

    /// Notes that a run cannot be sent. Returns true once it has happened so often that batches are cut no more.
    pub fn note_unsent(&self) -> bool {
        self.word(UNSENT).fetch_add(1, Ordering::Relaxed) + 1 == FEW
    }

    /// Returns the samples of a run, for a batch of `samples` that `workers` make.
    fn per_run(&self, samples: u64, workers: u32) -> u64 {
        let word = |word| self.word(word).load(Ordering::Relaxed);
        if word(UNSENT) >= FEW {
            return samples;
        }
        per_run(samples, workers, Cost { making: word(MAKING), sending: word(SENDING) })
    }
}

fn words_for(places: u32, timed: bool) -> usize {
    HEADER + places as usize * (WORDS + if timed { run_times::WORDS } else { 0 })
}

fn too_many(places: u32, window: u64) -> Error {
    Error::Config(format!("memory for {places} batches of {window} bytes"))
}

/// A worker's claim of a batch.
#[derive(Debug, Clone, Copy)]
pub struct Claimed {
    place: usize,
    /// The batch.
    pub plan: Plan,
    /// The claim.
    pub claim: Claim,
}

impl Claimed {
    /// The samples of the run, as a range of the batch's; all for the collation.
    #[must_use]
    pub fn samples(&self) -> Range<u64> {
        match self.claim.run {
            Some(run) => self.samples_of(run),
            None => 0..self.plan.samples,
        }
    }

    /// The samples of a run.
    #[must_use]
    pub fn samples_of(&self, run: u32) -> Range<u64> {
        samples_of(&self.plan, run)
    }

    /// Returns true if the batch is made by one worker.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.plan.runs() == 1
    }
}

fn samples_of(plan: &Plan, run: u32) -> Range<u64> {
    let start = (u64::from(run) * plan.per_run).min(plan.samples);
    start..(start + plan.per_run).min(plan.samples)
}

/// The main process's end: lays tasks out while there is room, and keeps the others.
#[derive(Debug)]
pub struct TaskSharing {
    memory: SharedTasks,
    workers: u32,
    /// True if no batch may be cut.
    keeps_whole: bool,
    state: Mutex<Sent>,
}

#[derive(Debug, Default)]
struct Sent {
    /// By place: the task that is laid out there.
    laid_out: Vec<Option<(u64, TaskIndex)>>,
    /// Tasks without a place, each with the number of its samples.
    pending: VecDeque<(u64, TaskIndex, u64)>,
    /// The task that was answered last, and the times of its runs.
    timed: Option<(u64, Vec<TimedRun>)>,
}

impl TaskSharing {
    /// For `workers` workers.
    #[must_use]
    pub fn new(memory: SharedTasks, workers: u32, keeps_whole: bool) -> Self {
        let laid_out = memory.places().map(|_| None).collect();
        Self { memory, workers, keeps_whole, state: Mutex::new(Sent { laid_out, ..Sent::default() }) }
    }

    /// The memory.
    #[must_use]
    pub fn memory(&self) -> &SharedTasks {
        &self.memory
    }

    /// The number of workers.
    #[must_use]
    pub fn workers(&self) -> u32 {
        self.workers
    }

    /// Sends a task of `samples` samples to whichever workers are idle, or keeps it until there is room. Returns true
    /// if workers are to be woken.
    ///
    /// # Errors
    /// [`Error::TaskTooLarge`] when it can never be sent.
    pub fn put(&self, seq: u64, index: TaskIndex, samples: u64) -> Result<bool> {
        let (len, capacity) = (index.1.len() as u64, self.memory.window);
        if len > capacity {
            return Err(Error::TaskTooLarge { len, capacity });
        }
        let state = &mut *self.lock();
        state.pending.push_back((seq, index, samples));
        self.flush(state)
    }

    /// Takes note that a task has its result. Returns true if workers are to be woken.
    ///
    /// # Errors
    /// As [`put`](Self::put).
    pub fn answered(&self, seq: u64) -> Result<bool> {
        let state = &mut *self.lock();
        let is_it = |sent: &Option<(u64, TaskIndex)>| sent.as_ref().is_some_and(|(of, _)| *of == seq);
        let Some(place) = state.laid_out.iter().position(is_it) else { return Ok(false) };
        state.laid_out[place] = None;
        if let Some(times) = self.memory.times(place) {
            let plan = self.memory.batch(place).plan();
            state.timed = Some((seq, run_times::take(times, plan.runs(), |run| samples_of(&plan, run))));
        }
        self.memory.batch(place).close();
        self.flush(state)
    }

    /// Returns the runs of a task that has just its result, if they are timed.
    pub fn take_timed(&self, seq: u64) -> Vec<TimedRun> {
        let timed = self.lock().timed.take_if(|(of, _)| *of == seq);
        timed.map_or_else(Vec::new, |(_, runs)| runs)
    }

    fn flush(&self, state: &mut Sent) -> Result<bool> {
        let mut laid_out = false;
        while let Some(place) = state.laid_out.iter().position(Option::is_none)
            && let Some((seq, index, samples)) = state.pending.pop_front()
        {
            let (kind, bytes) = &index;
            self.memory.bytes.copy_in(self.memory.start(place), bytes)?;
            let per_run = if self.keeps_whole { samples } else { self.memory.per_run(samples, self.workers) };
            let plan = Plan { seq, samples, per_run, kind: *kind as u64, len: bytes.len() as u64 };
            self.memory.batch(place).lay_out(&plan);
            state.laid_out[place] = Some((seq, index));
            laid_out = true;
        }
        Ok(laid_out)
    }

    /// Frees what a worker had claimed, whose process has ended and whose results were taken.
    pub fn lose(&self, worker: u32) {
        let state = self.lock();
        for place in self.memory.places().filter(|&place| state.laid_out[place].is_some()) {
            self.memory.batch(place).lose(worker);
        }
    }

    /// The task of which a worker has claimed something.
    #[must_use]
    pub fn in_hand(&self, worker: u32) -> Option<(u64, TaskIndex)> {
        let state = self.lock();
        let found = self.memory.places().find(|&place| self.memory.batch(place).is_with(worker))?;
        state.laid_out[found].clone()
    }

    fn lock(&self) -> MutexGuard<'_, Sent> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn tasks_wait_for_a_place_and_the_earliest_is_claimed_first() {
        let (memory, fd) = SharedTasks::create(2, 4096, true).unwrap();
        let sharing = TaskSharing::new(memory, 2, false);
        let words = sharing.memory().words_fd().unwrap().try_clone_to_owned().unwrap();
        let worker = SharedTasks::attach(words, fd.as_fd(), 2, 4096, true).unwrap();
        for seq in 0..3 {
            let index = (TaskKind::Indices, vec![seq as u8; 16]);
            assert_eq!(sharing.put(seq, index, 2), Ok(seq < 2));
        }
        let any = |_| true;
        let first = worker.claim(0, any).unwrap();
        assert_eq!((first.plan.seq, first.samples()), (0, 0..1));
        assert_eq!(worker.index(&first), Ok((TaskKind::Indices, vec![0; 16])));
        assert_eq!(sharing.in_hand(0).map(|(seq, _)| seq), Some(0));
        let second = worker.claim(1, any).unwrap();
        assert_eq!(worker.claim(1, |seq| seq > 1).map(|claimed| claimed.plan.seq), None);
        let stamps = Stamps { got: 3, made: 5, ..Stamps::default() };
        worker.note_times(&first, 0, &stamps);
        assert!(!worker.finish(&first, Some((64, 4))));
        assert!(worker.begin_last(&second));
        assert_eq!(sharing.answered(0), Ok(true));
        assert_eq!(sharing.take_timed(1), []);
        assert_eq!(sharing.take_timed(0), [TimedRun { worker: 0, stamps, samples: 0..1 }]);
        assert_eq!(worker.claim(0, any).map(|claimed| claimed.plan.seq), Some(1));
        sharing.lose(0);
        assert_eq!(
            worker.claim(1, any).map(|claimed| (claimed.plan.seq, claimed.samples())),
            Some((1, 0..1))
        );
        assert_eq!(sharing.answered(9), Ok(false));
        assert!(matches!(
            sharing.put(9, (TaskKind::Indices, vec![0; 5000]), 1),
            Err(Error::TaskTooLarge { .. })
        ));
    }
}
