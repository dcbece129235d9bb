//! Results come in any order and are handed out in the order of their tasks.
#![forbid(unsafe_code)]

use std::collections::VecDeque;

use crate::number::usize_from;
use crate::{Error, Result};

/// The result of [`ReorderBuffer::next`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Next<T> {
    /// The result whose turn it is; it is out of the buffer.
    Ready {
        /// The task's sequence number.
        seq: u64,
        /// The worker that did it.
        worker: u32,
        /// The result.
        data: T,
    },
    /// The result whose turn it is has not arrived.
    Wait {
        /// The task's sequence number.
        seq: u64,
        /// The worker that does the task.
        worker: u32,
    },
    /// No task is left whose result will come.
    End,
}

/// The tasks of an epoch from the first that was not handed out to the last that was sent, with what has arrived.
///
/// MIRRORS torch dataloader.py::_next_data (`_task_info`, `_rcvd_idx`, `_send_idx`, `_tasks_outstanding`)
///
/// Tasks stand in the order of their numbers, so a task is found at its distance from the last one. Where `in_order=False`
/// has taken some out behind a slow one, a binary search finds that. Memory grows with the tasks that are alive, and not
/// with the distance of a slow one from the last.
#[derive(Debug)]
pub struct ReorderBuffer<T> {
    /// INVARIANT: sorted by `seq`, each once.
    tasks: VecDeque<Entry<T>>,
    send_idx: u64,
    rcvd_idx: u64,
    outstanding: u64,
}

#[derive(Debug)]
struct Entry<T> {
    seq: u64,
    worker: u32,
    state: TaskState<T>,
}

#[derive(Debug)]
enum TaskState<T> {
    Sent,
    Arrived(T),
    /// The worker's part of an iterable dataset had ended.
    Ended,
}

impl<T> ReorderBuffer<T> {
    /// An empty buffer; it allocates with the first task.
    pub fn new() -> Self {
        Self { tasks: VecDeque::new(), send_idx: 0, rcvd_idx: 0, outstanding: 0 }
    }

    /// A task goes to `worker`; returns its sequence number.
    pub fn send(&mut self, worker: u32) -> u64 {
        let seq = self.send_idx;
        self.send_idx += 1;
        self.outstanding += 1;
        self.tasks.push_back(Entry { seq, worker, state: TaskState::Sent });
        seq
    }

    /// The result of task `seq` has come; [`next`](Self::next) hands it out in its turn.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if no result of that task is awaited.
    pub fn arrive(&mut self, seq: u64, data: T) -> Result<()> {
        let at = self.awaited(seq)?;
        self.outstanding -= 1;
        self.tasks[at].state = TaskState::Arrived(data);
        Ok(())
    }

    /// The result of task `seq` has come and is handed out at once, as `in_order=False` does. Returns its worker.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if no result of that task is awaited.
    pub fn take(&mut self, seq: u64) -> Result<u32> {
        let at = self.awaited(seq)?;
        self.outstanding -= 1;
        if seq == self.rcvd_idx {
            self.rcvd_idx += 1;
        }
        // The first, or the one behind a slow one: nothing else moves.
        let taken = if at < 2 { self.tasks.swap_remove_front(at) } else { self.tasks.remove(at) };
        Ok(taken.expect("a task that was just found").worker)
    }

    /// Instead of a result, task `seq` brought the end of its worker's part of an iterable dataset. Returns the worker,
    /// which must be deactivated; then one more task may be sent. `next` passes over the task in its turn.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if no result of that task is awaited.
    pub fn record_end(&mut self, seq: u64) -> Result<u32> {
        let at = self.awaited(seq)?;
        self.outstanding -= 1;
        let task = &mut self.tasks[at];
        task.state = TaskState::Ended;
        Ok(task.worker)
    }

    /// Takes the result whose turn it is, or says whose it is. Tasks that will bring nothing, because their worker is
    /// not `active` and no result has arrived, are passed over and forgotten.
    pub fn next(&mut self, active: impl Fn(u32) -> bool) -> Next<T> {
        while let Some(&Entry { seq, worker, ref state }) = self.tasks.front() {
            self.rcvd_idx = seq;
            if matches!(state, TaskState::Sent) && active(worker) {
                return Next::Wait { seq, worker };
            }
            self.rcvd_idx += 1;
            if let Some(Entry { state: TaskState::Arrived(data), .. }) = self.tasks.pop_front() {
                return Next::Ready { seq, worker, data };
            }
        }
        self.rcvd_idx = self.send_idx;
        Next::End
    }

    /// Returns the number of tasks that were sent and brought nothing so far: torch's `_tasks_outstanding`. Tasks that
    /// an inactive worker will never answer are counted too.
    pub fn outstanding(&self) -> u64 {
        self.outstanding
    }

