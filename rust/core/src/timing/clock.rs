//! The moments of the batch that a worker makes.

use super::Stamps;

/// Notes the moments of one batch after another, in the worker.
#[derive(Debug, Default)]
pub struct WorkerClock {
    stamps: Stamps,
    /// The worker's processor time when the batch before was sent.
    cpu: u64,
}

impl WorkerClock {
    /// The worker waits for its next task from now on.
    pub fn begin(&mut self, now: u64, cpu: u64) {
        self.stamps = Stamps { asked: now, ..Stamps::default() };
        self.cpu = cpu;
    }

    /// The worker has a task.
    pub fn note_task(&mut self, now: u64) {
        self.stamps = Stamps { asked: self.stamps.asked, got: now, ..Stamps::default() };
    }

    /// Collation took this long. There may be several of one batch.
    pub fn note_collation(&mut self, begun: u64, ended: u64) {
        if self.stamps.collating == 0 {
            self.stamps.collating = begun;
        }
        self.stamps.collate += ended.saturating_sub(begun);
    }

    /// The batch is there. Says nothing new if it could not be sent, and its error is sent instead.
    pub fn note_made(&mut self, now: u64) {
        if self.stamps.made == 0 {
            self.stamps.made = now;
        }
    }

    /// The worker has waited this long for memory.
    pub fn note_room(&mut self, time: u64) {
        self.stamps.room += time;
    }

    /// The batch is sent. Returns its stamps. The worker waits for its next task from now on.
    pub fn sent(&mut self, now: u64, cpu: u64) -> Stamps {
        let stamps = Stamps { sent: now, cpu: cpu.saturating_sub(self.cpu), ..self.stamps };
        self.begin(now, cpu);
        stamps
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_has_its_own_moments_only() {
        let mut clock = WorkerClock::default();
        clock.begin(100, 1000);
        clock.note_task(110);
        clock.note_collation(120, 125);
        clock.note_collation(130, 140);
        clock.note_made(150);
        clock.note_made(155);
        clock.note_room(3);
        let first = Stamps {
            asked: 100,
            got: 110,
            collating: 120,
            collate: 15,
            made: 150,
            room: 3,
            sent: 160,
            cpu: 7,
        };
        assert_eq!(clock.sent(160, 1007), first);
        clock.note_task(170);
        clock.note_made(180);
        let second = Stamps { asked: 160, got: 170, made: 180, sent: 185, cpu: 2, ..Stamps::default() };
        assert_eq!(clock.sent(185, 1009), second);
    }
}
