//! The queues between threads: as a transport under the scheduler, and what they promise beside it.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use ringloader_core::transport::Transport;
use ringloader_core::transport::joint::Joint;
use ringloader_core::transport::message::ResultKind;
use ringloader_core::transport::queues::{Queues, Reply, Request, TaskRun};
use ringloader_core::transport::task_number::EPOCH_SHIFT;

use crate::fleet::Backend;

type Content = (u32, i64);

pub(crate) struct ThreadQueues(Queues<(), Content>);

impl Backend for ThreadQueues {
    type Transport = Queues<(), Content>;

    fn new(workers: u32, _max_tasks: u32) -> Self {
        Self(Queues::new(workers))
    }

    fn transport(&self) -> &Self::Transport {
        &self.0
    }

    fn index() {}

    fn take_task(&self, worker: u32) -> Option<u64> {
        match self.0.take_request(worker).unwrap() {
            Some(Request::Task { seq, .. }) => Some(seq),
            None => None,
            other => panic!("{other:?}"),
        }
    }

    fn commit(&self, worker: u32, seq: u64, content: i64) {
        let reply = Reply { seq, kind: ResultKind::Batch, content: (worker, content) };
        assert!(self.0.reply(worker, reply, true).unwrap().is_none());
    }

    fn commit_missing(&self, _worker: u32, _seq: u64) {
        panic!("what is in a queue can be had");
    }

    fn commit_nonsense(&self, _worker: u32) {
        panic!("what is in a queue can be read");
    }

    fn end(&self, worker: u32) {
        self.0.record_end(worker).unwrap();
    }

    fn close(&mut self) {
        drop(self.0.close().unwrap());
    }

    fn read(reply: &Reply<Content>) -> (u32, i64) {
        reply.content
    }
}

/// Runs `wait` on another thread and `wake` once it waits; returns how long the wait took after that.
fn woken_after<I: Send + Sync + 'static>(
    queues: &Arc<Queues<I, ()>>,
    wait: impl FnOnce(&Queues<I, ()>) + Send + 'static,
    wake: impl FnOnce(&Queues<I, ()>),
) -> Duration {
    let theirs = queues.clone();
    let waiting = thread::spawn(move || {
        wait(&theirs);
        Instant::now()
    });
    thread::sleep(Duration::from_millis(30));
    let woken = Instant::now();
    wake(queues);
    waiting.join().unwrap().saturating_duration_since(woken)
}

const LONG: Duration = Duration::from_secs(30);
const AT_ONCE: Duration = Duration::from_secs(10);

fn reply() -> Reply<()> {
    Reply { seq: 3, kind: ResultKind::Batch, content: () }
}

#[test]
fn every_wait_ends_with_what_it_waits_for() {
    let queues = || Arc::new(Queues::<(), ()>::new(2));
    let for_one = |queues: &Queues<(), ()>| queues.wait_for(Some(1), LONG).unwrap();
    let for_any = |queues: &Queues<(), ()>| queues.wait_for(None, LONG).unwrap();
    let for_request = |queues: &Queues<(), ()>| queues.wait_for_request(1, LONG).unwrap();
    let answer = |queues: &Queues<(), ()>| assert!(queues.reply(1, reply(), true).unwrap().is_none());
    assert!(woken_after(&queues(), for_one, answer) < AT_ONCE);
    assert!(woken_after(&queues(), for_any, answer) < AT_ONCE);
    assert!(woken_after(&queues(), for_one, |queues| queues.record_end(0).unwrap()) < AT_ONCE);
    assert!(woken_after(&queues(), for_any, |queues| queues.wake().unwrap()) < AT_ONCE);
    assert!(woken_after(&queues(), for_one, |queues| drop(queues.close().unwrap())) < AT_ONCE);
    assert!(woken_after(&queues(), for_request, |queues| queues.put(1, Request::End).unwrap()) < AT_ONCE);
    assert!(woken_after(&queues(), for_request, |queues| drop(queues.close().unwrap())) < AT_ONCE);
}

/// Two threads wait for different workers: neither keeps the other's news.
#[test]
fn threads_that_wait_for_different_workers_are_both_woken() {
    let queues = Arc::new(Queues::<(), ()>::new(2));
    let theirs = queues.clone();
    let first = thread::spawn(move || theirs.wait_for(Some(0), LONG).unwrap());
    let took = woken_after(
        &queues,
        |queues| queues.wait_for(Some(1), LONG).unwrap(),
        |queues| {
            assert!(queues.reply(0, reply(), true).unwrap().is_none());
            assert!(queues.reply(1, reply(), true).unwrap().is_none());
        },
    );
    first.join().unwrap();
    assert!(took < AT_ONCE);
}

