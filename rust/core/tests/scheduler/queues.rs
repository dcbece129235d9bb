//! The queues between threads: as a transport under the scheduler, and what they promise beside it.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use ringloader_core::transport::Transport;
use ringloader_core::transport::message::ResultKind;
use ringloader_core::transport::queues::{Queues, Reply, Request};
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

#[test]
fn a_worker_begins_an_epoch_once_all_tasks_before_are_answered() {
    let queues = Queues::<(), ()>::new(2);
    queues.share_tasks(None).unwrap();
    let of = |epoch: u64, task: u64| epoch << EPOCH_SHIFT | task;
    let begin = |worker, number| queues.put(worker, Request::Epoch { number, message: () }).unwrap();
    let begins = |worker| matches!(queues.take_request(worker).unwrap(), Some(Request::Epoch { .. }));
    let run = |worker| queues.take_run(worker).unwrap().map(|run| run.task.seq);
    let answer = |worker, seq| {
        let reply = Reply { seq, kind: ResultKind::Batch, content: () };
        assert!(queues.reply(worker, reply, true).unwrap().is_none());
    };
    (0..2).for_each(|task| queues.put_task(0, task, ()).unwrap());
    (0..2).for_each(|worker| begin(worker, 1));
    (0..2).for_each(|task| queues.put_task(0, of(1, task), ()).unwrap());
    assert!(!begins(0));
    assert_eq!([run(0), run(1)], [Some(0), Some(1)]);
    assert_eq!([begins(0), begins(1)], [false; 2]);
    assert_eq!([run(0), run(1)], [None; 2]);
    answer(1, 1);
    assert!(!begins(1));
    answer(0, 0);
    assert_eq!((begins(0), run(0), run(1)), (true, Some(of(1, 0)), None));
    // Nobody wants that epoch any more.
    (0..2).for_each(|worker| begin(worker, 2));
    queues.put_task(0, of(2, 0), ()).unwrap();
    assert_eq!([begins(0), begins(1), begins(1)], [false, true, false]);
    Transport::begin_epoch(&queues, 2);
    assert_eq!([begins(0), begins(1)], [true; 2]);
    assert_eq!([run(1), run(0)], [Some(of(2, 0)), None]);
    // The end comes past an epoch that cannot begin.
    begin(0, 3);
    queues.put(0, Request::End).unwrap();
    assert!(matches!(queues.take_request(0).unwrap(), Some(Request::End)));
}
