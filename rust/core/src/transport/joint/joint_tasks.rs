//! The main process's end of tasks that worker processes share.

use super::tasks::{LaidOut, Tasks};
use super::windows::JointWindows;
use super::{Joint, JointMemory, MOST_INDEX, samples_of};
use crate::error::{Error, Result};
use crate::sync::{Arc, Lock};
use crate::transport::message::TaskIndex;
use crate::transport::run_times::{self, TimedRun};

/// The main process's end.
#[derive(Debug)]
pub struct JointTasks {
    memory: JointMemory,
    windows: Arc<JointWindows>,
    /// The most that there may be.
    workers: u32,
    state: Lock<JointState>,
}

#[derive(Debug)]
struct JointState {
    /// With the window of each.
    tasks: Tasks<TaskIndex, u32>,
    /// The task that was answered last, and the times of its runs.
    timed: Option<(u64, Vec<TimedRun>)>,
}

impl JointTasks {
    /// For `workers` workers at most, and as many until [`share_among`](Joint::share_among).
    #[must_use]
    pub fn new(memory: JointMemory, windows: Arc<JointWindows>, workers: u32, keeps_whole: bool) -> Self {
        let state =
            Lock::new(JointState { tasks: Tasks::new(memory.places, workers, keeps_whole), timed: None });
        Self { memory, windows, workers, state }
    }

    /// The memory.
    #[must_use]
    pub fn memory(&self) -> &JointMemory {
        &self.memory
    }

    /// The most workers that there may be.
    #[must_use]
    pub fn workers(&self) -> u32 {
        self.workers
    }

    /// Sends a task of `samples` samples to whichever workers are idle, or keeps it until there is room. Returns how
    /// many of them it takes.
    ///
    /// # Errors
    /// [`Error::Config`] when it can never be sent.
    pub fn put(&self, seq: u64, index: TaskIndex, samples: u64) -> Result<u32> {
        let (len, capacity) = (index.1.len() as u64, MOST_INDEX);
        if len > capacity {
            return Err(Error::task_too_large(len, capacity));
        }
        let tasks = &mut self.state.lock().tasks;
        tasks.add(seq, index, samples);
        let laid_out = self.lay_out(tasks);
        if laid_out.is_err() {
            tasks.take_back(seq);
        }
        laid_out
    }

    /// Takes note that a task has its result, which lies `in_window` of its own or elsewhere. Returns how many workers
    /// what follows takes.
    ///
    /// # Errors
    /// As [`put`](Self::put).
    pub fn answered(&self, seq: u64, in_window: bool) -> Result<u32> {
        let JointState { tasks, timed } = &mut *self.state.lock();
        let Some(place) = tasks.place_of(seq) else { return Ok(0) };
        let claims = self.memory.claims();
        if let Some(times) = self.memory.times(place) {
            let plan = claims.batch(place).plan();
            *timed = Some((seq, run_times::take(times, plan.runs(), |run| samples_of(&plan, run))));
        }
        if let Some(LaidOut { index: (_, bytes), kept: window, .. }) = tasks.close(claims, place) {
            self.memory.forget_index(place, bytes.len() as u64);
            if !in_window {
                self.windows.put_back(window);
            }
        }
        self.lay_out(tasks)
    }

    /// Returns the runs of a task that has just its result, if they are timed.
    pub fn take_timed(&self, seq: u64) -> Vec<TimedRun> {
        let timed = self.state.lock().timed.take_if(|(of, _)| *of == seq);
        timed.map_or_else(Vec::new, |(_, runs)| runs)
    }

    /// From now on only batches of `epoch` and of later ones are awaited.
    pub fn begin_epoch(&self, epoch: u64) {
        self.state.lock().tasks.begin_epoch(self.memory.claims(), epoch);
    }

    fn lay_out(&self, tasks: &mut Tasks<TaskIndex, u32>) -> Result<u32> {
        tasks.lay_out(self.memory.claims(), self.memory.window, |place, (kind, bytes)| {
            // INVARIANT: one is free. All places together and the batches that the user keeps take fewer than all windows.
            let Some(window) = self.windows.take() else { return Ok(None) };
            self.memory
                .write_index(place, window, bytes)
                .inspect_err(|_| self.windows.put_back(window))
                .map(|()| Some(([*kind as u64, bytes.len() as u64], window, window)))
        })
    }

    /// Frees what a worker had claimed, whose process has ended and whose results were taken.
    pub fn lose(&self, worker: u32) {
        self.state.lock().tasks.lose(self.memory.claims(), worker);
    }

    /// The task of which a worker has claimed something.
    #[must_use]
    pub fn in_hand(&self, worker: u32) -> Option<(u64, TaskIndex)> {
        let state = self.state.lock();
        let found = state.tasks.in_hand(self.memory.claims(), worker)?;
        Some((found.seq, found.index.clone()))
    }