#[test]
fn a_wait_is_no_longer_than_its_limit() {
    let queues = Queues::<(), ()>::new(1);
    let start = Instant::now();
    queues.wait_for(None, Duration::from_millis(20)).unwrap();
    queues.wait_for_request(0, Duration::from_millis(20)).unwrap();
    assert!(start.elapsed() >= Duration::from_millis(40) && start.elapsed() < LONG);
}

/// Looks at the queues again when it is dropped, as a Python object may.
struct Curious(Arc<Queues<Curious, Curious>>);

impl Drop for Curious {
    fn drop(&mut self) {
        self.0.counts().unwrap();
    }
}

#[test]
fn what_is_dropped_at_the_end_is_dropped_outside_of_the_lock() {
    let queues = Arc::new(Queues::<Curious, Curious>::new(1));
    let reply = |content| Reply { seq: 0, kind: ResultKind::Batch, content };
    queues.put_task(0, 1, Curious(queues.clone())).unwrap();
    assert!(queues.reply(0, reply(Curious(queues.clone())), true).unwrap().is_none());
    drop(queues.close().unwrap());
    // The same holds for what comes later.
    queues.put_task(0, 2, Curious(queues.clone())).unwrap();
    assert!(queues.reply(0, reply(Curious(queues.clone())), true).unwrap().is_some());
    assert!(matches!(queues.take_request(0).unwrap(), Some(Request::End)));
    assert_eq!(Arc::strong_count(&queues), 1);
}

fn batch<R>(seq: u64, content: R) -> Reply<R> {
    Reply { seq, kind: ResultKind::Batch, content }
}

#[test]
fn a_worker_begins_an_epoch_once_all_tasks_before_are_answered() {
    let queues = Queues::<(), ()>::new(2);
    queues.share_tasks(8, None).unwrap();
    let of = |epoch: u64, task: u64| epoch << EPOCH_SHIFT | task;
    let begin = |worker, number| queues.put(worker, Request::Epoch { number, message: () }).unwrap();
    let begins = |worker| matches!(queues.take_request(worker).unwrap(), Some(Request::Epoch { .. }));
    let run = |worker| queues.take_run(worker).unwrap();
    let seq = |worker| run(worker).map(|run| run.claimed.plan.seq);
    let answer = |worker, run: TaskRun<()>| {
        assert!(queues.finish(worker, &run.claimed, None).unwrap());
        assert!(queues.reply(worker, batch(run.claimed.plan.seq, ()), true).unwrap().is_none());
    };
    (0..2).for_each(|task| queues.put_task(0, task, ()).unwrap());
    (0..2).for_each(|worker| begin(worker, 1));
    (0..2).for_each(|task| queues.put_task(0, of(1, task), ()).unwrap());
    assert!(!begins(0));
    let [first, second] = [0, 1].map(|worker| run(worker).unwrap());
    assert_eq!([first.claimed.plan.seq, second.claimed.plan.seq], [0, 1]);
    assert_eq!([begins(0), begins(1)], [false; 2]);
    assert_eq!([seq(0), seq(1)], [None; 2]);
    answer(1, second);
    assert!(!begins(1));
    answer(0, first);
    assert_eq!((begins(0), seq(0), seq(1)), (true, Some(of(1, 0)), None));
    // Nobody wants that epoch any more.
    (0..2).for_each(|worker| begin(worker, 2));
    queues.put_task(0, of(2, 0), ()).unwrap();
    assert_eq!([begins(0), begins(1), begins(1)], [false, true, false]);
    Transport::begin_epoch(&queues, 2);
    assert_eq!([begins(0), begins(1)], [true; 2]);
    let stale = run(1).unwrap();
    assert_eq!((stale.claimed.plan.seq, stale.is_stale), (of(1, 1), true));
    answer(1, stale);
    assert_eq!([seq(1), seq(0)], [Some(of(2, 0)), None]);
    // The end comes past an epoch that cannot begin.
    begin(0, 3);
    queues.put(0, Request::End).unwrap();
    assert!(matches!(queues.take_request(0).unwrap(), Some(Request::End)));
}

#[test]
fn more_tasks_than_places_wait() {
    let queues = Queues::<(), ()>::new(1);
    queues.share_tasks(1, None).unwrap();
    (0..2).for_each(|task| queues.put_task(0, task, ()).unwrap());
    for seq in 0..2 {
        let run = queues.take_run(0).unwrap().unwrap();
        assert_eq!(run.claimed.plan.seq, seq);
        assert!(queues.finish(0, &run.claimed, None).unwrap() && queues.take_run(0).unwrap().is_none());
        assert!(queues.reply(0, batch(seq, ()), true).unwrap().is_none());
        assert!(queues.take_run(0).unwrap().is_none());
        assert!(queues.try_next().unwrap().is_some());
    }
}

