//! The times of one epoch, as the main process adds them up.

use std::collections::VecDeque;

use super::Stamps;

/// The number of batches whose events are kept.
const KEPT: usize = 10_000;

/// The number of the longest fetches that are kept.
const SLOWEST: usize = 10;

/// The number of a batch's indices that are kept with its events.
const INDICES: usize = 64;

/// Work of the main process for the loader.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MainWork {
    /// Batches are unpacked.
    Decode,
    /// Batches are brought to where they are needed.
    Place,
    /// The sampler is read.
    Index,
}

/// The sums of one worker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[allow(missing_docs, reason = "the times of `Stamps`, added up")]
pub struct WorkerSums {
    pub batches: u64,
    pub idle: u64,
    pub dataset: u64,
    pub collate: u64,
    pub send: u64,
    pub room: u64,
    pub cpu: u64,
}

/// One batch, made by a worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fetch {
    /// The batch's number in the epoch.
    pub batch: u64,
    /// The worker.
    pub worker: u32,
    /// The batch's moments.
    pub stamps: Stamps,
    /// The first of its indices, where these are numbers.
    pub indices: Box<[i64]>,
}

/// A stretch of time in the main process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Event {
    /// The work; `None` for a call of `next`.
    pub work: Option<MainWork>,
    /// The number of the batch in the epoch; of a call of `next`, the number of batches returned before.
    pub batch: u64,
    /// The time at which it began.
    pub begun: u64,
    /// The time at which it ended.
    pub ended: u64,
}

/// The epoch that runs, or ran last. `I` is what is kept of the indices of the longest fetches.
#[derive(Debug)]
pub struct EpochTimes<I> {
    /// When the epoch began.
    pub begun: u64,
    /// When its first batch was returned.
    pub first: Option<u64>,
    /// When the last call of `next` ended.
    pub last: u64,
    /// The number of batches returned.
    pub returned: u64,
    /// The time in `next` after the first batch.
    pub waiting: u64,
    /// How long a worker had the task of the first batch that arrived, until it was sent.
    pub first_made: Option<u64>,
    /// The moment at which a worker had the first run of a batch.
    first_run: Option<u64>,
    /// The time of each [`MainWork`].
    pub main: [u64; 3],
    /// The sums of each worker.
    pub workers: Vec<WorkerSums>,
    /// The last batches that workers have made.
    pub fetches: VecDeque<Fetch>,
    /// The last events of the main process.
    pub events: VecDeque<Event>,
    /// The longest fetches, the longest first.
    pub slowest: Vec<(Fetch, I)>,
}

impl<I> EpochTimes<I> {
    /// An epoch of this many workers that begins now.
    #[must_use]
    pub fn new(workers: u32, now: u64) -> Self {
        Self {
            begun: now,
            first: None,
            last: now,
            returned: 0,
            waiting: 0,
            first_made: None,
            first_run: None,
            main: [0; 3],
            workers: vec![WorkerSums::default(); workers as usize],
            fetches: VecDeque::new(),
            events: VecDeque::new(),
            slowest: Vec::new(),
        }
    }

    /// Records the time of a call of `next`.
    pub fn record_next(&mut self, begun: u64, ended: u64, has_returned: bool) {
        self.push(Event { work: None, batch: self.returned, begun, ended });
        if self.first.is_some() {
            self.waiting += ended.saturating_sub(begun);
        } else if has_returned {
            self.first = Some(ended);
        }
        self.returned += u64::from(has_returned);
        self.last = ended;
    }

    /// Records how long the main process worked for a batch.
    pub fn record_main(&mut self, work: MainWork, batch: u64, begun: u64, ended: u64) {
        self.main[work as usize] += ended.saturating_sub(begun);
        if work != MainWork::Index {
            self.push(Event { work: Some(work), batch, begun, ended });
        }
    }

    fn push(&mut self, event: Event) {
        // A batch has three: it is waited for, decoded and placed.
        if self.events.len() >= 3 * KEPT {
            self.events.pop_front();
        }
        self.events.push_back(event);
    }

