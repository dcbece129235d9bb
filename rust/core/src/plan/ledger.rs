//! The part of an epoch that was handed to the caller, noted where it happens.
#![forbid(unsafe_code)]

use crate::number::usize_from;
use std::collections::VecDeque;

use super::fingerprint::fingerprint_of;
use super::ordinals::{OrdinalSet, Walk};

/// The tasks of an epoch from their reading on, and what came of them: one for each time that an epoch is iterated.
///
/// - [`read`](Self::read): the sampler gave a task's indices.
/// - [`begin_call`](Self::begin_call), [`record_got`](Self::record_got), [`record_raised`](Self::record_raised),
///   [`record_left_out`](Self::record_left_out): the caller asked for a batch, and what came. A call returns one batch:
///   the last one that it got.
/// - [`position`](Self::position): where the caller is.
///
/// A batch that was returned counts for both sums, and one that was passed without being returned counts only for
/// `passed_sum`: a batch that raised, once the next call has begun, or one that was left out.
///
/// A task costs one hash for each index, and O(1) for the rest, as long as batches come in order, and allocates only
/// while the number of tasks under way grows. A batch that comes before its turn may cost a search among the ranges of
/// missing ordinals; the memory then grows with the tasks between the first that is missing and the last.
#[derive(Debug)]
pub struct Ledger {
    /// The ordinals that are still to be read, past those of the base.
    walk: Walk,
    /// The base's and those of the tasks that are settled.
    delivered: OrdinalSet,
    batches: u64,
    /// Settled batches of this ledger that were returned.
    returned: u64,
    passed_sum: Option<u64>,
    sum: Option<u64>,
    /// The tasks from number `first` on. Those before it are settled.
    tasks: VecDeque<TaskSpan>,
    first: u64,
    current: Option<Current>,
}

#[derive(Debug, Clone, Copy)]
struct TaskSpan {
    /// The task has all ordinals from here that are not in the base.
    start: u64,
    stop: u64,
    /// None if its indices are no ints.
    sum: Option<u64>,
    is_settled: bool,
}

/// The last batch that was got in a call, which may still raise.
#[derive(Debug, Clone, Copy)]
struct Current {
    task: u64,
    has_raised: bool,
}

/// The position of a caller in an epoch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Position {
    /// The ordinals that were passed, with the base's: sorted half-open ranges that do not touch.
    pub ranges: Vec<(u64, u64)>,
    /// Batches that were passed, with the base's.
    pub batches: u64,
    /// The sum of the hashes of all samples in `ranges`. None if one of their indices is no int.
    pub passed_sum: Option<u64>,
    /// The sum of the hashes of the samples that were returned.
    pub sum: Option<u64>,
    /// The number of tasks up to the first that was not passed. Tasks count from 0 in each ledger, without the base's.
    pub tasks: u64,
}

impl Ledger {
    /// A ledger for the rest of an epoch, of which `base` was passed before: in `batches`, with these sums. At the
    /// beginning of an epoch the base is empty, and the numbers are 0.
    ///
    /// The sample of ordinal `k` has the place `place + k * step`: with a `DistributedSampler` `place` is where this
    /// rank begins, and `step` the number of ranks; else they are 0 and 1.
    #[must_use]
    pub fn new(
        base: OrdinalSet,
        place: u64,
        step: u64,
        passed_sum: Option<u64>,
        sum: Option<u64>,
        batches: u64,
    ) -> Self {
        Self {
            delivered: base.clone(),
            walk: Walk::new(base, place, step),
            batches,
            returned: 0,
            passed_sum,
            sum,
            tasks: VecDeque::new(),
            first: 0,
            current: None,
        }
    }

    /// A task was read: it has the next number, and the next `task_len` ordinals that are not in the base. `ints` are
    /// its indices, as many; `None` if one of them is no int, and then there are no sums once it is passed. Returns its
    /// number.
    pub fn read(&mut self, task_len: u64, ints: Option<impl Iterator<Item = i64>>) -> u64 {
        let left = self.walk.pass_set();
        let start = self.walk.at();
        let sum = if task_len <= left {
            let (place, step) = self.walk.place();
            let sum = ints.map(|ints| fingerprint_of(place, step, ints));
            self.walk.advance(task_len);
            sum
        } else {
            self.read_around(task_len, ints)
        };
        self.tasks.push_back(TaskSpan { start, stop: self.walk.at(), sum, is_settled: false });
        self.first + self.tasks.len() as u64 - 1
    }

    /// As [`read`](Self::read), for a batch that is one ordinal, whatever it has: of a batch sampler that cannot be
    /// read index by index. Its `j`-th index has the place `(k << 32) + j`, with `k` its ordinal.
    pub fn read_whole(&mut self, ints: Option<impl Iterator<Item = i64>>) -> u64 {
        let number = self.read(1, None::<std::iter::Empty<i64>>);
        if let Some(task) = self.tasks.back_mut() {
            task.sum = ints.map(|ints| fingerprint_of(task.start << 32, 1, ints));
        }
        number
    }