    /// Returns true if a result of `worker` has not arrived. Looks at every task.
    pub fn awaits(&self, worker: u32) -> bool {
        self.awaited_tasks().any(|(_, of)| of == worker)
    }

    /// The tasks whose results have not arrived, each with its worker, in the order of their numbers. Looks at every task.
    pub fn awaited_tasks(&self) -> impl Iterator<Item = (u64, u32)> {
        self.tasks
            .iter()
            .filter(|task| matches!(task.state, TaskState::Sent))
            .map(|task| (task.seq, task.worker))
    }

    /// The tasks of `from` without a result are those of `to` from now on. Returns their number.
    pub fn reassign(&mut self, from: u32, to: u32) -> u64 {
        let of_from =
            self.tasks.iter_mut().filter(|task| task.worker == from && matches!(task.state, TaskState::Sent));
        of_from.map(|task| task.worker = to).count() as u64
    }

    /// The sequence number of the next task.
    pub fn send_idx(&self) -> u64 {
        self.send_idx
    }

    /// The sequence number whose turn it is.
    pub fn rcvd_idx(&self) -> u64 {
        self.rcvd_idx
    }

    /// A new epoch: drops every task and result, and counts from 0 again. A late result of an old task is the caller's
    /// to recognise: the numbers are the same.
    pub fn reset(&mut self) {
        self.tasks.clear();
        (self.send_idx, self.rcvd_idx, self.outstanding) = (0, 0, 0);
    }

    fn awaited(&self, seq: u64) -> Result<usize> {
        let at = self.tasks.len().wrapping_sub(usize_from(self.send_idx.wrapping_sub(seq)));
        let is_there = self.tasks.get(at).is_some_and(|task| task.seq == seq);
        match if is_there { Ok(at) } else { self.tasks.binary_search_by_key(&seq, |task| task.seq) } {
            Ok(at) if matches!(self.tasks[at].state, TaskState::Sent) => Ok(at),
            found => Err(self.unexpected(seq, found.is_ok())),
        }
    }

    #[cold]
    fn unexpected(&self, seq: u64, known: bool) -> Error {
        let (first, end) = (self.rcvd_idx, self.send_idx);
        let why = if known { "which has brought its result before" } else { "which is not awaited" };
        Error::Corrupt(format!(
            "a worker sent the result of task {seq}, {why}; tasks under way lie in {first}..{end}; stop the worker and \
             start a new one"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_is_awaited_until_its_last_result_has_arrived() {
        let mut buffer = ReorderBuffer::new();
        let tasks: Vec<_> = [0, 1, 1].map(|worker| buffer.send(worker)).into();
        assert!(buffer.awaits(0) && buffer.awaits(1) && !buffer.awaits(2));
        assert_eq!(buffer.awaited_tasks().collect::<Vec<_>>(), [(0, 0), (1, 1), (2, 1)]);
        buffer.arrive(tasks[2], "kept for its turn").unwrap();
        assert!(buffer.awaits(1));
        buffer.record_end(tasks[1]).unwrap();
        assert!(!buffer.awaits(1) && buffer.awaits(0));
        assert_eq!(buffer.awaited_tasks().collect::<Vec<_>>(), [(0, 0)]);
    }

    #[test]
    fn tasks_of_a_worker_become_those_of_another() {
        let mut buffer = ReorderBuffer::new();
        let tasks: Vec<_> = [0, 1, 1].map(|worker| buffer.send(worker)).into();
        buffer.arrive(tasks[1], ()).unwrap();
        assert_eq!(buffer.reassign(1, 0), 1);
        assert_eq!(buffer.awaited_tasks().collect::<Vec<_>>(), [(0, 0), (2, 0)]);
    }

    #[test]
    fn memory_grows_with_the_tasks_and_not_with_their_distance() {
        let mut buffer = ReorderBuffer::<()>::new();
        for slow in [0, 1, 2] {
            assert_eq!(buffer.send(slow), slow.into());
        }
        for _ in 0..100_000 {
            let seq = buffer.send(3);
            assert_eq!(buffer.take(seq), Ok(3));
        }
        assert!(buffer.tasks.capacity() <= 8);
        for slow in [0, 1, 2] {
            assert_eq!(buffer.next(|_| true), Next::Wait { seq: slow.into(), worker: slow });
            assert_eq!(buffer.take(slow.into()), Ok(slow));
        }
        assert_eq!(buffer.next(|_| true), Next::End);
        assert_eq!((buffer.rcvd_idx(), buffer.tasks.len()), (100_003, 0));
    }
}
