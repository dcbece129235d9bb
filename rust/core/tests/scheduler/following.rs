//! Tests an epoch whose tasks go out while results of the one before still come.

use ringloader_core::plan::ResultOrder;
use ringloader_core::scheduler::{EPOCH_SHIFT, Poll, Scheduler};

use crate::fleet::{Backend, Fleet};
use crate::queues::ThreadQueues;
use crate::rings::Rings;

over_both!(
    each_epoch_gets_its_own_results,
    a_lost_worker_is_told_past_results_of_the_next_epoch,
    what_was_given_up_is_dropped,
    no_task_is_counted_as_load_of_the_epoch_before
);

over_queues!(
    each_epoch_gets_its_own_results,
    a_lost_worker_is_told_past_results_of_the_next_epoch,
    what_was_given_up_is_dropped,
    no_task_is_counted_as_load_of_the_epoch_before
);

const ORDERS: [ResultOrder; 3] =
    [ResultOrder::InOrder, ResultOrder::AsCompleted, ResultOrder::AsCompletedRoundRobin];

/// A fleet of two workers with two tasks each, and the next epoch with as many.
fn followed<B: Backend>(order: ResultOrder) -> (Fleet<B>, Scheduler<u64>) {
    let mut fleet = Fleet::<B>::new(2, 2, order);
    fleet.fill();
    let mut next = fleet.scheduler.follow();
    while !next.is_full() {
        next.send(fleet.backend.transport(), B::index()).unwrap();
    }
    (fleet, next)
}

/// Takes batches until there are no more, and keeps those of the next epoch. Returns the numbers of the tasks.
fn drained<B: Backend>(fleet: &mut Fleet<B>, next: Option<&mut Scheduler<u64>>) -> Vec<u64> {
    let (mut taken, mut next) = (Vec::new(), next);
    loop {
        match fleet.poll() {
            Poll::Arrived { seq, .. } => {
                fleet.accept(seq);
                taken.push(seq);
            }
            Poll::Ready { seq, worker, .. } => {
                fleet.scheduler.record_delivered(worker);
                taken.push(seq);
            }
            Poll::Early { seq, .. } => next.as_mut().expect("no epoch follows").buffer(seq, seq).unwrap(),
            Poll::End => return taken,
            other => panic!("{other:?} behind {taken:?}"),
        }
    }
}

fn each_epoch_gets_its_own_results<B: Backend>() {
    for order in ORDERS {
        let (mut fleet, mut next) = followed::<B>(order);
        // One worker is at the next epoch before the other has begun.
        fleet.answer(1, 4);
        fleet.answer(0, 4);
        let mut taken = drained(&mut fleet, Some(&mut next));
        next.continue_from(&mut fleet.scheduler);
        fleet.scheduler = next;
        taken.extend(drained(&mut fleet, None));
        let (mut first, mut second) = (taken[..4].to_vec(), taken[4..].to_vec());
        if order != ResultOrder::InOrder {
            first.sort_unstable();
            second.sort_unstable();
        }
        assert_eq!((first, second), (vec![0, 1, 2, 3], vec![0, 1, 2, 3]), "{order:?}");
    }
}

fn a_lost_worker_is_told_past_results_of_the_next_epoch<B: Backend>() {
    for order in ORDERS {
        let (mut fleet, mut next) = followed::<B>(order);
        fleet.answer(0, 4);
        fleet.answer(1, 1);
        fleet.backend.end(1);
        let mut taken = 0;
        loop {
            match fleet.poll() {
                Poll::Arrived { seq, .. } => {
                    fleet.accept(seq);
                    taken += 1;
                }
                Poll::Early { seq, .. } => next.buffer(seq, seq).unwrap(),
                Poll::Lost { worker } => break assert_eq!(worker, 1),
                other => panic!("{other:?}"),
            }
        }
        assert!(taken <= 3, "{order:?}");
    }
}

/// The results of an epoch that was given up are not taken for those of the one that begins in its place.
fn what_was_given_up_is_dropped<B: Backend>() {
    for order in ORDERS {
        let (mut fleet, next) = followed::<B>(order);
        fleet.answer(0, 3);
        drop(next);
        fleet.scheduler.reset();
        fleet.fill();
        for worker in [0, 1] {
            fleet.answer(worker, 6);
        }
        let mut taken = drained(&mut fleet, None);
        taken.sort_unstable();
        assert_eq!(taken, [0, 1, 2, 3], "{order:?}");
    }
}

/// Tasks of the next epoch go to the workers in turn, and drop no result of this one.
fn no_task_is_counted_as_load_of_the_epoch_before<B: Backend>() {
    let mut fleet = Fleet::<B>::new(2, 2, ResultOrder::InOrder);
    fleet.scheduler.balance();
    fleet.fill();
    fleet.answer(0, 2);
    let mut next = fleet.scheduler.follow();
    let to: Vec<_> =
        (0..4).map(|_| next.send(fleet.backend.transport(), B::index()).unwrap().unwrap()).collect();
    assert_eq!(to, [0, 1, 0, 1]);
    fleet.answer(1, 2);
    assert_eq!(drained(&mut fleet, Some(&mut next)), [0, 1, 2, 3]);
    next.continue_from(&mut fleet.scheduler);
    fleet.scheduler = next;
    assert_eq!(fleet.backend.take_task(0).unwrap() >> EPOCH_SHIFT, 1);
    assert_eq!(fleet.backend.take_task(1).unwrap() >> EPOCH_SHIFT, 1);
}

/// Where all workers share all tasks, the next epoch is not lost with a worker: its results there are taken too.
#[test]
fn results_of_the_next_epoch_are_taken_of_a_lost_worker_before_the_loss_is_told() {
    let mut fleet = Fleet::<ThreadQueues>::new(2, 2, ResultOrder::InOrder);
    fleet.backend.transport().share_tasks(4, None).unwrap();
    fleet.scheduler.share_tasks(2);
    fleet.fill();
    let mut next = fleet.scheduler.follow();
    assert!(next.shares() && next.epoch() == 1);
    while !next.is_full() {
        next.send(fleet.backend.transport(), ()).unwrap();
    }
    for seq in [0, 1 << EPOCH_SHIFT] {
        fleet.backend.commit(0, seq, 0);
    }
    fleet.backend.end(0);
    let mut seen = Vec::new();
    loop {
        match fleet.poll() {
            Poll::Arrived { seq, .. } => {
                fleet.accept(seq);
                seen.push((0, seq));
            }
            Poll::Early { seq, .. } => {
                next.buffer(seq, seq).unwrap();
                seen.push((1, seq));
            }
            Poll::Lost { worker } => break assert_eq!(worker, 0),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(seen, [(0, 0), (1, 0)]);
}

#[test]
fn a_number_that_was_told_is_no_other_epochs() {
    let mut fleet = Fleet::<Rings>::new(1, 1, ResultOrder::InOrder);
    let scheduler = &mut fleet.scheduler;
    assert_eq!((scheduler.number_next(), scheduler.number_next()), (1, 2));
    let mut next = scheduler.follow();
    assert_eq!((next.epoch(), scheduler.number_next()), (2, 3));
    next.continue_from(scheduler);
    next.reset();
    assert_eq!(next.epoch(), 3);
    next.reset();
    assert_eq!(next.epoch(), 4);
}
