//! Batches that lie in a segment of their own, and the room that they take.

use std::time::{Duration, Instant};

use ringloader_core::sync::Ordering;
use ringloader_core::transport::engine::Engine;
use ringloader_core::transport::port::{Port, Room};
use ringloader_core::transport::received::Received;

use crate::both_ends::{
    LEAF, SHARE, answer, answer_oversize, check, content, engine, port, send_own, take, take_task,
};

#[test]
fn an_oversize_batch_gives_its_slot_back() {
    let engine = engine();
    let port = port(&engine, None);
    // More than there are slots.
    for seq in 0..u64::from(engine.control().geometry().slots) + 8 {
        answer_oversize(&engine, &port, seq);
        assert!(take(&engine, seq).is_oversize());
    }
}

/// Commits a batch in a segment of its own of `len` bytes. `false`: there is no room yet.
fn answer_own(engine: &Engine, port: &Port, seq: u64, len: u64) -> bool {
    take_task(engine, port, seq);
    send_own(&mut port.begin_commit(), seq, len).is_some()
}

/// Returns the room for a batch in a slot. The batch is not committed.
fn has_room(engine: &Engine, port: &Port, seq: u64) -> Room {
    take_task(engine, port, seq);
    port.begin_commit().reserve(LEAF).unwrap()
}

#[test]
fn a_segment_is_used_again_after_the_last_view_of_its_batch() {
    let engine = engine();
    let port = port(&engine, None);
    let answer = |seq| {
        take_task(&engine, &port, seq);
        send_own(&mut port.begin_commit(), seq, SHARE / 4).unwrap()
    };
    let mut read = Vec::new();
    for seq in (0..20).map(|round| 10 * round) {
        let first = answer(seq);
        let batch = take(&engine, seq);
        let view = batch.backing().clone();
        drop(batch);
        let second = answer(seq + 1);
        assert_ne!(first, second, "somebody has a view of the first");
        assert_ne!(answer(seq + 2), second, "the second is on its way");
        drop([1, 2].map(|next| take(&engine, seq + next)));
        assert_eq!(answer(seq + 3), second);
        take(&engine, seq + 3);
        view.copy_out(0, LEAF, &mut read).unwrap();
        assert_eq!(read, content(seq), "it was written to while somebody read it");
        drop(view);
    }
}

#[test]
fn what_came_back_makes_room() {
    let engine = engine();
    let port = port(&engine, None);
    for (seq, len) in [(1, SHARE / 2), (2, SHARE / 4)] {
        assert!(answer_own(&engine, &port, seq, len));
        take(&engine, seq);
    }
    assert!(answer_own(&engine, &port, 3, SHARE / 16), "no segment is so small");
    assert!(answer_own(&engine, &port, 4, SHARE - SHARE / 8), "nothing is left of the others");
    for seq in [3, 4] {
        take(&engine, seq);
    }
    answer(&engine, &port, 5);
    take_task(&engine, &port, 6);
    assert!(matches!(port.begin_commit().reserve(SHARE / 2).unwrap(), Room::Ready), "a slot needs it");
    take(&engine, 5);
}

#[test]
fn segments_on_their_way_are_within_the_share() {
    let engine = engine();
    let port = port(&engine, None);
    // More often than the ring has places, so that positions come round.
    for seq in (0..20).map(|round| 10 * round) {
        assert!(answer_own(&engine, &port, seq, SHARE / 2 - 8));
        assert!(answer_own(&engine, &port, seq + 1, SHARE / 2 - 5000));
        assert!(
            !answer_own(&engine, &port, seq + 2, 8000),
            "the last two pages of the share are one too few"
        );
        assert!(answer_own(&engine, &port, seq + 3, 1000));
        assert!(matches!(has_room(&engine, &port, seq + 4), Room::Later));
        // Once the batch is taken, its memory is the user's.
        let held = take(&engine, seq);
        assert!(matches!(has_room(&engine, &port, seq + 5), Room::Ready));
        assert!(answer_own(&engine, &port, seq + 6, SHARE / 2 - (16 << 10)));
        let rest = [1, 3, 6].map(|next| take(&engine, seq + next));
        assert!(rest.iter().all(Received::is_oversize));
        drop(held);
    }
}

#[test]
fn a_batch_larger_than_the_share_goes_alone_and_without_warm_slots() {
    let engine = engine();
    let port = port(&engine, None);
    let resident = || engine.control().worker(0).slots.resident.load(Ordering::Relaxed);
    answer(&engine, &port, 1);
    answer(&engine, &port, 2);
    assert!(!answer_own(&engine, &port, 3, 3 * SHARE), "two come before it");
    drop([1, 2].map(|seq| take(&engine, seq)));
    assert!(resident() > 0);
    assert!(answer_own(&engine, &port, 4, 3 * SHARE));
    assert_eq!(resident(), 0);
    assert!(!answer_own(&engine, &port, 5, 1));
    assert!(matches!(has_room(&engine, &port, 6), Room::Later));
    let held = take(&engine, 4);
    assert!(answer_own(&engine, &port, 7, 3 * SHARE));
    drop((held, take(&engine, 7)));
    assert!(matches!(has_room(&engine, &port, 8), Room::Ready));
}

