use std::sync::{Arc, Weak};

use super::{Copier, CopyJob, CopyPart};
use crate::os::Segment;
use crate::process;
use crate::transport::received::{Backing, OwnSegment};

/// A batch of `len` bytes, all of them `byte`.
fn batch(len: usize, byte: u8) -> Arc<Backing> {
    let (segment, _) = Segment::create("test", len as u64).unwrap();
    segment.copy_in(0, &vec![byte; len]).unwrap();
    Arc::new(Backing::Own(OwnSegment::new(segment)))
}

/// Begins to copy the whole batch to `into`, in two parts; returns what tells whether the batch is kept.
fn begin(copier: &Copier, backing: Arc<Backing>, into: &mut [u8]) -> (CopyJob, Weak<Backing>) {
    let from = backing.pointer(0, into.len() as u64).unwrap().as_ptr();
    let (half, at) = (into.len() / 2, into.as_mut_ptr());
    // SAFETY: both places have `into.len()` bytes; every test keeps `into` until the job is over.
    let parts = unsafe {
        vec![CopyPart::new(from, at, half), CopyPart::new(from.add(half), at.add(half), into.len() - half)]
    };
    let kept = Arc::downgrade(&backing);
    (copier.copy(parts, backing), kept)
}

/// A copier whose callers copy, as where no thread can start.
fn without_thread() -> Copier {
    Copier { thread: None, process: process::current() }
}

#[test]
fn a_finished_job_has_copied_and_keeps_nothing() {
    for copier in [Copier::new(), without_thread()] {
        for round in 0..20_u8 {
            let mut into = vec![0; 70_001];
            let (job, kept) = begin(&copier, batch(into.len(), round), &mut into);
            job.finish();
            assert!(job.is_over());
            assert!(kept.upgrade().is_none(), "the slot is still held");
            drop(job);
            assert!(into.iter().all(|&byte| byte == round));
        }
    }
}

#[test]
fn the_thread_copies_what_no_caller_asks_for() {
    let copier = Copier::new();
    let mut into = vec![0; 1 << 20];
    let (job, kept) = begin(&copier, batch(1 << 20, 7), &mut into);
    while !job.is_over() {
        std::thread::yield_now();
    }
    assert!(kept.upgrade().is_none());
    drop(job);
    assert!(into.iter().all(|&byte| byte == 7));
}

#[test]
fn nothing_is_written_once_a_job_is_dropped() {
    const LEN: usize = 16 << 20;
    let copier = Copier::new();
    for round in 0..10 {
        let mut memory = [vec![0; LEN], vec![0; LEN]];
        let jobs: Vec<_> = memory.iter_mut().map(|into| begin(&copier, batch(LEN, 1), into).0).collect();
        if round % 2 == 0 {
            // The first is under way by now, the second waits for it.
            std::thread::sleep(std::time::Duration::from_micros(round * 100));
        }
        drop(jobs);
        // The last bytes that a copy would reach if it continued.
        memory.iter_mut().for_each(|into| into[LEN - 4096..].fill(9));
        std::thread::sleep(std::time::Duration::from_millis(10));
        assert!(memory.iter().all(|into| into[LEN - 4096..] == [9; 4096]), "a copy went on in round {round}");
    }
}

#[test]
fn jobs_outlive_their_copier() {
    for _ in 0..20 {
        let copier = Copier::new();
        let mut memory = vec![vec![0; 100_000]; 4];
        let jobs: Vec<_> =
            memory.iter_mut().map(|into| begin(&copier, batch(into.len(), 3), into).0).collect();
        drop(copier);
        jobs.iter().for_each(CopyJob::finish);
        assert!(jobs.iter().all(CopyJob::is_over));
        drop(jobs);
        assert!(memory.iter().flatten().all(|&byte| byte == 3));
    }
}

#[test]
fn several_threads_may_wait_for_one_job() {
    let copier = Copier::new();
    for _ in 0..20 {
        let mut into = vec![0; 1 << 20];
        let (job, _) = begin(&copier, batch(1 << 20, 5), &mut into);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| job.finish());
            }
        });
        assert!(job.is_over());
        drop(job);
        assert!(into.iter().all(|&byte| byte == 5));
    }
}
