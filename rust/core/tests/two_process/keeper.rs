//! Threads that keep batches for a while, and drop them: as users do, at any time.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::{JoinHandle, spawn};
use std::time::{Duration, Instant};

use super::content::Random;
use super::parent::Kept;

/// One thread, and the way to give it a batch with the time to drop it.
type Keeper = (Sender<(Kept, Instant)>, JoinHandle<()>);

/// Two threads that check what they keep once more before they drop it.
#[derive(Debug)]
pub(crate) struct Keepers {
    threads: Vec<Keeper>,
    random: Random,
    longest: Duration,
}

impl Keepers {
    /// Keepers of batches for up to `longest` each.
    pub(crate) fn new(seed: u64, longest: Duration) -> Self {
        let thread = |_| {
            let (sender, receiver) = channel::<(Kept, Instant)>();
            let run = move || {
                let mut kept: Vec<(Kept, Instant)> = Vec::new();
                loop {
                    match receiver.recv_timeout(Duration::from_micros(500)) {
                        Ok(batch) => kept.push(batch),
                        Err(RecvTimeoutError::Timeout) => {}
                        Err(RecvTimeoutError::Disconnected) => break,
                    }
                    let now = Instant::now();
                    for (batch, _) in kept.extract_if(.., |(_, until)| *until <= now) {
                        batch.check();
                    }
                }
                kept.iter().for_each(|(batch, _)| batch.check());
            };
            (sender, spawn(run))
        };
        Self { threads: (0..2).map(thread).collect(), random: Random(seed), longest }
    }

    /// Keeps a batch if it was leased; drops it otherwise, as one that was copied.
    pub(crate) fn keep(&mut self, batch: Kept, leased: bool) {
        if !leased || self.random.once_in(3) {
            return;
        }
        let micros = self.random.magnitude(self.longest.as_micros() as u64);
        let thread = self.random.below(self.threads.len() as u64) as usize;
        let until = Instant::now() + Duration::from_micros(micros);
        self.threads[thread].0.send((batch, until)).expect("a keeper found a batch changed");
    }

    /// Drops all that is kept.
    pub(crate) fn finish(self) {
        for (sender, thread) in self.threads {
            drop(sender);
            thread.join().expect("a keeper found a batch changed");
        }
    }
}
