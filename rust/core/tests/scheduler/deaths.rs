//! Tests what the parent learns of a worker that ends, and when.

use std::process::Command;
use std::time::{Duration, Instant};

use ringloader_core::plan::ResultOrder;
use ringloader_core::scheduler::Poll;

use crate::fleet::{Backend, Fleet};
use crate::rings::Rings;

over_both!(
    an_abandoned_epoch_hides_no_death,
    what_was_committed_comes_before_the_news,
    after_closing_nothing_is_taken_and_nothing_hangs
);

over_queues!(
    an_abandoned_epoch_hides_no_death,
    what_was_committed_comes_before_the_news,
    after_closing_nothing_is_taken_and_nothing_hangs
);

/// A worker ends while another one always has a result ready, so that the parent never sleeps.
#[test]
fn a_death_is_told_while_others_are_busy() {
    let late = |order| {
        let mut fleet = Fleet::<Rings>::new(2, 2, order);
        fleet.fill();
        let mut child = Command::new("sleep").arg("60").spawn().unwrap();
        fleet.backend.engine.watch_worker(1, child.id()).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        let (death, mut taken) = (Instant::now(), 0);
        loop {
            fleet.answer(0, 1);
            match fleet.poll() {
                Poll::Arrived { seq, received } => {
                    assert_eq!(Rings::read(&received).0, 0);
                    fleet.accept(seq);
                    fleet.send();
                    taken += 1;
                }
                Poll::Lost { worker } => {
                    assert!(worker == 1 && taken > 0);
                    return death.elapsed();
                }
                other => panic!("{other:?} after {taken} batches of the other worker"),
            }
            assert!(death.elapsed() < Duration::from_secs(5), "no word of the death in {taken} batches");
        }
    };
    // Another process may have the processor for longer: not three times.
    let best = (0..3).map(|_| late(ResultOrder::AsCompleted)).min().unwrap();
    assert!(best <= Duration::from_millis(100), "told {best:?} after the death");
}

/// Results of the epoch before, of a worker that has ended, put nothing off.
fn an_abandoned_epoch_hides_no_death<B: Backend>() {
    for order in [ResultOrder::InOrder, ResultOrder::AsCompleted] {
        let mut fleet = Fleet::<B>::new(2, 2, order);
        fleet.fill();
        fleet.answer(1, 2);
        fleet.scheduler.reset();
        fleet.fill();
        fleet.backend.end(1);
        let told = fleet.poll();
        assert!(matches!(told, Poll::Lost { worker: 1 }), "{told:?}, and worker 0 is at work for hours");
    }
}

fn what_was_committed_comes_before_the_news<B: Backend>() {
    for order in [ResultOrder::InOrder, ResultOrder::AsCompleted] {
        let mut fleet = Fleet::<B>::new(2, 3, order);
        fleet.fill();
        fleet.answer(1, 2);
        fleet.backend.end(1);
        let mut came = Vec::new();
        loop {
            match fleet.poll() {
                Poll::Arrived { seq, received } => {
                    came.push(B::read(&received).0);
                    fleet.accept(seq);
                }
                Poll::Wait { worker, .. } => {
                    assert_eq!(worker, Some(0), "in order, worker 0 is first");
                    fleet.answer(0, 1);
                }
                Poll::Lost { worker } => {
                    assert_eq!(worker, 1);
                    break;
                }
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(came.iter().filter(|&&worker| worker == 1).count(), 2, "{order:?}: {came:?}");
        // The others go on, and each worker is reported once.
        fleet.scheduler.give_up(1);
        fleet.answer(0, 3);
        let left = std::iter::from_fn(|| match fleet.poll() {
            Poll::Arrived { seq, .. } => Some(fleet.accept(seq)),
            Poll::End => None,
            other => panic!("{other:?}"),
        });
        assert_eq!(left.count(), 3 - came.iter().filter(|&&worker| worker == 0).count());
        // A new epoch asks it again, as torch does.
        fleet.scheduler.reset();
        fleet.fill();
        assert!(matches!(fleet.poll(), Poll::Lost { worker: 1 }));
    }
}

/// After the transport is closed, its rings are still there, with what was never taken.
fn after_closing_nothing_is_taken_and_nothing_hangs<B: Backend>() {
    for order in [ResultOrder::InOrder, ResultOrder::AsCompleted] {
        let mut fleet = Fleet::<B>::new(2, 2, order);
        fleet.fill();
        fleet.answer(0, 2);
        fleet.answer(1, 2);
        fleet.scheduler.reset();
        fleet.fill();
        fleet.backend.end(1);
        fleet.backend.close();
        assert!(matches!(fleet.poll(), Poll::Lost { worker: 1 }));
        fleet.scheduler.give_up(1);
        let end = Instant::now() + Duration::from_secs(20);
        assert!(matches!(fleet.poll(), Poll::Wait { .. }) && Instant::now() < end);
        assert!(matches!(fleet.scheduler.poll::<B::Transport>(None), Ok(Poll::End)), "without an engine");
    }
}
