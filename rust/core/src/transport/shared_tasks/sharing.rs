//! The main process's end: lays tasks out while there is room, and keeps the others.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::windows::Windows;
use super::{AWAITED, MOST_INDEX, SharedTasks, samples_of};
use crate::error::{Error, Result};
use crate::joint::Plan;
use crate::sync::{Arc, Ordering};
use crate::transport::message::TaskIndex;
use crate::transport::run_times::{self, TimedRun};
use crate::transport::task_number::{epoch_of, is_before};

/// The main process's end.
#[derive(Debug)]
pub struct TaskSharing {
    memory: SharedTasks,
    windows: Arc<Windows>,
    /// The most that there may be.
    workers: u32,
    /// True if no batch may be cut.
    keeps_whole: bool,
    state: Mutex<Sent>,
}

#[derive(Debug, Default)]
struct Sent {
    /// By place: the task that is laid out there.
    laid_out: Vec<Option<LaidOut>>,
    /// Tasks without a place, each with the number of its samples.
    pending: VecDeque<(u64, TaskIndex, u64)>,
    /// The task that was answered last, and the times of its runs.
    timed: Option<(u64, Vec<TimedRun>)>,
    /// The task that was sent last.
    newest: u64,
    /// The number of workers that make the tasks: the first ones.
    sharers: u32,
    /// By worker: true if it has made some of a task since it is one of them. Empty where their number does not change.
    have_made: Vec<bool>,
}

#[derive(Debug)]
struct LaidOut {
    seq: u64,
    index: TaskIndex,
    window: u32,
}

impl TaskSharing {
    /// For `workers` workers at most, and as many until [`share_among`](Self::share_among).
    #[must_use]
    pub fn new(memory: SharedTasks, windows: Arc<Windows>, workers: u32, keeps_whole: bool) -> Self {
        let laid_out = memory.places().map(|_| None).collect();
        let state = Mutex::new(Sent { laid_out, sharers: workers, ..Sent::default() });
        Self { memory, windows, workers, keeps_whole, state }
    }

    /// The memory.
    #[must_use]
    pub fn memory(&self) -> &SharedTasks {
        &self.memory
    }

    /// The most workers that there may be.
    #[must_use]
    pub fn workers(&self) -> u32 {
        self.workers
    }

    /// See [`Transport::share_among`](crate::transport::Transport::share_among).
    pub fn share_among(&self, workers: u32) {
        let state = &mut *self.lock();
        state.have_made.resize(self.workers as usize, false);
        let before = state.sharers.min(workers);
        state.have_made[before as usize..].fill(false);
        state.sharers = workers;
    }

    /// Returns true if a worker has something of a task that is not answered.
    #[must_use]
    pub fn has_claim(&self, worker: u32) -> bool {
        let _state = self.lock();
        self.memory.places().any(|place| self.memory.batch(place).is_with(worker))
    }

    /// Returns true if no worker has some of a task, the one that was sent last aside.
    #[must_use]
    pub fn is_open(&self) -> bool {
        let newest = self.lock().newest;
        self.memory.is_open(|seq| seq != newest)
    }

    /// Returns true if a worker has made some of a task that was answered, since it [shares](Self::share_among) tasks.
    #[must_use]
    pub fn has_made(&self, worker: u32) -> bool {
        self.lock().have_made.get(worker as usize).is_some_and(|&has| has)
    }

    /// Sends a task of `samples` samples to whichever workers are idle, or keeps it until there is room. Returns true
    /// if workers are to be woken.
    ///
    /// # Errors
    /// [`Error::TaskTooLarge`] when it can never be sent.
    pub fn put(&self, seq: u64, index: TaskIndex, samples: u64) -> Result<bool> {
        let (len, capacity) = (index.1.len() as u64, MOST_INDEX);
        if len > capacity {
            return Err(Error::TaskTooLarge { len, capacity });
        }
        let state = &mut *self.lock();
        state.newest = seq;
        state.pending.push_back((seq, index, samples));
        let flushed = self.flush(state);
        if flushed.is_err() {
            // The caller says that it was not sent.
            state.pending.retain(|&(pending, ..)| pending != seq);
        }
        flushed
    }

    /// Takes note that a task has its result, which lies `in_window` of its own or elsewhere. Returns true if workers are
    /// to be woken.
    ///
    /// # Errors
    /// As [`put`](Self::put).
    pub fn answered(&self, seq: u64, in_window: bool) -> Result<bool> {
        let state = &mut *self.lock();
        let is_it = |sent: &Option<LaidOut>| sent.as_ref().is_some_and(|sent| sent.seq == seq);
        let Some(place) = state.laid_out.iter().position(is_it) else { return Ok(false) };
        let sent = state.laid_out[place].take();
        if let Some(times) = self.memory.times(place) {
            let plan = self.memory.batch(place).plan();
            state.timed = Some((seq, run_times::take(times, plan.runs(), |run| samples_of(&plan, run))));
        }
        if !state.have_made.is_empty() {
            for worker in self.memory.batch(place).makers() {
                // A worker may have written anything there.
                if let Some(has_made) = state.have_made.get_mut(worker as usize) {
                    *has_made = true;
                }
            }
        }
        self.memory.batch(place).close();
        if let Some(LaidOut { index: (_, bytes), .. }) = &sent
            && self.memory.len_in_window(bytes.len() as u64) == 0
        {
            self.memory.words.file().punch(self.memory.index_at(place), bytes.len() as u64);
        }
        if !in_window && let Some(LaidOut { window, .. }) = sent {
            self.windows.put_back(window);
        }
        self.flush(state)
    }

