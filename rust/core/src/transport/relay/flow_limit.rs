//! The limit on batches that are being made, or made and not yet taken.

use std::collections::VecDeque;

use crate::sync::Arc;
use crate::transport::Control;

/// The limit in bytes, each batch counted as the largest of the last ones.
#[derive(Debug)]
pub(super) struct FlowLimit {
    most: u64,
    control: Arc<Control>,
    /// Bytes of the last batches that have arrived.
    recent: VecDeque<u64>,
    workers: Vec<Out>,
}

/// The batches of each worker that count.
const RECENT: usize = 4;

impl FlowLimit {
    pub(super) fn new(most: u64, control: Arc<Control>) -> Self {
        let workers = (0..control.geometry().workers).map(|_| Out::default()).collect();
        Self { most, control, recent: VecDeque::new(), workers }
    }

    /// A worker has begun, or has gone.
    pub(super) fn reset(&mut self, worker: u32) {
        self.workers[worker as usize] = Out::default();
    }

    /// Counts a task that asks for a batch. Returns false if it may not be sent yet: ask again soon.
    pub(super) fn may_send(&mut self, worker: u32, seq: u64) -> bool {
        for (at, out) in (0..).zip(&mut self.workers) {
            let results = self.control.worker(at).results;
            // Not at rest, so the two positions may not fit. What is committed later still counts as unanswered.
            out.take(results.len().unwrap_or(results.capacity()));
        }
        self.workers[worker as usize].next = Some(seq);
        let first = self.workers.iter().filter_map(Out::first).min();
        // INVARIANT: the first batch that is awaited can always be made, whatever was made before its turn.
        let may_send = first.is_none_or(|first| seq <= first) || self.is_next(seq) && self.has_room(worker);
        if may_send {
            self.workers[worker as usize].send(Some(seq));
        }
        may_send
    }

    /// Counts a task that asks for none, and is answered.
    pub(super) fn send_other(&mut self, worker: u32) {
        self.workers[worker as usize].send(None);
    }

    /// Counts a result: `bytes` of a batch.
    pub(super) fn answer(&mut self, worker: u32, bytes: Option<u64>) {
        self.workers[worker as usize].answer();
        self.recent.extend(bytes);
        if self.recent.len() > RECENT * self.workers.len() {
            self.recent.pop_front();
        }
    }

    /// A worker's iterable dataset has ended: it answers no other task of this epoch. Returns true if it was sent no
    /// task of the next one.
    pub(super) fn end_part(&mut self, worker: u32) -> bool {
        self.workers[worker as usize].end_part()
    }

    /// Returns true if no worker waits to be sent a task that comes before this one.
    fn is_next(&self, seq: u64) -> bool {
        self.workers.iter().filter_map(|out| out.next).all(|next| seq <= next)
    }

    fn has_room(&self, worker: u32) -> bool {
        let of_all: usize = self.workers.iter().map(|out| out.batches).sum();
        match self.recent.iter().max() {
            // Nothing is known yet: one for each worker.
            None => self.workers[worker as usize].batches == 0,
            Some(largest) => (of_all as u64 + 1).saturating_mul(*largest) <= self.most,
        }
    }
}

/// The tasks of one worker that are out: sent, and their results not yet taken.
#[derive(Debug, Default)]
struct Out {
    /// In the order in which they were sent. `None`: no batch is asked for.
    tasks: VecDeque<Option<u64>>,
    batches: usize,
    unanswered: usize,
    /// The batch that waits to be asked for.
    next: Option<u64>,
}

impl Out {
    fn send(&mut self, seq: Option<u64>) {
        self.tasks.push_back(seq);
        self.batches += usize::from(seq.is_some());
        self.unanswered += 1;
        self.next = None;
    }

    fn answer(&mut self) {
        self.unanswered = self.unanswered.saturating_sub(1);
    }

    fn end_part(&mut self) -> bool {
        let answered = self.tasks.len() - self.unanswered;
        let others = self.tasks.iter().skip(answered).take_while(|task| task.is_some()).count();
        let is_last = answered + others == self.tasks.len();
        self.tasks.drain(answered..answered + others);
        self.batches -= others;
        self.unanswered -= others;
        self.next = self.next.filter(|_| !is_last);
        is_last
    }

    /// Forgets what was taken, where `untaken` results are still in the ring.
    fn take(&mut self, untaken: u64) {
        while self.tasks.len() as u64 > self.unanswered as u64 + untaken {
            let taken = self.tasks.pop_front().flatten();
            self.batches -= usize::from(taken.is_some());
        }
    }

    /// The first batch that is out.
    fn first(&self) -> Option<u64> {
        self.tasks.iter().copied().flatten().next()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::engine::Engine;

    #[test]
    fn each_batch_counts_as_the_largest_of_the_last_ones() {
        let engine = Engine::new(2, 8, 4 << 20).unwrap();
        let mut limit = FlowLimit::new(100, engine.control().clone());
        assert!(limit.may_send(0, 0) && limit.may_send(1, 1));
        assert!(!limit.may_send(0, 2), "one for each worker at first");
        limit.recent.extend([30, 10]);
        assert!(limit.may_send(0, 2) && !limit.may_send(0, 4));
        assert!(!limit.may_send(1, 5), "another waits that comes before");
        limit.workers.iter_mut().for_each(|out| *out = Out::default());
        limit.workers[0].send(Some(0));
        limit.answer(1, Some(200));
        for _ in 0..RECENT * 2 {
            assert!(!limit.may_send(1, 1));
            limit.answer(1, Some(30));
        }
        assert!(limit.may_send(1, 1), "a huge one is forgotten");
    }

    #[test]
    fn tasks_after_the_end_of_a_part_are_out_no_more() {
        let mut out = Out::default();
        for seq in [Some(1), Some(2), Some(3), None, Some(4)] {
            out.send(seq);
        }
        out.answer();
        assert!(!out.end_part(), "the next epoch was begun");
        assert_eq!((out.batches, out.first()), (2, Some(1)));
        out.take(0);
        assert_eq!((out.batches, out.first()), (1, Some(4)));
        out.answer();
        out.answer();
        assert!(out.end_part());
        out.take(0);
        assert_eq!(out.batches, 0);
    }

    #[test]
    fn what_was_taken_is_out_no_more() {
        let mut out = Out::default();
        for seq in [Some(4), None, Some(6)] {
            out.send(seq);
        }
        assert_eq!((out.batches, out.first()), (2, Some(4)));
        out.answer();
        out.take(1);
        assert_eq!((out.batches, out.first()), (2, Some(4)), "it is there, and not taken");
        out.take(0);
        assert_eq!((out.batches, out.first()), (1, Some(6)));
        out.answer();
        out.answer();
        out.take(0);
        assert_eq!((out.batches, out.first()), (0, None));
    }
}