    /// The task that was read last will bring nothing, because it could not be sent. The next task gets its
    /// number and its ordinals are passed over.
    pub fn lose_last(&mut self) {
        self.tasks.pop_back();
    }

    /// The caller asks for the next batch. If the last call raised after it had got one, that batch is passed now.
    pub fn begin_call(&mut self) {
        if let Some(Current { task, has_raised }) = self.current.take() {
            self.settle(task, !has_raised);
        }
    }

    /// The batch of this task, which was read and not got before, is handed to the caller, unless the call raises yet.
    /// One that was got in the same call before is left out.
    ///
    /// # Panics
    /// For any other task: the numbers are this ledger's own.
    pub fn record_got(&mut self, task: u64) {
        self.record_left_out();
        let found = task.checked_sub(self.first).and_then(|at| self.tasks.get(usize_from(at)));
        assert!(found.is_some_and(|found| !found.is_settled), "task {task} was got, but is not under way");
        self.current = Some(Current { task, has_raised: false });
    }

    /// Records that a call raised. `returned` is the number of this ledger's batches that calls have returned. The
    /// batch that was got in it, if any, is taken back: it counts once the next call begins.
    pub fn record_raised(&mut self, returned: u64) {
        let is_returned = self.returned < returned;
        if let Some(current) = &mut self.current {
            // A call that raises before it has begun here finds the batch of the call before it.
            current.has_raised |= !is_returned;
        }
    }

    /// Returns the number of tasks up to the first that is not passed for good. O(1).
    #[must_use]
    pub fn settled(&self) -> u64 {
        self.first
    }

    /// The batch that was got in this call, if any, is passed and not returned, as with `on_error="skip"`. The call
    /// goes on: it may get another batch, or find the end, which is not recorded.
    pub fn record_left_out(&mut self) {
        if let Some(Current { task, .. }) = self.current.take() {
            self.settle(task, false);
        }
    }

    /// Returns the position of a caller. `returned` is the number of this ledger's batches that calls have returned: a
    /// batch that was got in a call that still runs does not count. Costs as much as there are ranges, and tasks under
    /// way.
    #[must_use]
    pub fn position(&self, returned: u64) -> Position {
        let mut delivered = self.delivered.clone();
        let (mut batches, mut passed_sum, mut sum) = (self.batches, self.passed_sum, self.sum);
        let is_returned = self.returned < returned;
        let current = self.current.filter(|current| is_returned && !current.has_raised);
        let current = current.map(|current| current.task);
        if let Some(task) = current {
            let task = self.tasks[usize_from(task - self.first)];
            delivered.insert(task.start, task.stop);
            batches += 1;
            passed_sum = added(passed_sum, task.sum);
            sum = added(sum, task.sum);
        }
        let numbered = (self.first..).zip(&self.tasks);
        let in_turn =
            numbered.take_while(|&(number, task)| task.is_settled || current == Some(number)).count();
        Position {
            ranges: delivered.ranges().collect(),
            batches,
            passed_sum,
            sum,
            tasks: self.first + in_turn as u64,
        }
    }

    /// Reads a task that has ordinals on both sides of some in the base, and returns its sum.
    #[cold]
    fn read_around(&mut self, task_len: u64, mut ints: Option<impl Iterator<Item = i64>>) -> Option<u64> {
        let (mut sum, mut left) = (0_u64, task_len);
        while left > 0 {
            let many = self.walk.pass_set().min(left);
            if let Some(ints) = &mut ints {
                let (place, step) = self.walk.place();
                sum = sum.wrapping_add(fingerprint_of(place, step, ints.take(usize_from(many))));
            }
            self.walk.advance(many);
            left -= many;
        }
        ints.map(|_| sum)
    }

    /// A batch is passed for good.
    fn settle(&mut self, number: u64, is_returned: bool) {
        let task = &mut self.tasks[usize_from(number - self.first)];
        task.is_settled = true;
        let &mut TaskSpan { start, stop, sum, .. } = task;
        // Ordinals between them that the task does not have are in the base.
        self.delivered.insert(start, stop);
        self.batches += 1;
        self.passed_sum = added(self.passed_sum, sum);
        if is_returned {
            self.returned += 1;
            self.sum = added(self.sum, sum);
        }
        while self.tasks.front().is_some_and(|task| task.is_settled) {
            self.tasks.pop_front();
            self.first += 1;
        }
    }
}

fn added(one: Option<u64>, other: Option<u64>) -> Option<u64> {
    Some(one?.wrapping_add(other?))
}

#[cfg(test)]
mod tests;