    /// Returns the runs of a task that has just its result, if they are timed.
    pub fn take_timed(&self, seq: u64) -> Vec<TimedRun> {
        let timed = self.lock().timed.take_if(|(of, _)| *of == seq);
        timed.map_or_else(Vec::new, |(_, runs)| runs)
    }

    /// From now on only batches of `epoch` and of later ones are awaited.
    pub fn begin_epoch(&self, epoch: u64) {
        let state = &mut *self.lock();
        self.memory.word(AWAITED).store(epoch, Ordering::Relaxed);
        state.pending.retain(|&(seq, ..)| !is_before(epoch_of(seq), epoch));
        self.note_pending(state);
    }

    fn note_pending(&self, state: &Sent) {
        self.memory.pending().set(state.pending.front().map(|&(seq, ..)| epoch_of(seq)));
    }

    fn flush(&self, state: &mut Sent) -> Result<bool> {
        let laid_out = self.lay_out_pending(state);
        self.note_pending(state);
        laid_out
    }

    fn lay_out_pending(&self, state: &mut Sent) -> Result<bool> {
        let mut laid_out = false;
        while let Some(place) = state.laid_out.iter().position(Option::is_none)
            && let Some((_, (_, bytes), _)) = state.pending.front()
            // INVARIANT: one is free. All places together and the batches that the user keeps take fewer than all windows.
            && let Some(window) = self.windows.take()
        {
            if let Err(error) = self.memory.write_index(place, window, bytes) {
                self.windows.put_back(window);
                return Err(error);
            }
            let Some((seq, index, samples)) = state.pending.pop_front() else { break };
            let (kind, bytes) = &index;
            let per_run =
                if self.keeps_whole { samples } else { self.memory.per_run(samples, state.sharers) };
            let plan = Plan { seq, samples, per_run, kind: *kind as u64, len: bytes.len() as u64, window };
            self.memory.batch(place).lay_out(&plan, self.memory.window);
            state.laid_out[place] = Some(LaidOut { seq, index, window });
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
        state.laid_out[found].as_ref().map(|sent| (sent.seq, sent.index.clone()))
    }

    /// Gives back all windows that have no batch of the user's. The workers have ended.
    pub fn close(&self) {
        for sent in self.lock().laid_out.iter_mut().filter_map(Option::take) {
            self.windows.put_back(sent.window);
        }
        self.windows.close();
    }

    fn lock(&self) -> MutexGuard<'_, Sent> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::joint::Part;
    use crate::timing::Stamps;
    use crate::transport::message::TaskKind;
    use crate::transport::task_number::EPOCH_SHIFT;

    #[test]
    fn a_task_that_cannot_be_written_is_neither_sent_nor_kept_and_its_window_is_free() {
        let (memory, windows, _fd) = SharedTasks::create(2, 4096, false).unwrap();
        // The second window begins beyond the memory.
        let memory = SharedTasks { window: 1 << 40, ..memory };
        let windows = Arc::new(windows);
        let sharing = TaskSharing::new(memory, windows.clone(), 1, false);
        let index = || (TaskKind::Indices, vec![1; 16]);
        assert_eq!(sharing.put(0, index(), 2), Ok(true));
        assert!(sharing.put(1, index(), 2).is_err());
        assert!(sharing.lock().pending.is_empty());
        assert_eq!(windows.take(), Some(1));
    }

    #[test]
    fn an_index_larger_than_its_window_is_read_and_leaves_no_pages() {
        let (memory, windows, fd) = SharedTasks::create(2, 4096, false).unwrap();
        let sharing = TaskSharing::new(memory, Arc::new(windows), 1, false);
        let words = || sharing.memory().words_fd().unwrap().try_clone_to_owned().unwrap();
        let worker = SharedTasks::attach(words(), fd.as_fd(), 2, 4096, false).unwrap();
        let blocks = || rustix::fs::fstat(words()).unwrap().st_blocks;
        let before = blocks();
        let indices: Vec<_> = [1, 2].map(|byte| (TaskKind::Indices, vec![byte; 1 << 20])).into();
        for (seq, index) in (0..).zip(&indices) {
            assert_eq!(sharing.put(seq, index.clone(), 2), Ok(true));
        }
        for (seq, index) in (0..).zip(&indices) {
            let claimed = worker.claim(0, |_| true).unwrap();
            assert_eq!((claimed.plan.seq, worker.index(&claimed).as_ref()), (seq, Ok(index)));
            worker.finish(&claimed, Part::Unsent);
            sharing.answered(seq, false).unwrap();
        }
        assert!(blocks() <= before + 16, "{} blocks", blocks());
    }

    #[test]
    fn an_epoch_is_over_once_each_batch_before_it_is_sent_or_stale() {
        let (memory, windows, _fd) = SharedTasks::create(2, 4096, false).unwrap();
        let sharing = TaskSharing::new(memory, Arc::new(windows), 2, false);
        let of = |epoch: u64, task: u64| epoch << EPOCH_SHIFT | task;
        let put = |seq| sharing.put(seq, (TaskKind::Indices, vec![1; 8]), 1).unwrap();
        let memory = sharing.memory();
        let make = |seq| {
            let claimed = memory.claim(0, |of| of == seq).unwrap();
            assert!(memory.finish(&claimed, Part::Rows));
            claimed
        };
        (0..3).for_each(|task| _ = put(of(0, task)));
        put(of(1, 0));
        assert!(memory.are_over_before(0) && !memory.are_over_before(1));
        [0, 1].iter().for_each(|&task| memory.note_sent(&make(of(0, task))));
        // The last one has no place yet.
        assert!(!memory.are_over_before(1));
        sharing.answered(of(0, 0), false).unwrap();
        assert!(!memory.are_over_before(1));
        let last = make(of(0, 2));
        assert!(!memory.are_over_before(1));
        memory.note_sent(&last);
        assert!(memory.are_over_before(1) && !memory.are_over_before(2));
        sharing.answered(of(0, 1), false).unwrap();
        assert!(memory.claim(0, |seq| seq == of(1, 0)).is_some() && !memory.are_over_before(2));
        put(of(1, 1));
        put(of(2, 0));
        sharing.begin_epoch(2);
        assert!(memory.is_stale(of(1, 0)) && !memory.is_stale(of(2, 0)) && memory.are_over_before(2));
        assert_eq!(sharing.lock().pending.iter().map(|&(seq, ..)| seq).collect::<Vec<_>>(), [of(2, 0)]);
    }

    #[test]
    fn tasks_wait_for_a_place_and_the_earliest_is_claimed_first() {
        let (memory, windows, fd) = SharedTasks::create(2, 4096, true).unwrap();
        let sharing = TaskSharing::new(memory, Arc::new(windows), 2, false);
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
        assert!(!worker.finish(&first, Part::Bytes { offset: 64, len: 4 }));
        assert!(worker.begin_last(&second));
        assert_eq!(sharing.answered(0, false), Ok(true));
        assert_eq!(sharing.take_timed(1), []);
        assert_eq!(sharing.take_timed(0), [TimedRun { worker: 0, stamps, samples: 0..1 }]);
        assert_eq!(worker.claim(0, any).map(|claimed| claimed.plan.seq), Some(1));
        sharing.lose(0);
        assert_eq!(
            worker.claim(1, any).map(|claimed| (claimed.plan.seq, claimed.samples())),
            Some((1, 0..1))
        );
        assert_eq!(sharing.answered(9, false), Ok(false));
        assert!(matches!(
            sharing.put(9, (TaskKind::Indices, vec![0; MOST_INDEX as usize + 1]), 1),
            Err(Error::TaskTooLarge { .. })
        ));
    }

    #[test]
    fn tasks_are_cut_for_the_workers_that_share_them() {
        let (memory, windows, fd) = SharedTasks::create(3, 4096, false).unwrap();
        let sharing = TaskSharing::new(memory, Arc::new(windows), 4, false);
        let words = sharing.memory().words_fd().unwrap().try_clone_to_owned().unwrap();
        let worker = SharedTasks::attach(words, fd.as_fd(), 3, 4096, false).unwrap();
        let put = |seq| sharing.put(seq, (TaskKind::Indices, vec![0; 16]), 8).unwrap();
        let claim = |number| worker.claim(number, |_| true).unwrap();
        sharing.share_among(1);
        put(0);
        assert!(!sharing.is_open(), "the newest may not be seen yet");
        sharing.share_among(2);
        put(1);
        assert!(sharing.is_open());
        let first = claim(0);
        assert_eq!((first.plan.seq, first.samples()), (0, 0..8));
        assert!(!sharing.is_open());
        let second = [claim(1), claim(0)];
        assert_eq!((second[0].plan.seq, second[0].samples()), (1, 0..4));
        assert!(sharing.has_claim(1) && !sharing.has_claim(2));
        assert!(!worker.finish(&second[0], Part::Bytes { offset: 64, len: 4 }));
        assert!(!sharing.has_claim(1) && !sharing.has_made(1), "not before the batch is there");
        assert!(worker.begin_last(&second[1]));
        assert_eq!(sharing.answered(1, false), Ok(false));
        assert!(sharing.has_made(0) && sharing.has_made(1));
        assert!(sharing.has_claim(0), "of the first batch");
        sharing.share_among(1);
        sharing.share_among(4);
        assert_eq!([0, 1, 2, 9].map(|number| sharing.has_made(number)), [true, false, false, false]);
    }
}