/// A worker that ends while it collates has taken the samples of all: the next one has none of them.
#[test]
fn samples_that_a_lost_worker_has_taken_are_made_again() {
    let queues = Queues::<u64, u32>::new(3);
    queues.share_tasks(2, Some(|&samples| samples)).unwrap();
    queues.put_task(0, 7, 4).unwrap();
    let take = |worker| queues.take_run(worker).unwrap();
    let (first, second) = (take(0).unwrap(), take(1).unwrap());
    assert_eq!([first.claimed.samples(), second.claimed.samples()], [0..2, 2..4]);
    assert!(!queues.finish(0, &first.claimed, Some(1)).unwrap());
    assert!(queues.finish(1, &second.claimed, Some(2)).unwrap());
    assert_eq!(queues.take_parts(&second.claimed).unwrap(), Some(vec![1, 2]));
    queues.lose(1);
    let again = take(0).unwrap();
    assert!(again.claimed.claim.run.is_none() && queues.finish(0, &again.claimed, None).unwrap());
    assert_eq!(queues.take_parts(&again.claimed).unwrap(), None);
}

/// Another worker has the samples of a run that was made, or has answered its task.
#[test]
fn a_run_that_was_made_is_not_made_again_when_its_worker_is_lost() {
    let queues = Queues::<u64, u32>::new(3);
    queues.share_tasks(2, Some(|&samples| samples)).unwrap();
    queues.put_task(0, 7, 3).unwrap();
    let take = |worker| queues.take_run(worker).unwrap();
    let finish = |worker, run, part| queues.finish(worker, run, Some(part)).unwrap();
    let [first, second, third] = [0, 1, 2].map(|worker| take(worker).unwrap());
    assert!(!finish(0, &first.claimed, 1));
    queues.lose(0);
    assert!(take(0).is_none(), "its samples are there");
    assert!(!finish(1, &second.claimed, 2));
    // Lost before it is made: the one that makes it collates.
    queues.lose(2);
    let again = take(2).unwrap();
    assert_eq!(again.claimed.samples(), third.claimed.samples());
    assert!(finish(2, &again.claimed, 3));
    assert_eq!(queues.take_parts(&again.claimed).unwrap(), Some(vec![1, 2, 3]));
    queues.lose(1);
    assert!(take(1).is_none(), "another worker has taken its samples");
    assert!(queues.reply(2, batch(7, 6), true).unwrap().is_none());
    queues.lose(0);
    assert!(take(0).is_none(), "the task is answered");
}

/// A batch is cut for the workers that run, and a worker is told when it has made something.
#[test]
fn tasks_are_cut_for_the_workers_that_share_them() {
    let queues = Queues::<u64, u32>::new(4);
    queues.share_tasks(4, Some(|&samples| samples)).unwrap();
    queues.share_among(1);
    queues.put_task(0, 0, 8).unwrap();
    assert!(!queues.is_open(), "the newest may not be seen yet");
    queues.share_among(2);
    queues.put_task(0, 1, 8).unwrap();
    assert!(queues.is_open());
    let run = queues.take_run(0).unwrap().unwrap();
    assert_eq!(run.claimed.samples(), 0..8);
    assert!(queues.has_claim(0) && !queues.has_made(0));
    assert_eq!(queues.take_run(1).unwrap().unwrap().claimed.samples(), 0..4);
    assert!(queues.finish(0, &run.claimed, None).unwrap());
    assert!(queues.reply(0, batch(0, 6), true).unwrap().is_none());
    assert!(!queues.has_claim(0), "it is answered");
    assert!(queues.try_next().unwrap().is_some());
    assert!(queues.has_made(0) && !queues.has_made(1));
    queues.share_among(1);
    queues.share_among(2);
    assert!(queues.has_made(0) && !queues.has_made(1));
}

/// A worker that is added makes tasks of the epoch that it begins with, and gets nothing that was meant for the one before.
#[test]
fn a_worker_that_begins_in_a_later_epoch_makes_its_tasks() {
    let queues = Queues::<(), ()>::new(2);
    queues.share_tasks(4, None).unwrap();
    let first = 2 << EPOCH_SHIFT;
    (0..2).for_each(|task| queues.put_task(0, first + task, ()).unwrap());
    assert!(queues.take_run(1).unwrap().is_none());
    queues.put(1, Request::Epoch { number: 3, message: () }).unwrap();
    queues.put(1, Request::End).unwrap();
    assert!(matches!(queues.take_request(1).unwrap(), Some(Request::End)));
    queues.begin_worker(1, 2).unwrap();
    assert_eq!(queues.take_run(1).unwrap().map(|run| run.claimed.plan.seq), Some(first));
    Transport::begin_epoch(&queues, 3);
    assert!(queues.take_request(1).unwrap().is_none());
}
