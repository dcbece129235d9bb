//! The limit on batches that are being made, or made and not yet taken.

use std::collections::VecDeque;

/// The limit in bytes, each batch counted as the largest of the last ones.
#[derive(Debug)]
pub(super) struct FlowLimit {
    /// `None`: slots are the limit.
    most: Option<u64>,
    /// Bytes of the last batches that have arrived.
    recent: VecDeque<u64>,
    /// The number of them that count.
    kept: usize,
}

/// The batches of each worker that count.
const RECENT: usize = 4;

impl FlowLimit {
    pub(super) fn new(most: Option<u64>, workers: usize) -> Self {
        let kept = RECENT * workers;
        Self { most, recent: VecDeque::with_capacity(kept + 1), kept }
    }

    /// Records the bytes of a batch that has arrived.
    pub(super) fn record(&mut self, bytes: u64) {
        self.recent.push_back(bytes);
        if self.recent.len() > self.kept {
            self.recent.pop_front();
        }
    }

    /// Returns true if one more task may be sent to a worker that has `of_worker` of the `of_all` tasks that are out.
    pub(super) fn has_room(&self, of_worker: usize, of_all: usize) -> bool {
        let Some(most) = self.most else { return true };
        match self.recent.iter().max() {
            // Nothing is known yet: one for each worker.
            None => of_worker == 0,
            Some(largest) => (of_all as u64 + 1).saturating_mul(*largest) <= most,
        }
    }
}

/// The tasks of one worker that are out: sent, and their results not yet taken.
#[derive(Debug, Default)]
pub(super) struct Out {
    /// In the order in which they were sent. `None`: no batch is asked for.
    tasks: VecDeque<Option<u64>>,
    batches: usize,
    unanswered: usize,
}

impl Out {
    /// A task is sent that is answered; `seq`: the batch that it asks for.
    pub(super) fn send(&mut self, seq: Option<u64>) {
        self.tasks.push_back(seq);
        self.batches += usize::from(seq.is_some());
        self.unanswered += 1;
    }

    /// A result has come.
    pub(super) fn answer(&mut self) {
        self.unanswered = self.unanswered.saturating_sub(1);
    }

    /// The worker's iterable dataset has ended: it answers no other task of this epoch. Returns true if it was sent no
    /// task of the next one.
    pub(super) fn end_part(&mut self) -> bool {
        let answered = self.tasks.len() - self.unanswered;
        let others = self.tasks.iter().skip(answered).take_while(|task| task.is_some()).count();
        let is_last = answered + others == self.tasks.len();
        for _ in 0..others {
            self.tasks.remove(answered);
        }
        self.batches -= others;
        self.unanswered -= others;
        is_last
    }

    /// Forgets what was taken, where `untaken` results are still in the ring.
    pub(super) fn take(&mut self, untaken: u64) {
        while self.tasks.len() as u64 > self.unanswered as u64 + untaken {
            let taken = self.tasks.pop_front().flatten();
            self.batches -= usize::from(taken.is_some());
        }
    }

    /// Batches that are out.
    pub(super) fn batches(&self) -> usize {
        self.batches
    }

    /// The first of them.
    pub(super) fn first(&self) -> Option<u64> {
        self.tasks.iter().copied().flatten().next()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_batch_counts_as_the_largest_of_the_last_ones() {
        let mut limit = FlowLimit::new(Some(100), 2);
        assert!(limit.has_room(0, 7) && !limit.has_room(1, 1), "one for each worker at first");
        limit.record(30);
        limit.record(10);
        assert!(limit.has_room(2, 2) && !limit.has_room(0, 3));
        limit.record(200);
        assert!(!limit.has_room(0, 0));
        for _ in 0..2 * RECENT {
            assert!(!limit.has_room(0, 0));
            limit.record(30);
        }
        assert!(limit.has_room(2, 2) && !limit.has_room(0, 3), "a huge one is forgotten");
        assert!(FlowLimit::new(None, 1).has_room(1000, 1000));
    }

    #[test]
    fn tasks_after_the_end_of_a_part_are_out_no_more() {
        let mut out = Out::default();
        for seq in [Some(1), Some(2), Some(3), None, Some(4)] {
            out.send(seq);
        }
        out.answer();
        assert!(!out.end_part(), "the next epoch was begun");
        assert_eq!((out.batches(), out.first()), (2, Some(1)));
        out.take(0);
        assert_eq!((out.batches(), out.first()), (1, Some(4)));
        out.answer();
        out.answer();
        assert!(out.end_part());
        out.take(0);
        assert_eq!(out.batches(), 0);
    }

    #[test]
    fn what_was_taken_is_out_no_more() {
        let mut out = Out::default();
        for seq in [Some(4), None, Some(6)] {
            out.send(seq);
        }
        assert_eq!((out.batches(), out.first()), (2, Some(4)));
        out.answer();
        out.take(1);
        assert_eq!((out.batches(), out.first()), (2, Some(4)), "it is there, and not taken");
        out.take(0);
        assert_eq!((out.batches(), out.first()), (1, Some(6)));
        out.answer();
        out.answer();
        out.take(0);
        assert_eq!((out.batches(), out.first()), (0, None));
    }
}
