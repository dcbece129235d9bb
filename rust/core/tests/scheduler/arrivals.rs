//! Results that come and cannot be had, and tasks whose numbers go round.

use ringloader_core::Error;
use ringloader_core::plan::ResultOrder;
use ringloader_core::scheduler::{EPOCH_SHIFT, Poll};

use crate::fleet::{Backend, Fleet};

const ORDERS: [ResultOrder; 3] =
    [ResultOrder::InOrder, ResultOrder::AsCompleted, ResultOrder::AsCompletedRoundRobin];

/// Epochs before a task's number has no room for the next one.
const LAST: u64 = (1 << (u64::BITS - EPOCH_SHIFT)) - 1;

over_both!(
    epochs_go_round,
    what_cannot_be_had_is_told_with_its_task_and_all_else_goes_on,
    what_cannot_be_had_of_an_epoch_before_is_no_error,
    a_descriptor_that_cannot_be_read_is_told_at_each_call
);

over_queues!(epochs_go_round);

/// Takes all that is left of the epoch. Returns the tasks that were answered, and those that failed.
fn drain<B: Backend>(fleet: &mut Fleet<B>) -> (Vec<u64>, Vec<u64>) {
    let (mut came, mut failed) = (Vec::new(), Vec::new());
    loop {
        match fleet.poll() {
            Poll::End => return (came, failed),
            Poll::Ready { worker, data, .. } => {
                fleet.scheduler.record_delivered(worker);
                came.push(data);
            }
            Poll::Arrived { seq, received } => {
                assert_eq!(B::read(&received).1, seq as i64, "a batch of another epoch");
                if let Some((worker, seq)) = fleet.scheduler.accept(seq, seq).unwrap() {
                    fleet.scheduler.record_delivered(worker);
                    came.push(seq);
                }
            }
            Poll::Failed { seq, .. } => {
                failed.push(seq);
                if let Some((worker, seq)) = fleet.scheduler.accept(seq, seq).unwrap() {
                    fleet.scheduler.record_delivered(worker);
                    came.push(seq);
                }
            }
            other => panic!("{other:?} after {came:?}"),
        }
    }
}

/// Answers all tasks of a worker: with their numbers, or those of an epoch before with no number at all.
fn work<B: Backend>(fleet: &Fleet<B>, worker: u32, epoch: u64) {
    while let Some(seq) = fleet.backend.take_task(worker) {
        let is_new = seq >> EPOCH_SHIFT == epoch;
        fleet.backend.commit(worker, seq, if is_new { (seq & ((1 << EPOCH_SHIFT) - 1)) as i64 } else { -1 });
    }
}

/// Every other one is given up: what it has committed and what it has not done yet are left for the next.
fn epochs_go_round<B: Backend>() {
    for order in ORDERS {
        for first in [LAST - 1, LAST] {
            let mut fleet = Fleet::<B>::new(2, 3, order);
            // As if so many epochs had begun and ended before.
            (0..first).for_each(|_| _ = fleet.scheduler.number_next());
            fleet.scheduler.reset();
            for epoch in [first, first + 2].map(|given_up| (given_up + 1) % (LAST + 1)) {
                fleet.fill();
                let seq = fleet.backend.take_task(1).unwrap();
                fleet.backend.commit(1, seq, -1);
                fleet.scheduler.reset();
                fleet.fill();
                work(&fleet, 0, epoch);
                work(&fleet, 1, epoch);
                let (mut came, failed) = drain(&mut fleet);
                came.sort_unstable();
                assert_eq!((came, failed), ((0..6).collect(), vec![]), "{order:?}, epoch {epoch}");
                fleet.scheduler.reset();
            }
        }
    }
}

fn what_cannot_be_had_is_told_with_its_task_and_all_else_goes_on<B: Backend>() {
    for order in ORDERS {
        let mut fleet = Fleet::<B>::new(2, 3, order);
        for epoch in 0..2 {
            fleet.fill();
            for worker in 0..2 {
                let seq = fleet.backend.take_task(worker).unwrap();
                fleet.backend.commit(worker, seq, (seq & 0xff) as i64);
                let seq = fleet.backend.take_task(worker).unwrap();
                fleet.backend.commit_missing(worker, seq);
                work(&fleet, worker, epoch);
            }
            let (mut came, mut failed) = drain(&mut fleet);
            came.sort_unstable();
            failed.sort_unstable();
            assert_eq!(came, (0..6).collect::<Vec<_>>(), "{order:?}: each is awaited once");
            assert_eq!(failed, [2, 3], "{order:?}");
            fleet.scheduler.reset();
        }
    }
}

/// A result of an abandoned epoch is dropped, also where the worker has ended.
fn what_cannot_be_had_of_an_epoch_before_is_no_error<B: Backend>() {
    for order in ORDERS {
        for ended in [false, true] {
            let mut fleet = Fleet::<B>::new(2, 1, order);
            fleet.fill();
            let old = fleet.backend.take_task(1).unwrap();
            fleet.backend.commit_missing(1, old);
            fleet.scheduler.reset();
            fleet.fill();
            work(&fleet, 0, 1);
            if ended {
                fleet.backend.end(1);
                loop {
                    match fleet.poll() {
                        Poll::Arrived { seq, .. } => drop(fleet.accept(seq)),
                        Poll::Lost { worker: 1 } => break,
                        other => panic!("{other:?}"),
                    }
                }
            } else {
                work(&fleet, 1, 1);
                let (came, failed) = drain(&mut fleet);
                assert_eq!((came.len(), failed), (2, vec![]));
            }
        }
    }
}

/// The task of such a descriptor is not known: each caller gets the error, as often as it asks, and never waits.
fn a_descriptor_that_cannot_be_read_is_told_at_each_call<B: Backend>() {
    for order in ORDERS {
        let mut fleet = Fleet::<B>::new(1, 3, order);
        fleet.fill();
        fleet.answer(0, 1);
        fleet.backend.commit_nonsense(0);
        let Poll::Arrived { seq: 0, .. } = fleet.poll() else { panic!("the first is whole") };
        fleet.accept(0);
        for _ in 0..3 {
            let told = fleet.try_poll();
            assert!(matches!(told, Err(Error::Corrupt(_))), "{told:?}");
        }
        fleet.scheduler.reset();
        fleet.fill();
        assert!(fleet.try_poll().is_err());
    }
}
