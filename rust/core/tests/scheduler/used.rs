//! Tasks to the first workers only, whose number changes.

use ringloader_core::plan::ResultOrder;
use ringloader_core::scheduler::Poll;
use ringloader_core::transport::queues::TaskRun;

use crate::fleet::{Backend, Fleet};
use crate::queues::ThreadQueues;

const ORDERS: [ResultOrder; 3] =
    [ResultOrder::InOrder, ResultOrder::AsCompleted, ResultOrder::AsCompletedRoundRobin];

fn first<B: Backend>(workers: u32, used: u32, order: ResultOrder) -> Fleet<B> {
    let mut fleet = Fleet::new(workers, 2, order);
    fleet.scheduler.balance();
    fleet.use_first(used);
    fleet
}

/// Takes all batches that are there, in the order of their tasks. Returns how many.
fn take<B: Backend>(fleet: &mut Fleet<B>) -> usize {
    let mut count = 0;
    while let Poll::Arrived { seq, .. } = fleet.poll() {
        fleet.accept(seq);
        count += 1;
    }
    count
}

fn only_the_first_workers_get_tasks<B: Backend>() {
    for order in ORDERS {
        let mut fleet = first::<B>(4, 2, order);
        assert_eq!(fleet.scheduler.most_tasks(), 4);
        let sent: Vec<_> = (0..4).map(|_| fleet.send()).collect();
        assert_eq!(sent, [0, 1, 0, 1].map(Some), "{order:?}");
        assert!(fleet.scheduler.is_full());
        fleet.use_first(3);
        assert_eq!(fleet.scheduler.most_tasks(), 6);
        assert_eq!([fleet.send(), fleet.send()], [Some(2); 2], "{order:?}: it has none");
        assert!(fleet.scheduler.is_full());
        assert_eq!(&fleet.scheduler.unanswered(fleet.backend.transport())[..], [2, 2, 2, 0]);
        fleet.answer(1, 2);
        assert_eq!(&fleet.scheduler.unanswered(fleet.backend.transport())[..], [2, 0, 2, 0]);
    }
}

/// A worker that gets no more tasks answers the ones that it has.
fn fewer_workers_lose_no_task<B: Backend>() {
    for order in ORDERS {
        let mut fleet = first::<B>(3, 3, order);
        fleet.fill();
        fleet.use_first(1);
        assert!(fleet.scheduler.is_full() && fleet.scheduler.varies());
        (0..3).for_each(|worker| fleet.answer(worker, 2));
        assert_eq!(take(&mut fleet), 6, "{order:?}");
        assert_eq!([fleet.send(), fleet.send()], [Some(0); 2]);
        assert!(fleet.scheduler.is_full());
        fleet.scheduler.reset();
        assert_eq!([fleet.send(), fleet.send()], [Some(0); 2], "{order:?}: in the next epoch too");
    }
}

/// The end of a worker that owes nothing is no news for the one that runs in its place; that of another one is.
fn a_worker_runs_again<B: Backend>() {
    for order in ORDERS {
        let mut fleet = first::<B>(2, 2, order);
        fleet.fill();
        fleet.use_first(1);
        fleet.answer(0, 2);
        fleet.answer(1, 2);
        fleet.backend.end(1);
        assert_eq!(take(&mut fleet), 4, "{order:?}");
        fleet.scheduler.begin_worker(1);
        fleet.use_first(2);
        fleet.fill();
        fleet.answer(0, 2);
        // Nothing says that it has ended.
        while let Poll::Arrived { seq, .. } = fleet.poll() {
            fleet.accept(seq);
        }
        assert!(matches!(fleet.poll(), Poll::Wait { .. }), "{order:?}");
        fleet.backend.end(0);
        fleet.answer(1, 2);
        assert!(take(&mut fleet) > 0);
        fleet.fill();
        let mut lost = None;
        for _ in 0..20 {
            match fleet.poll() {
                Poll::Lost { worker } => lost = Some(worker),
                Poll::Arrived { seq, .. } => {
                    fleet.accept(seq);
                }
                _ => fleet.answer(1, 2),
            }
            if lost.is_some() {
                break;
            }
        }
        assert_eq!(lost, Some(0), "{order:?}");
    }
}