    /// Returns true if a fetch of this length is among the longest.
    #[must_use]
    pub fn is_long(&self, time: u64) -> bool {
        self.slowest.len() < SLOWEST
            || self.slowest.last().is_some_and(|(other, _)| other.stamps.dataset() < time)
    }

    /// Records a batch that a worker has made. `bytes` has its indices, where these are numbers. `index` is kept if the
    /// fetch [is long](Self::is_long). Returns the index that is not kept any more, for the caller to drop.
    pub fn record_fetch(
        &mut self,
        batch: u64,
        worker: u32,
        stamps: Stamps,
        bytes: &[u8],
        index: Option<I>,
    ) -> Option<I> {
        let Some(sums) = self.workers.get_mut(worker as usize) else { return index };
        sums.batches += 1;
        let got = self.first_run.unwrap_or(stamps.got).min(stamps.got);
        self.first_made.get_or_insert(stamps.sent.saturating_sub(got));
        self.record_run(batch, worker, stamps, bytes, index)
    }

    /// Records samples of a batch that a worker has made, before the batch itself. Otherwise as
    /// [`record_fetch`](Self::record_fetch).
    pub fn record_run(
        &mut self,
        batch: u64,
        worker: u32,
        stamps: Stamps,
        bytes: &[u8],
        index: Option<I>,
    ) -> Option<I> {
        let Some(sums) = self.workers.get_mut(worker as usize) else { return index };
        self.first_run = Some(self.first_run.unwrap_or(stamps.got).min(stamps.got));
        // A worker that stays has waited since the epoch before, which is no part of this one.
        let stamps = Stamps { asked: stamps.asked.max(self.begun.min(stamps.got)), ..stamps };
        sums.idle += stamps.idle();
        sums.dataset += stamps.dataset();
        sums.collate += stamps.collate;
        sums.send += stamps.send();
        sums.room += stamps.room_since(self.begun);
        sums.cpu += stamps.cpu;
        let indices =
            bytes.as_chunks().0.iter().take(INDICES).map(|&number| i64::from_le_bytes(number)).collect();
        let fetch = Fetch { batch, worker, stamps, indices };
        let mut dropped = None;
        if let Some(index) = index {
            let at = self.slowest.partition_point(|(other, _)| other.stamps.dataset() >= stamps.dataset());
            self.slowest.insert(at, (fetch.clone(), index));
            if self.slowest.len() > SLOWEST {
                dropped = self.slowest.pop();
            }
        }
        if self.fetches.len() >= KEPT {
            self.fetches.pop_front();
        }
        self.fetches.push_back(fetch);
        dropped.map(|(_, index)| index)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(time: u64) -> Stamps {
        Stamps { asked: 0, got: 5, made: 5 + time, sent: 7 + time, cpu: time, ..Stamps::default() }
    }

    #[test]
    fn the_first_batch_ends_the_start() {
        let mut epoch = EpochTimes::<()>::new(1, 100);
        epoch.record_next(110, 150, true);
        epoch.record_next(160, 165, true);
        epoch.record_next(185, 186, false);
        assert_eq!((epoch.begun, epoch.first, epoch.last), (100, Some(150), 186));
        assert_eq!((epoch.returned, epoch.waiting), (2, 6));
    }

    #[test]
    fn an_epoch_without_a_batch_is_all_start() {
        let mut epoch = EpochTimes::<()>::new(1, 100);
        epoch.record_next(110, 150, false);
        assert_eq!((epoch.begun, epoch.first, epoch.last), (100, None, 150));
        assert_eq!((epoch.returned, epoch.waiting), (0, 0));
    }

    #[test]
    fn the_longest_fetches_are_kept_with_their_indices() {
        let mut epoch = EpochTimes::new(2, 0);
        let mut dropped = Vec::new();
        for batch in 0..40u64 {
            let time = batch * 7 % 40;
            let index = (batch as i64).to_le_bytes();
            dropped.extend(epoch.record_fetch(
                batch,
                (batch % 2) as u32,
                made(time),
                &index,
                epoch.is_long(time).then_some(batch),
            ));
        }
        let times: Vec<u64> = epoch.slowest.iter().map(|(fetch, _)| fetch.stamps.dataset()).collect();
        assert_eq!(times, (30..40).rev().collect::<Vec<_>>());
        for (fetch, index) in &epoch.slowest {
            assert_eq!((fetch.batch, &fetch.indices[..]), (*index, &[*index as i64][..]));
        }
        assert!(dropped.iter().all(|batch| batch * 7 % 40 < 30));
        let sums = &epoch.workers;
        assert_eq!((sums[0].batches, sums[1].batches), (20, 20));
        assert_eq!(sums[0].dataset + sums[1].dataset, (0..40).sum());
        assert_eq!((sums[0].idle, sums[0].send), (100, 40));
        assert_eq!(epoch.first_made, Some(2));
    }

    #[test]
    fn the_first_batch_takes_from_its_first_run_on() {
        let mut epoch = EpochTimes::<()>::new(2, 0);
        epoch.record_run(0, 1, Stamps { got: 3, made: 9, sent: 9, ..Stamps::default() }, &[], None);
        epoch.record_fetch(0, 0, Stamps { got: 8, made: 10, sent: 11, ..Stamps::default() }, &[], None);
        assert_eq!(epoch.first_made, Some(8));
        let sums = &epoch.workers;
        assert_eq!((sums[0].batches, sums[1].batches), (1, 0));
        assert_eq!((sums[0].dataset, sums[1].dataset), (2, 6));
    }

    #[test]
    fn a_wait_from_before_the_epoch_is_none_of_it() {
        let mut epoch = EpochTimes::<()>::new(1, 100);
        let stamps = Stamps { asked: 10, got: 130, made: 140, sent: 140, ..Stamps::default() };
        epoch.record_fetch(0, 0, stamps, &[], None);
        epoch.record_fetch(1, 0, Stamps { asked: 20, got: 90, ..stamps }, &[], None);
        assert_eq!(epoch.workers[0].idle, 30);
    }

    #[test]
    fn a_wait_for_room_from_before_the_epoch_is_none_of_it() {
        let mut epoch = EpochTimes::<()>::new(1, 100);
        let stamps = Stamps { asked: 10, got: 20, made: 50, room: 60, sent: 115, ..Stamps::default() };
        epoch.record_fetch(0, 0, stamps, &[], None);
        assert_eq!((epoch.workers[0].room, epoch.workers[0].send), (10, 5));
        epoch.record_fetch(1, 0, Stamps { room: 20, ..stamps }, &[], None);
        assert_eq!((epoch.workers[0].room, epoch.workers[0].send), (10, 50));
        epoch.record_fetch(2, 0, Stamps { got: 110, made: 120, sent: 190, ..stamps }, &[], None);
        assert_eq!((epoch.workers[0].room, epoch.workers[0].send), (70, 60));
    }

    #[test]
    fn only_the_last_events_are_kept() {
        let mut epoch = EpochTimes::<()>::new(1, 0);
        for batch in 0..KEPT as u64 + 5 {
            epoch.record_fetch(batch, 0, made(1), &[0; 8 * (INDICES + 1)], None);
            for work in [MainWork::Decode, MainWork::Place, MainWork::Index] {
                epoch.record_main(work, batch, 0, 1);
            }
            epoch.record_next(0, 1, true);
        }
        assert_eq!(epoch.fetches.len(), KEPT);
        assert_eq!(epoch.fetches.front().map(|fetch| (fetch.batch, fetch.indices.len())), Some((5, INDICES)));
        assert_eq!(epoch.events.len(), 3 * KEPT);
        assert_eq!(epoch.main, [KEPT as u64 + 5; 3]);
    }
}