/// An engine with so many workers that each has fewer slots than tasks.
fn crowded() -> Engine {
    Engine::new(200, 600, 128 << 20).unwrap()
}

/// Returns true if the worker sleeps for room until its time is over, which takes no less.
fn sleeps(port: &Port) -> bool {
    let begun = Instant::now();
    port.wait_for_room().unwrap();
    begun.elapsed() >= Duration::from_millis(5)
}

/// The worker announces its sleep after the room has come, so no notification comes.
#[test]
fn room_that_comes_between_the_look_and_the_sleep_ends_the_wait() {
    let engine = crowded();
    let slots = u64::from(engine.control().geometry().slots);
    let port = port(&engine, None);
    (0..slots).for_each(|seq| answer(&engine, &port, seq));
    let mut found = [false; 2];
    // A thread that loses its core comes back too late to tell: once is enough.
    for seq in 0..20 {
        assert!(matches!(has_room(&engine, &port, 1000), Room::Later));
        // What was taken before may end one wait.
        port.wait_for_room().unwrap();
        assert!(sleeps(&port), "nothing has come");
        let taken = take(&engine, seq);
        found[0] |= !sleeps(&port);
        drop(taken);
        found[1] |= !sleeps(&port);
        answer(&engine, &port, slots + seq);
    }
    assert_eq!(found, [true; 2], "a batch that was taken, a slot that came back");
}

#[test]
fn a_worker_without_a_free_slot_waits_for_the_parent() {
    let engine = crowded();
    let slots = u64::from(engine.control().geometry().slots);
    assert_eq!((slots, engine.control().geometry().window), (32, 64 << 20));
    let port = port(&engine, None);
    (0..slots).for_each(|seq| answer(&engine, &port, seq));
    let is_stuck = |seq| {
        take_task(&engine, &port, seq);
        assert!(port.allocate(LEAF).unwrap().is_none());
        matches!(port.begin_commit().reserve(LEAF).unwrap(), Room::Later)
    };
    assert!(is_stuck(100));
    drop(take(&engine, 0));
    answer(&engine, &port, 101);
    assert!(is_stuck(102));

    let mut held: Vec<_> = (1..=slots / 2).map(|seq| take(&engine, seq)).collect();
    assert!(held.iter_mut().all(Received::lease));
    assert!(is_stuck(103), "the other half is on its way");
    for seq in slots / 2 + 1..slots {
        assert!(!take(&engine, seq).lease(), "copied out, and dropped");
    }
    for seq in 104..200 {
        answer(&engine, &port, seq);
        assert!(!take(&engine, if seq == 104 { 101 } else { seq - 1 }).lease());
    }
    held.iter().for_each(|batch| check(&engine, batch));
}

#[test]
fn free_slots_make_room_for_a_segment() {
    let engine = engine();
    let port = port(&engine, None);
    let resident = || engine.control().worker(0).slots.resident.load(Ordering::Relaxed);
    for seq in 1..9 {
        answer(&engine, &port, seq);
    }
    let mut batches: Vec<_> = (1..9).map(|seq| take(&engine, seq)).collect();
    let all = resident();
    assert!(answer_own(&engine, &port, 20, SHARE - all - 8));
    assert_eq!(resident(), all);
    take(&engine, 20);
    batches.truncate(3);
    // Beside the segment, the share has room for the three slots that are held and one of those that came back.
    assert!(answer_own(&engine, &port, 21, SHARE - all / 2 - 8));
    assert_eq!(resident(), all / 2);
    take(&engine, 21);
    batches.iter().for_each(|batch| check(&engine, batch));
}

/// Nothing of a batch that was given up is counted, and a successor begins anew.
#[test]
fn what_was_not_committed_takes_no_room() {
    let engine = engine();
    let first = port(&engine, None);
    for seq in 0..5 {
        take_task(&engine, &first, seq);
        let mut commit = first.begin_commit();
        assert!(commit.own_segment(SHARE).unwrap());
    }
    assert!(answer_own(&engine, &first, 5, SHARE));
    assert!(!answer_own(&engine, &first, 6, SHARE));
    drop(first);
    take(&engine, 5);
    let busy = engine.succeed(0).unwrap();
    let second = port(&engine, Some(&busy));
    assert!(answer_own(&engine, &second, 7, SHARE));
    assert!(!answer_own(&engine, &second, 8, 1));
    take(&engine, 7);
}
