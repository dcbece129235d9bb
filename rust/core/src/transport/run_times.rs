//! The moments of runs of shared tasks, in words of a batch: written by the workers that make the runs, read by the main
//! process once it has the batch. Runs of batches that never come are not known.

use std::ops::Range;

use crate::joint::MOST_RUNS;
use crate::sync::{AtomicU64, Ordering};
use crate::timing::Stamps;

/// Words of a run: its worker, and what its stamps say.
const OF_RUN: usize = 6;
/// Words of a batch.
pub(super) const WORDS: usize = MOST_RUNS as usize * OF_RUN;

/// A run as its worker has timed it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TimedRun {
    /// The worker.
    pub worker: u32,
    /// Its moments.
    pub stamps: Stamps,
    /// Its samples, as a range of the batch's.
    pub samples: Range<u64>,
}

/// Notes the moments of a run, before it is finished or its batch is sent.
pub(super) fn note(words: &[AtomicU64], run: u32, worker: u32, stamps: &Stamps) {
    let Stamps { asked, got, made, sent, cpu, .. } = *stamps;
    let values = [u64::from(worker) + 1, asked, got, made, sent, cpu];
    let at = run as usize * OF_RUN;
    // ORDERING joint-made: published with the run, or by the result of the worker that collates.
    words[at..at + OF_RUN].iter().zip(values).for_each(|(word, value)| word.store(value, Ordering::Relaxed));
}

/// Takes the moments of all runs of a batch, in the main process. `samples_of` returns the samples of a run.
pub(super) fn take(words: &[AtomicU64], runs: u32, samples_of: impl Fn(u32) -> Range<u64>) -> Vec<TimedRun> {
    let timed = (0..runs).zip(words.chunks_exact(OF_RUN)).filter_map(|(run, words)| {
        let worker = words[0].swap(0, Ordering::Relaxed).checked_sub(1)?;
        let [asked, got, made, sent, cpu] = std::array::from_fn(|at| words[1 + at].load(Ordering::Relaxed));
        let stamps = Stamps { asked, got, made, sent, cpu, ..Stamps::default() };
        Some(TimedRun { worker: worker.try_into().ok()?, stamps, samples: samples_of(run) })
    });
    timed.collect()
}

#[cfg(all(test, not(ringloader_loom)))]
mod tests {
    use super::*;

    #[test]
    fn each_run_is_taken_once() {
        let words: Vec<_> = (0..WORDS).map(|_| AtomicU64::new(0)).collect();
        let stamps = Stamps { asked: 1, got: 2, made: 7, sent: 9, cpu: 3, ..Stamps::default() };
        note(&words, 2, 5, &stamps);
        let run = |run: u32| u64::from(run)..u64::from(run) + 1;
        assert_eq!(take(&words, 2, run), []);
        assert_eq!(take(&words, 4, run), [TimedRun { worker: 5, stamps, samples: 2..3 }]);
        assert_eq!(take(&words, 4, run), []);
    }
}