/// A worker that was added has begun once its first task is answered, also out of order.
fn a_worker_has_begun_with_its_first_answer<B: Backend>() {
    for order in ORDERS {
        let mut fleet = first::<B>(2, 1, order);
        assert!(fleet.scheduler.has_begun(fleet.backend.transport()));
        fleet.fill();
        fleet.scheduler.begin_worker(1);
        fleet.use_first(2);
        assert!(!fleet.scheduler.has_begun(fleet.backend.transport()), "{order:?}: it has no task");
        fleet.fill();
        fleet.answer(0, 2);
        assert_eq!(take(&mut fleet), 2, "{order:?}");
        assert!(!fleet.scheduler.has_begun(fleet.backend.transport()), "{order:?}");
        fleet.answer(1, 1);
        assert_eq!(take(&mut fleet), 1, "{order:?}");
        assert!(fleet.scheduler.has_begun(fleet.backend.transport()), "{order:?}");
        // Nothing is awaited of one that gets no more tasks.
        fleet.scheduler.begin_worker(1);
        fleet.use_first(1);
        assert!(fleet.scheduler.has_begun(fleet.backend.transport()), "{order:?}");
    }
}

/// Where all workers share all tasks: one that was to end and has is no loss, unless it had begun something.
#[test]
fn the_end_of_a_worker_that_shares() {
    let mut fleet = Fleet::<ThreadQueues>::new(3, 1, ResultOrder::InOrder);
    fleet.backend.transport().share_tasks(3, None).unwrap();
    fleet.scheduler.share_tasks(3);
    fleet.scheduler.use_first(fleet.backend.transport(), 2, 3);
    fleet.fill();
    let take_run = |fleet: &Fleet<ThreadQueues>, worker| fleet.backend.transport().take_run(worker).unwrap();
    let commit = |fleet: &Fleet<ThreadQueues>, worker, run: &TaskRun<()>| {
        assert!(fleet.backend.transport().finish(worker, &run.claimed, None).unwrap());
        fleet.backend.commit(worker, run.claimed.plan.seq, 0);
    };
    let unanswered =
        |fleet: &Fleet<ThreadQueues>| fleet.scheduler.unanswered(fleet.backend.transport()).to_vec();
    assert_eq!(unanswered(&fleet), [1, 1, 0], "all but the newest is open");
    let [first, second] = [0, 1].map(|worker| take_run(&fleet, worker).unwrap());
    assert_eq!([first.claimed.plan.seq, second.claimed.plan.seq], [0, 1]);
    assert_eq!(unanswered(&fleet), [1, 1, 0]);
    commit(&fleet, 0, &first);
    assert_eq!(unanswered(&fleet), [0, 1, 0], "the newest one is open, and the first idle");
    fleet.scheduler.use_first(fleet.backend.transport(), 1, 3);
    assert!(!fleet.scheduler.retire(fleet.backend.transport(), 1), "it has begun a task");
    commit(&fleet, 1, &second);
    fleet.backend.end(1);
    assert!(fleet.scheduler.retire(fleet.backend.transport(), 1));
    assert_eq!(take(&mut fleet), 2);
    assert!(matches!(fleet.poll(), Poll::Wait { .. }), "it is not missed");
    // Again, and it ends with a task.
    fleet.scheduler.begin_worker(1);
    fleet.scheduler.use_first(fleet.backend.transport(), 2, 3);
    assert!(!fleet.scheduler.has_begun(fleet.backend.transport()));
    assert_eq!(take_run(&fleet, 1).map(|run| run.claimed.plan.seq), Some(2));
    assert!(!fleet.scheduler.has_begun(fleet.backend.transport()), "nothing of it is there");
    fleet.scheduler.use_first(fleet.backend.transport(), 1, 3);
    assert!(fleet.scheduler.has_begun(fleet.backend.transport()), "nothing more is awaited of it");
    fleet.backend.end(1);
    assert!(!fleet.scheduler.retire(fleet.backend.transport(), 1));
    assert!(matches!(fleet.poll(), Poll::Lost { worker: 1 }));
    fleet.scheduler.leave_to_others(fleet.backend.transport(), 1);
    assert_eq!(take_run(&fleet, 0).map(|run| run.claimed.plan.seq), Some(2), "what it had is for the others");
    // Tasks are counted for workers that do not run. Nobody waits for them when the last one has gone.
    fleet.backend.end(0);
    assert!(matches!(fleet.poll(), Poll::Lost { worker: 0 }));
    fleet.scheduler.leave_to_others(fleet.backend.transport(), 0);
    assert!(matches!(fleet.poll(), Poll::End));
}

/// The epoch that follows has as many.
fn the_next_epoch_has_as_many<B: Backend>() {
    let mut fleet = first::<B>(3, 2, ResultOrder::InOrder);
    let next = fleet.scheduler.follow();
    assert_eq!(next.most_tasks(), 4);
    assert!(next.varies());
}

over_both!(
    only_the_first_workers_get_tasks,
    fewer_workers_lose_no_task,
    a_worker_runs_again,
    a_worker_has_begun_with_its_first_answer,
    the_next_epoch_has_as_many,
);
over_queues!(
    only_the_first_workers_get_tasks,
    fewer_workers_lose_no_task,
    a_worker_runs_again,
    a_worker_has_begun_with_its_first_answer,
    the_next_epoch_has_as_many,
);
