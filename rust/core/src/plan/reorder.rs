//! Results come in any order and are handed out in the order of their tasks.
#![forbid(unsafe_code)]

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
/// Tasks lie in a ring at their sequence number. An `in_order=False` epoch may go far ahead of one slow task: such a
/// task moves aside, so that memory grows with the tasks that are alive and not with the distance. Every operation is
/// O(1), amortised, and does not allocate once the ring has its size; for a task that was moved aside it takes a search
/// among those.
#[derive(Debug)]
pub struct ReorderBuffer<T> {
    /// INVARIANT: the length is zero or a power of two, and a task lies at its `seq` modulo the length.
    ring: Vec<Option<Entry<T>>>,
    /// Tasks whose location another one needed.
    aside: Vec<Entry<T>>,
    /// Tasks in the ring and aside.
    alive: usize,
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

#[derive(Clone, Copy)]
enum TaskLocation {
    Ring(usize),
    Aside(usize),
}

impl<T> ReorderBuffer<T> {
    /// An empty buffer; it allocates with the first task.
    pub fn new() -> Self {
        Self { ring: Vec::new(), aside: Vec::new(), alive: 0, send_idx: 0, rcvd_idx: 0, outstanding: 0 }
    }

    /// A task goes to `worker`; returns its sequence number.
    pub fn send(&mut self, worker: u32) -> u64 {
        let seq = self.send_idx;
        self.send_idx += 1;
        self.outstanding += 1;
        self.alive += 1;
        self.insert(Entry { seq, worker, state: TaskState::Sent });
        seq
    }

    /// The result of task `seq` has come; [`next`](Self::next) hands it out in its turn.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if no result of that task is awaited.
    pub fn arrive(&mut self, seq: u64, data: T) -> Result<()> {
        let location = self.awaited(seq)?;
        self.outstanding -= 1;
        self.at(location).state = TaskState::Arrived(data);
        Ok(())
    }

    /// The result of task `seq` has come and is handed out at once, as `in_order=False` does. Returns its worker.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if no result of that task is awaited.
    pub fn take(&mut self, seq: u64) -> Result<u32> {
        let location = self.awaited(seq)?;
        self.outstanding -= 1;
        if seq == self.rcvd_idx {
            self.rcvd_idx += 1;
        }
        Ok(self.remove(location).worker)
    }

    /// Instead of a result, task `seq` brought the end of its worker's part of an iterable dataset. Returns the worker,
    /// which must be deactivated; then one more task may be sent. `next` passes over the task in its turn.
    ///
    /// # Errors
    /// [`Error::Corrupt`] if no result of that task is awaited.
    pub fn record_end(&mut self, seq: u64) -> Result<u32> {
        let location = self.awaited(seq)?;
        self.outstanding -= 1;
        let task = self.at(location);
        task.state = TaskState::Ended;
        Ok(task.worker)
    }

    /// Takes the result whose turn it is, or says whose it is. Tasks that will bring nothing, because their worker is
    /// not `active` and no result has arrived, are passed over and forgotten.
    pub fn next(&mut self, active: impl Fn(u32) -> bool) -> Next<T> {
        while self.rcvd_idx < self.send_idx {
            let seq = self.rcvd_idx;
            if let Some(location) = self.find(seq) {
                let task = self.at(location);
                let worker = task.worker;
                match task.state {
                    TaskState::Arrived(_) => {}
                    TaskState::Sent if active(worker) => return Next::Wait { seq, worker },
                    TaskState::Sent | TaskState::Ended => {}
                }
                self.rcvd_idx += 1;
                if let TaskState::Arrived(data) = self.remove(location).state {
                    return Next::Ready { seq, worker, data };
                }
            } else {
                self.rcvd_idx += 1;
            }
        }
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

    /// The tasks whose results have not arrived, each with its worker, in no order. Looks at every task.
    pub fn awaited_tasks(&self) -> impl Iterator<Item = (u64, u32)> {
        let tasks = self.ring.iter().flatten().chain(&self.aside);
        tasks.filter(|task| matches!(task.state, TaskState::Sent)).map(|task| (task.seq, task.worker))
    }

    /// The tasks of `from` without a result are those of `to` from now on. Returns their number.
    pub fn reassign(&mut self, from: u32, to: u32) -> u64 {
        let tasks = self.ring.iter_mut().flatten().chain(&mut self.aside);
        let of_from = tasks.filter(|task| task.worker == from && matches!(task.state, TaskState::Sent));
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
        self.ring.fill_with(|| None);
        self.aside.clear();
        (self.alive, self.send_idx, self.rcvd_idx, self.outstanding) = (0, 0, 0, 0);
    }

    fn index(&self, seq: u64) -> usize {
        (seq & (self.ring.len() as u64).wrapping_sub(1)) as usize
    }

    fn insert(&mut self, task: Entry<T>) {
        if self.alive * 2 > self.ring.len() {
            self.grow();
        }
        self.put(task);
    }

    fn put(&mut self, task: Entry<T>) {
        let index = self.index(task.seq);
        let older = self.ring[index].replace(task);
        self.aside.extend(older);
    }

    fn grow(&mut self) {
        let len = (self.ring.len() * 2).max(8);
        let mut tasks: Vec<_> = self.ring.drain(..).flatten().chain(self.aside.drain(..)).collect();
        self.ring.resize_with(len, || None);
        // If two want the same location, the older one moves aside, here as in `insert`.
        tasks.sort_unstable_by_key(|task| task.seq);
        tasks.into_iter().for_each(|task| self.put(task));
    }

    fn find(&self, seq: u64) -> Option<TaskLocation> {
        let index = self.index(seq);
        match self.ring.get(index) {
            Some(Some(task)) if task.seq == seq => Some(TaskLocation::Ring(index)),
            _ => self.aside.iter().position(|task| task.seq == seq).map(TaskLocation::Aside),
        }
    }

    fn awaited(&mut self, seq: u64) -> Result<TaskLocation> {
        match self.find(seq) {
            Some(location) if matches!(self.at(location).state, TaskState::Sent) => Ok(location),
            found => Err(self.unexpected(seq, found.is_some())),
        }
    }

    fn at(&mut self, location: TaskLocation) -> &mut Entry<T> {
        match location {
            TaskLocation::Ring(index) => self.ring[index].as_mut().expect("a location that was just found"),
            TaskLocation::Aside(index) => &mut self.aside[index],
        }
    }

    fn remove(&mut self, location: TaskLocation) -> Entry<T> {
        self.alive -= 1;
        match location {
            TaskLocation::Ring(index) => self.ring[index].take().expect("a location that was just found"),
            TaskLocation::Aside(index) => self.aside.swap_remove(index),
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
        assert!(buffer.ring.len() <= 8 && buffer.aside.capacity() <= 8);
        for slow in [0, 1, 2] {
            assert_eq!(buffer.next(|_| true), Next::Wait { seq: slow.into(), worker: slow });
            assert_eq!(buffer.take(slow.into()), Ok(slow));
        }
        assert_eq!(buffer.next(|_| true), Next::End);
        assert_eq!((buffer.rcvd_idx(), buffer.alive), (100_003, 0));
    }
}
