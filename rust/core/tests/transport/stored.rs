//! Engines between two epochs.

use ringloader_core::sync::Ordering;
use ringloader_core::transport::Transport;
use ringloader_core::transport::engine::Engine;
use ringloader_core::transport::message::ResultKind;
use ringloader_core::transport::port::Room;

use crate::both_ends::{
    LEAF, SHARE, answer, answer_oversize, check, describe, engine, kept, memfd, port, take, take_task, task,
};

#[test]
fn cached_slots_are_warm_and_what_is_held_is_left_alone() {
    let engine = engine();
    let first = port(&engine, None);
    answer(&engine, &first, 1);
    answer(&engine, &first, 2);
    answer(&engine, &first, 3);
    let held = take(&engine, 1);
    drop(take(&engine, 2));
    answer_oversize(&engine, &first, 4);
    engine.put(0, task(5)).unwrap();
    engine.set_done();
    drop(first);

    let cached = engine.store(SHARE).expect("no one else has it");
    let warm = cached.resident();
    assert!(warm >= 3 * LEAF, "{warm}");
    let engine = cached.take().unwrap();
    assert!(!engine.control().is_done());
    assert_eq!(engine.control().worker(0).counters.read(0).map(|(_, count)| count), [0; 5]);
    let second = port(&engine, None);
    assert_eq!(engine.control().worker(0).slots.resident.load(Ordering::Relaxed), warm);
    assert_eq!(second.try_task().unwrap(), None, "a task of the epoch before");
    assert!(engine.try_next().unwrap().is_none(), "a result of the epoch before");
    for seq in 10..200 {
        answer(&engine, &second, seq);
        drop(take(&engine, seq));
        check(&engine, &held);
    }
    assert_eq!(
        engine.control().worker(0).slots.resident.load(Ordering::Relaxed),
        warm,
        "cold slots were used"
    );
    answer_oversize(&engine, &second, 200);
    assert!(take(&engine, 200).is_oversize());
    drop(held);
    drop(second);
    assert_eq!(engine.succeed(0).unwrap(), [0]);
}

#[test]
fn no_more_is_kept_than_asked_for() {
    let engine = Engine::new(1, 8, 64 * SHARE).unwrap();
    let (memfd, first) = (memfd(&engine), port(&engine, None));
    for seq in 0..4 {
        take_task(&engine, &first, seq);
        let chunk = first.allocate(SHARE).unwrap().expect("a slot is free");
        let at = chunk.address() as u64 - engine.control().segment().base().as_ptr() as u64;
        engine.control().segment().copy_in(at, &vec![1; SHARE as usize]).unwrap();
        let mut commit = first.begin_commit();
        let block = describe(&commit);
        let end = SHARE + block.len() as u64;
        assert!(matches!(commit.reserve(end).unwrap(), Room::Ready));
        engine.control().segment().copy_in(at + SHARE, &block).unwrap();
        assert!(commit.finish(seq, ResultKind::Batch, SHARE..end, end).unwrap());
    }
    let held = engine.try_next().unwrap().unwrap();
    drop(first);
    assert!(kept(&memfd) > 4 * SHARE);
    let cached = engine.store(5 * SHARE / 2).expect("no one else has it");
    assert!(cached.resident() > 2 * SHARE && cached.resident() <= 5 * SHARE / 2, "{}", cached.resident());
    assert!(kept(&memfd) <= 5 * SHARE / 2, "{}", kept(&memfd));
    drop(cached);
    assert!(kept(&memfd) <= 2 * SHARE, "more than what is held: {}", kept(&memfd));
    drop(held);
    assert_eq!(kept(&memfd), 0);
}

#[test]
fn what_others_may_write_to_is_not_stored() {
    let left_behind = engine();
    let process = port(&left_behind, None);
    let memfd = memfd(&left_behind);
    answer(&left_behind, &process, 1);
    assert!(left_behind.store(SHARE).is_none());
    assert!(process.is_done() && kept(&memfd) == 0, "it was closed instead");

    let runs = engine();
    let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
    runs.watch_worker(0, child.id()).unwrap();
    assert!(runs.store(SHARE).is_none());
    let ended = engine();
    ended.watch_worker(0, child.id()).unwrap();
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(ended.store(SHARE).is_some());

    let closed = engine();
    closed.close();
    assert!(closed.store(SHARE).is_none());
}

#[test]
fn more_held_than_may_be_kept_is_not_stored() {
    let engine = engine();
    let (memfd, port) = (memfd(&engine), port(&engine, None));
    answer(&engine, &port, 1);
    let held = take(&engine, 1);
    drop(port);
    assert!(engine.store(LEAF).is_none());
    drop(held);
    assert_eq!(kept(&memfd), 0, "it was closed instead");
}

#[test]
fn an_engine_of_many_workers_is_stored() {
    const WORKERS: u32 = 40;
    let engine = Engine::new(WORKERS, 1, SHARE).unwrap();
    let mut ended: Vec<_> =
        (0..WORKERS).map(|_| std::process::Command::new("true").spawn().unwrap()).collect();
    for (worker, process) in (0..).zip(&ended) {
        engine.watch_worker(worker, process.id()).unwrap();
    }
    for process in &mut ended {
        process.wait().unwrap();
    }
    assert!(engine.store(SHARE).is_some());
}

#[test]
fn leases_that_leave_few_for_the_next_epoch_are_told() {
    // Of 64 slots, 32 may be leased; of bytes, half the share. Each batch takes a page.
    for (share, held, many) in
        [(SHARE, 16, false), (SHARE, 17, true), (16 << 12, 4, false), (16 << 12, 5, true)]
    {
        let engine = Engine::new(1, 8, share).unwrap();
        let port = port(&engine, None);
        let lease = |seq| {
            answer(&engine, &port, seq);
            let mut batch = take(&engine, seq);
            assert!(batch.lease());
            batch
        };
        let held: Vec<_> = (0..held).map(lease).collect();
        assert_eq!(engine.is_half_leased(), many, "{} held of {share}", held.len());
    }
}

#[test]
fn memory_is_stored_once_its_workers_have_left_it() {
    let engine = engine();
    let worker = port(&engine, None);
    // This process lives on, as a worker's of a pool does.
    engine.watch_worker(0, std::process::id()).unwrap();
    answer(&engine, &worker, 1);
    let held = take(&engine, 1);
    engine.set_done();
    assert!(worker.detach());
    drop(worker);
    engine.unwatch_worker(0);
    assert_eq!(engine.take_ended(), None, "it has not ended");
    let engine = engine.store(SHARE).expect("it has left").take().unwrap();
    let next = port(&engine, None);
    for seq in 10..200 {
        answer(&engine, &next, seq);
        drop(take(&engine, seq));
        check(&engine, &held);
    }
}

#[test]
fn memory_is_not_stored_while_a_worker_may_write() {
    let engine = engine();
    let worker = port(&engine, None);
    engine.watch_worker(0, std::process::id()).unwrap();
    answer(&engine, &worker, 1);
    drop(take(&engine, 1));
    assert!(engine.store(SHARE).is_none());

    let engine = self::engine();
    let worker = port(&engine, None);
    engine.watch_worker(0, std::process::id()).unwrap();
    engine.unwatch_worker(0);
    assert!(engine.store(SHARE).is_none(), "its end of the socket is open");
    drop(worker);
}
