//! The moments of the batch that a worker makes.

use super::Stamps;

/// The shortest time between two reads of the processor time, which is a system call.
const BETWEEN: u64 = 100_000;

/// Records the moments of one batch after another, in the worker. `now` is a moment; `cpu` reads the thread's processor
/// time.
#[derive(Debug, Default)]
pub struct WorkerClock {
    stamps: Stamps,
    /// The worker's processor time, and when that was read.
    cpu: u64,
    read: u64,
    /// True if the last batch took so long that its processor time is read.
    is_long: bool,
}

impl WorkerClock {
    /// The worker waits for its next task from now on.
    pub fn begin(&mut self, now: u64, cpu: impl FnOnce() -> u64) {
        self.stamps = Stamps { asked: now, ..Stamps::default() };
        (self.cpu, self.read) = (cpu(), now);
    }

    /// Records that the worker has a task.
    pub fn record_task(&mut self, now: u64) {
        self.stamps = Stamps { asked: self.stamps.asked, got: now, ..Stamps::default() };
    }

    /// Records the time of a collation. One batch may have several.
    pub fn record_collation(&mut self, begun: u64, ended: u64) {
        if self.stamps.collating == 0 {
            self.stamps.collating = begun;
        }
        self.stamps.collate += ended.saturating_sub(begun);
    }

    /// Records that the batch is made. If the batch cannot be sent and its error is sent instead, the first time
    /// counts.
    pub fn record_made(&mut self, now: u64) {
        if self.stamps.made == 0 {
            self.stamps.made = now;
        }
    }

    /// Records how long the worker has waited for memory.
    pub fn record_room(&mut self, time: u64) {
        self.stamps.room += time;
    }

    /// The batch is sent. Returns its stamps. The worker waits for its next task from now on. The processor time of
    /// short batches is that of a later one.
    pub fn sent(&mut self, now: u64, cpu: impl FnOnce() -> u64) -> Stamps {
        let mut stamps = Stamps { sent: now, ..self.stamps };
        self.stamps = Stamps { asked: now, ..Stamps::default() };
        if now.saturating_sub(self.read) >= BETWEEN {
            let before = self.cpu;
            (self.cpu, self.read) = (cpu(), now);
            stamps.cpu = self.cpu.saturating_sub(before);
        }
        stamps
    }

    /// A run of a batch is made and sent, or read by the worker that collates. Returns its stamps, as
    /// [`sent`](Self::sent).
    pub fn run_sent(&mut self, now: u64, cpu: impl FnOnce() -> u64) -> Stamps {
        self.record_made(now);
        self.sent(now, cpu)
    }

    /// Returns true if a run is made that is not sent.
    #[must_use]
    pub fn has_made(&self) -> bool {
        self.stamps.made != 0
    }

    /// The worker has sent a run, and continues with the batch.
    pub fn record_last(&mut self) {
        self.stamps.got = self.stamps.asked;
    }

    /// A batch is begun without a worker, by a thread that does other things in between.
    pub fn begin_here(&mut self, now: u64, cpu: impl FnOnce() -> u64) {
        self.stamps = Stamps { asked: now, got: now, ..Stamps::default() };
        if self.is_long {
            self.cpu = cpu();
        }
    }

    /// That batch has come. Returns its stamps. A batch that is short, or follows a short one, counts as computed.
    pub fn made_here(&mut self, now: u64, cpu: impl FnOnce() -> u64) -> Stamps {
        let took = now.saturating_sub(self.stamps.got);
        let taken = if self.is_long { cpu().saturating_sub(self.cpu) } else { took };
        self.is_long = took >= BETWEEN;
        Stamps { made: now, sent: now, cpu: taken, ..self.stamps }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_has_its_own_moments_only() {
        let mut clock = WorkerClock::default();
        clock.begin(100, || 1000);
        clock.record_task(110);
        clock.record_collation(120, 125);
        clock.record_collation(130, 140);
        clock.record_made(150);
        clock.record_made(155);
        clock.record_room(3);
        let first = Stamps {
            asked: 100,
            got: 110,
            collating: 120,
            collate: 15,
            made: 150,
            room: 3,
            sent: 160,
            cpu: 0,
        };
        assert_eq!(clock.sent(160, || unreachable!()), first);
        clock.record_task(170);
        clock.record_made(180);
        let now = 100 + BETWEEN;
        let second = Stamps { asked: 160, got: 170, made: 180, sent: now, cpu: 9, ..Stamps::default() };
        assert_eq!(clock.sent(now, || 1009), second);
    }

    #[test]
    fn a_run_is_apart_from_the_batch_that_its_worker_collates() {
        let mut clock = WorkerClock::default();
        clock.begin(100, || 0);
        clock.record_task(110);
        clock.record_made(150);
        assert!(clock.has_made());
        let run = clock.run_sent(160, || unreachable!());
        assert_eq!((run.idle(), run.dataset(), run.send()), (10, 40, 10));
        clock.record_last();
        clock.record_collation(161, 170);
        clock.record_made(170);
        let batch = clock.sent(175, || unreachable!());
        assert_eq!((batch.idle(), batch.dataset(), batch.collate, batch.send()), (0, 1, 9, 5));
    }

    #[test]
    fn without_a_worker_only_long_batches_read_the_processor_time() {
        let mut clock = WorkerClock::default();
        let mut batch = |begun: u64, ended: u64, cpu: [Option<u64>; 2]| {
            let [first, second] = cpu;
            clock.begin_here(begun, || first.unwrap());
            clock.made_here(ended, || second.unwrap()).cpu
        };
        assert_eq!(batch(0, 10, [None, None]), 10);
        assert_eq!(batch(20, 20 + BETWEEN, [None, None]), BETWEEN);
        assert_eq!(batch(500_000, 900_000, [Some(7), Some(12)]), 5);
        assert_eq!(batch(900_000, 900_001, [Some(20), Some(21)]), 1);
        assert_eq!(batch(900_000, 900_003, [None, None]), 3);
    }
}
