//! Tasks to the worker with the fewest that it has not answered.

use ringloader_core::plan::ResultOrder;
use ringloader_core::scheduler::Poll;

use crate::fleet::{Backend, Fleet};

fn balanced<B: Backend>(workers: u32, prefetch_factor: u32, order: ResultOrder) -> Fleet<B> {
    let mut fleet = Fleet::new(workers, prefetch_factor, order);
    fleet.scheduler.balance();
    fleet
}

/// Takes the next batch, whose task must be this one, and sends a task. Returns to which worker.
fn step<B: Backend>(fleet: &mut Fleet<B>, expected: u64) -> Option<u32> {
    match fleet.poll() {
        Poll::Arrived { seq, .. } => {
            assert_eq!(seq, expected);
            fleet.accept(seq);
        }
        other => panic!("{other:?}"),
    }
    fleet.send()
}

/// Results that wait behind a slow worker's have arrived.
fn a_worker_that_waits_for_its_turn_gets_the_next_tasks<B: Backend>() {
    let mut fleet = balanced::<B>(3, 2, ResultOrder::InOrder);
    let first: Vec<_> = (0..6).map(|_| fleet.send()).collect();
    assert_eq!(first, [0, 1, 2, 0, 1, 2].map(Some), "nobody has answered");
    fleet.answer(1, 2);
    fleet.answer(2, 2);
    assert!(matches!(fleet.poll(), Poll::Wait { worker: Some(0), .. }));
    fleet.answer(0, 1);
    // Worker 0 still has task 3.
    assert_eq!(step(&mut fleet, 0), Some(1));
    assert_eq!(step(&mut fleet, 1), Some(2));
    assert_eq!(step(&mut fleet, 2), Some(0));
    assert!(matches!(fleet.poll(), Poll::Wait { worker: Some(0), .. }));
    fleet.answer(1, 1);
    fleet.answer(0, 1);
    assert_eq!(step(&mut fleet, 3), Some(1));
    // All have one.
    assert_eq!(step(&mut fleet, 4), Some(2));
}

/// As torch's turns, where all are alike.
fn workers_that_are_alike_are_asked_in_turn<B: Backend>() {
    for order in [ResultOrder::InOrder, ResultOrder::AsCompleted, ResultOrder::AsCompletedRoundRobin] {
        let mut fleet = balanced::<B>(3, 2, order);
        fleet.fill();
        for task in 0..20_u64 {
            let worker = (task % 3) as u32;
            fleet.answer(worker, 1);
            assert_eq!(step(&mut fleet, task), Some(worker), "{order:?}");
        }
    }
}

/// Out of order, a slow worker keeps what it has and gets no more.
fn a_slow_worker_gets_no_more_out_of_order<B: Backend>() {
    let mut fleet = balanced::<B>(2, 2, ResultOrder::AsCompletedRoundRobin);
    fleet.fill();
    for task in 0..10 {
        fleet.answer(1, 1);
        let Poll::Arrived { seq, .. } = fleet.poll() else { panic!("task {task}") };
        assert_eq!(fleet.accept(seq), 1);
        assert_eq!(fleet.send(), Some(1));
    }
}

/// Results of an epoch that was abandoned lie in the rings, and stand for no task of this one.
fn results_of_an_epoch_before_do_not_count<B: Backend>() {
    for order in [ResultOrder::InOrder, ResultOrder::AsCompleted] {
        let mut fleet = balanced::<B>(2, 3, order);
        fleet.fill();
        fleet.answer(0, 3);
        fleet.scheduler.reset();
        let sent: Vec<_> = (0..6).map(|_| fleet.send()).collect();
        assert_eq!(sent, [0, 1, 0, 1, 0, 1].map(Some), "{order:?}");
        fleet.answer(1, 3 + 3);
        fleet.answer(0, 3);
        for _ in 0..6 {
            let Poll::Arrived { seq, .. } = fleet.poll() else { panic!("{order:?}") };
            fleet.accept(seq);
        }
    }
}

fn a_worker_that_was_given_up_gets_none<B: Backend>() {
    let mut fleet = balanced::<B>(3, 1, ResultOrder::InOrder);
    fleet.fill();
    fleet.scheduler.give_up(1);
    fleet.answer(0, 1);
    assert_eq!(step(&mut fleet, 0), Some(0));
    fleet.answer(2, 1);
    assert_eq!(step(&mut fleet, 2), Some(2));
    fleet.scheduler.give_up(0);
    fleet.scheduler.give_up(2);
    assert_eq!(fleet.send(), None);
}

over_both!(
    a_worker_that_waits_for_its_turn_gets_the_next_tasks,
    workers_that_are_alike_are_asked_in_turn,
    a_slow_worker_gets_no_more_out_of_order,
    results_of_an_epoch_before_do_not_count,
    a_worker_that_was_given_up_gets_none,
);
over_queues!(
    a_worker_that_waits_for_its_turn_gets_the_next_tasks,
    workers_that_are_alike_are_asked_in_turn,
    a_slow_worker_gets_no_more_out_of_order,
    results_of_an_epoch_before_do_not_count,
    a_worker_that_was_given_up_gets_none,
);

/// A ring that cannot be read is said in its worker's turn, and costs no other worker's batch.
fn nonsense_is_no_error_of_a_task<B: Backend>() {
    let mut fleet = balanced::<B>(2, 1, ResultOrder::InOrder);
    fleet.fill();
    fleet.backend.commit_nonsense(1);
    fleet.answer(0, 1);
    assert_eq!(step(&mut fleet, 0), Some(0));
    assert!(fleet.try_poll().is_err());
}

mod over_shared_memory {
    #[test]
    fn nonsense_is_no_error_of_a_task() {
        super::nonsense_is_no_error_of_a_task::<crate::rings::Rings>();
        super::nonsense_is_no_error_of_a_task::<crate::double::Double>();
    }
}