    /// Gives back all windows that have no batch of the user's. The workers have ended.
    pub fn close(&self) {
        self.state.lock().tasks.close_all().for_each(|task| self.windows.put_back(task.kept));
        self.windows.close();
    }
}

impl Joint for JointTasks {
    fn share_among(&self, workers: u32) {
        self.state.lock().tasks.share_among(workers);
    }

    fn has_claim(&self, worker: u32) -> bool {
        self.state.lock().tasks.has_claim(self.memory.claims(), worker)
    }

    fn is_open(&self) -> bool {
        self.state.lock().tasks.is_open(self.memory.claims())
    }

    fn has_made(&self, worker: u32) -> bool {
        self.state.lock().tasks.has_made(worker)
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;
    use crate::joint::Part;
    use crate::timing::Stamps;
    use crate::transport::joint::Claimed;
    use crate::transport::message::TaskKind;
    use crate::transport::task_number::EPOCH_SHIFT;

    #[test]
    fn a_task_that_cannot_be_written_is_neither_sent_nor_kept_and_its_window_is_free() {
        let (memory, windows, _fd) = JointMemory::create(2, 4096, false).unwrap();
        // The second window begins beyond the memory.
        let memory = JointMemory { window: 1 << 40, ..memory };
        let windows = Arc::new(windows);
        let tasks = JointTasks::new(memory, windows.clone(), 1, false);
        let index = || (TaskKind::Indices, vec![1; 16]);
        assert_eq!(tasks.put(0, index(), 2), Ok(1));
        assert!(tasks.put(1, index(), 2).is_err());
        assert!(tasks.state.lock().tasks.waiting().is_empty());
        assert_eq!(windows.take(), Some(1));
    }

    #[test]
    fn an_index_larger_than_its_window_is_read_and_leaves_no_pages() {
        let (memory, windows, fd) = JointMemory::create(2, 4096, false).unwrap();
        let tasks = JointTasks::new(memory, Arc::new(windows), 1, false);
        let words = || tasks.memory().words_fd().unwrap().try_clone_to_owned().unwrap();
        let worker = JointMemory::attach(words(), fd.as_fd(), 2, 4096, false).unwrap();
        let blocks = || rustix::fs::fstat(words()).unwrap().st_blocks;
        let before = blocks();
        let indices: Vec<_> = [1, 2].map(|byte| (TaskKind::Indices, vec![byte; 1 << 20])).into();
        for (seq, index) in (0..).zip(&indices) {
            assert_eq!(tasks.put(seq, index.clone(), 2), Ok(1));
        }
        for (seq, index) in (0..).zip(&indices) {
            let claimed = worker.claims().claim(0, |_| true).unwrap();
            assert_eq!((claimed.plan.seq, worker.index(&claimed).as_ref()), (seq, Ok(index)));
            worker.claims().of(&claimed).finish(claimed.claim, Part::Unsent);
            tasks.answered(seq, false).unwrap();
        }
        assert!(blocks() <= before + 16, "{} blocks", blocks());
    }

    #[test]
    fn an_epoch_is_over_once_each_batch_before_it_is_sent_or_stale() {
        let (memory, windows, _fd) = JointMemory::create(2, 4096, false).unwrap();
        let tasks = JointTasks::new(memory, Arc::new(windows), 2, false);
        let of = |epoch: u64, task: u64| epoch << EPOCH_SHIFT | task;
        let put = |seq| tasks.put(seq, (TaskKind::Indices, vec![1; 8]), 1).unwrap();
        let memory = tasks.memory();
        let make = |seq| {
            let claimed = memory.claims().claim(0, |of| of == seq).unwrap();
            assert!(memory.claims().of(&claimed).finish(claimed.claim, Part::Rows));
            claimed
        };
        (0..3).for_each(|task| _ = put(of(0, task)));
        put(of(1, 0));
        assert!(memory.claims().are_over_before(0) && !memory.claims().are_over_before(1));
        let send = |claimed: &Claimed| memory.claims().of(claimed).note_sent(claimed.claim);
        [0, 1].iter().for_each(|&task| send(&make(of(0, task))));
        // The last one has no place yet.
        assert!(!memory.claims().are_over_before(1));
        tasks.answered(of(0, 0), false).unwrap();
        assert!(!memory.claims().are_over_before(1));
        let last = make(of(0, 2));
        assert!(!memory.claims().are_over_before(1));
        send(&last);
        assert!(memory.claims().are_over_before(1) && !memory.claims().are_over_before(2));
        tasks.answered(of(0, 1), false).unwrap();
        assert!(
            memory.claims().claim(0, |seq| seq == of(1, 0)).is_some() && !memory.claims().are_over_before(2)
        );
        put(of(1, 1));
        put(of(2, 0));
        tasks.begin_epoch(2);
        assert!(
            memory.claims().is_stale(of(1, 0))
                && !memory.claims().is_stale(of(2, 0))
                && memory.claims().are_over_before(2)
        );
        assert_eq!(tasks.state.lock().tasks.waiting(), [of(2, 0)]);
    }

    #[test]
    fn tasks_wait_for_a_place_and_the_earliest_is_claimed_first() {
        let (memory, windows, fd) = JointMemory::create(2, 4096, true).unwrap();
        let tasks = JointTasks::new(memory, Arc::new(windows), 2, false);
        let words = tasks.memory().words_fd().unwrap().try_clone_to_owned().unwrap();
        let worker = JointMemory::attach(words, fd.as_fd(), 2, 4096, true).unwrap();
        for seq in 0..3 {
            let index = (TaskKind::Indices, vec![seq as u8; 16]);
            assert_eq!(tasks.put(seq, index, 2), Ok(if seq < 2 { 2 } else { 0 }));
        }
        let any = |_| true;
        let first = worker.claims().claim(0, any).unwrap();
        assert_eq!((first.plan.seq, first.samples()), (0, 0..1));
        assert_eq!(worker.index(&first), Ok((TaskKind::Indices, vec![0; 16])));
        assert_eq!(tasks.in_hand(0).map(|(seq, _)| seq), Some(0));
        let second = worker.claims().claim(1, any).unwrap();
        assert_eq!(worker.claims().claim(1, |seq| seq > 1).map(|claimed| claimed.plan.seq), None);
        let stamps = Stamps { got: 3, made: 5, ..Stamps::default() };
        worker.note_times(&first, 0, &stamps);
        assert!(!worker.claims().of(&first).finish(first.claim, Part::Bytes { offset: 64, len: 4 }));
        assert!(worker.claims().of(&second).begin_last(second.claim));
        assert_eq!(tasks.answered(0, false), Ok(2));
        assert_eq!(tasks.take_timed(1), []);
        assert_eq!(tasks.take_timed(0), [TimedRun { worker: 0, stamps, samples: 0..1 }]);
        assert_eq!(worker.claims().claim(0, any).map(|claimed| claimed.plan.seq), Some(1));
        tasks.lose(0);
        assert_eq!(
            worker.claims().claim(1, any).map(|claimed| (claimed.plan.seq, claimed.samples())),
            Some((1, 0..1))
        );
        assert_eq!(tasks.answered(9, false), Ok(0));
        assert!(matches!(
            tasks.put(9, (TaskKind::Indices, vec![0; MOST_INDEX as usize + 1]), 1),
            Err(Error::Config(_))
        ));
    }

    #[test]
    fn tasks_are_cut_for_the_workers_that_share_them() {
        let (memory, windows, fd) = JointMemory::create(3, 4096, false).unwrap();
        let tasks = JointTasks::new(memory, Arc::new(windows), 4, false);
        let words = tasks.memory().words_fd().unwrap().try_clone_to_owned().unwrap();
        let worker = JointMemory::attach(words, fd.as_fd(), 3, 4096, false).unwrap();
        let put = |seq| tasks.put(seq, (TaskKind::Indices, vec![0; 16]), 8).unwrap();
        let claim = |number| worker.claims().claim(number, |_| true).unwrap();
        tasks.share_among(1);
        put(0);
        assert!(!tasks.is_open(), "the newest may not be seen yet");
        tasks.share_among(2);
        put(1);
        assert!(tasks.is_open());
        let first = claim(0);
        assert_eq!((first.plan.seq, first.samples()), (0, 0..8));
        assert!(!tasks.is_open());
        let second = [claim(1), claim(0)];
        assert_eq!((second[0].plan.seq, second[0].samples()), (1, 0..4));
        assert!(tasks.has_claim(1) && !tasks.has_claim(2));
        assert!(!worker.claims().of(&second[0]).finish(second[0].claim, Part::Bytes { offset: 64, len: 4 }));
        assert!(!tasks.has_claim(1) && !tasks.has_made(1), "not before the batch is there");
        assert!(worker.claims().of(&second[1]).begin_last(second[1].claim));
        assert_eq!(tasks.answered(1, false), Ok(0));
        assert!(tasks.has_made(0) && tasks.has_made(1));
        assert!(tasks.has_claim(0), "of the first batch");
        tasks.share_among(1);
        tasks.share_among(4);
        assert_eq!([0, 1, 2, 9].map(|number| tasks.has_made(number)), [true, false, false, false]);
    }
}
