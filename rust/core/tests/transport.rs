//! Engine and port in one process: what happens at the edges of slots, leases and succession.
#![cfg(all(target_os = "linux", not(ringloader_portable), not(ringloader_loom)))]

use std::os::fd::OwnedFd;
use std::time::Duration;

use ringloader_core::Error;
use ringloader_core::batch::{Dtype, MetaWriter, StorageRecord};
use ringloader_core::os::Segment;
use ringloader_core::pool::SlotId;
use ringloader_core::sync::{Arc, Ordering};
use ringloader_core::transport::Control;
use ringloader_core::transport::delivery::Delivery;
use ringloader_core::transport::engine::Engine;
use ringloader_core::transport::message::{ResultKind, Task, TaskKind};
use ringloader_core::transport::port::{Commit, Port, Room};
use ringloader_core::transport::slot_memory::Window;

const SHARE: u64 = 1 << 20;
const LEAF: u64 = 256;

fn engine() -> Engine {
    Engine::new(1, 8, SHARE).unwrap()
}

/// A worker's end, over the parent's mapping: to the bytes it makes no difference.
fn port(engine: &Engine, busy: Option<&[u64]>) -> Port {
    let fds = engine.worker_fds(0).for_port().unwrap();
    let control = engine.control().clone();
    match busy {
        None => Port::attach(control, 0, engine.share(), fds),
        Some(busy) => Port::take_over(control, 0, engine.share(), fds, busy),
    }
    .unwrap()
}

fn task(seq: u64) -> Task {
    Task { seq, kind: TaskKind::Index, bytes: seq.to_le_bytes().to_vec() }
}

/// One leaf, all of whose bytes are the lowest of the task's number.
fn content(seq: u64) -> [u8; LEAF as usize] {
    [seq as u8; LEAF as usize]
}

fn describe(commit: &Commit<'_>) -> Vec<u8> {
    let mut meta = MetaWriter::new();
    let storage = meta.add_storage(StorageRecord { offset: 0, nbytes: LEAF });
    let leaf = meta.add_tensor(storage, 0, Dtype::U8, &[LEAF as i64], &[1]);
    meta.skeleton().leaf(leaf);
    meta.finish(commit.generation()).to_vec()
}

fn take_task(engine: &Engine, port: &Port, seq: u64) {
    engine.put_task(0, task(seq)).unwrap();
    take_sent_task(port, seq);
}

fn take_sent_task(port: &Port, seq: u64) {
    assert_eq!(port.try_task().unwrap(), Some(task(seq)));
}

/// Answers a task in a slot.
fn answer(engine: &Engine, port: &Port, seq: u64) {
    take_task(engine, port, seq);
    let mut commit = port.begin_commit();
    let block = describe(&commit);
    let end = LEAF + block.len() as u64;
    assert!(matches!(commit.reserve(end).unwrap(), Room::Ready));
    let segment = engine.control().segment();
    let at = commit.pointer(0, end).unwrap().as_ptr() as u64 - segment.base().as_ptr() as u64;
    segment.copy_in(at, &content(seq)).unwrap();
    segment.copy_in(at + LEAF, &block).unwrap();
    assert!(commit.finish(seq, ResultKind::Batch, LEAF..end, end, false).unwrap());
}

/// Answers a task in a segment of its own, after part of it had been written into a slot.
fn answer_oversize(engine: &Engine, port: &Port, seq: u64) {
    take_task(engine, port, seq);
    let chunk = port.allocate(LEAF).unwrap().expect("a slot is free");
    let mut commit = port.begin_commit();
    assert!(matches!(commit.reserve(SHARE).unwrap(), Room::Oversize));
    send_own(&mut commit, seq);
    drop(chunk);
}

fn send_own(commit: &mut Commit<'_>, seq: u64) {
    let block = describe(commit);
    let end = LEAF + block.len() as u64;
    let (segment, fd) = commit.own_segment(end).unwrap().expect("there is room");
    segment.copy_in(0, &content(seq)).unwrap();
    segment.copy_in(LEAF, &block).unwrap();
    assert!(commit.send(&fd).unwrap());
    assert!(commit.finish(seq, ResultKind::Batch, LEAF..end, end, true).unwrap());
}

/// The next batch, which must be that of `seq`.
fn take(engine: &Engine, seq: u64) -> Delivery {
    let delivery = engine.try_next().unwrap().expect("a batch is committed");
    assert_eq!(delivery.seq, seq);
    assert_eq!(delivery.meta().unwrap().storage_count(), 1);
    check(engine, &delivery);
    delivery
}

/// Checks a batch that lies in a slot.
fn check(engine: &Engine, delivery: &Delivery) {
    if !delivery.is_oversize() {
        let segment = engine.control().segment();
        let at = delivery.pointer(0, LEAF).unwrap().as_ptr() as u64 - segment.base().as_ptr() as u64;
        let mut bytes = Vec::new();
        segment.copy_out(at, LEAF, &mut bytes).unwrap();
        assert_eq!(bytes, content(delivery.seq), "batch {} has changed", delivery.seq);
    }
}

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
    let mut commit = port.begin_commit();
    let Some((segment, fd)) = commit.own_segment(len).unwrap() else { return false };
    let block = describe(&commit);
    segment.copy_in(0, &content(seq)).unwrap();
    segment.copy_in(LEAF, &block).unwrap();
    assert!(commit.send(&fd).unwrap());
    let end = LEAF + block.len() as u64;
    assert!(commit.finish(seq, ResultKind::Batch, LEAF..end, end, true).unwrap());
    true
}

/// Whether a batch has room in a slot. It is not committed.
fn has_room(engine: &Engine, port: &Port, seq: u64) -> Room {
    take_task(engine, port, seq);
    port.begin_commit().reserve(LEAF).unwrap()
}

#[test]
fn segments_on_their_way_are_within_the_share() {
    let engine = engine();
    let port = port(&engine, None);
    // More often than the ring has places, so that positions come round.
    for seq in (0..20).map(|round| 10 * round) {
        assert!(answer_own(&engine, &port, seq, SHARE / 2));
        assert!(answer_own(&engine, &port, seq + 1, SHARE / 2 - 5000));
        assert!(
            !answer_own(&engine, &port, seq + 2, 8000),
            "the last two pages of the share are one too few"
        );
        assert!(answer_own(&engine, &port, seq + 3, 1000));
        assert!(matches!(has_room(&engine, &port, seq + 4), Room::Later));
        // What is taken is the user's.
        let held = take(&engine, seq);
        assert!(matches!(has_room(&engine, &port, seq + 5), Room::Ready));
        assert!(answer_own(&engine, &port, seq + 6, SHARE / 2 - (16 << 10)));
        let rest = [1, 3, 6].map(|next| take(&engine, seq + next));
        assert!(rest.iter().all(Delivery::is_oversize));
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

/// Of so many workers that each has fewer slots than tasks.
#[test]
fn a_worker_without_a_free_slot_waits_for_the_parent() {
    let engine = Engine::new(200, 600, 128 << 20).unwrap();
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
    assert!(held.iter_mut().all(Delivery::lease));
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
    assert!(answer_own(&engine, &port, 20, SHARE - all));
    assert_eq!(resident(), all);
    take(&engine, 20);
    batches.truncate(3);
    // Beside it the three that are held and one of those that came back.
    assert!(answer_own(&engine, &port, 21, SHARE - all / 2));
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
        assert!(commit.own_segment(SHARE).unwrap().is_some());
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

#[test]
fn memory_of_a_table_is_used_again_unless_it_is_huge() {
    let engine = engine();
    let port = port(&engine, None);
    let next = |seq| {
        answer(&engine, &port, seq);
        take(&engine, seq).into_table()
    };
    let mut old = next(1);
    old.resize(4096, 0xff);
    let (memory, capacity) = (old.as_ptr(), old.capacity());
    engine.reuse(old);
    let again = next(2);
    assert_eq!((again.as_ptr(), again.capacity()), (memory, capacity));
    engine.reuse(Vec::with_capacity(1 << 20));
    assert!(next(3).capacity() < 1 << 20);
}

#[test]
fn an_idle_worker_gives_back_what_nobody_holds() {
    let engine = engine();
    let port = port(&engine, None);
    let [held, dropped] = [1, 2].map(|seq| {
        answer(&engine, &port, seq);
        take(&engine, seq)
    });
    drop(dropped);
    let resident = || engine.control().worker(0).slots.resident.load(Ordering::Relaxed);
    let both = resident();
    port.wait(Duration::from_millis(1)).unwrap();
    assert_eq!(resident(), both, "a short sleep is no idleness");
    // A notification from before ends a sleep.
    for _ in 0..10 {
        port.wait(Duration::from_secs(1)).unwrap();
    }
    assert_eq!(resident(), both / 2);
    check(&engine, &held);
}

#[test]
fn a_late_release_after_closing_leaves_the_slot_to_who_holds_it() {
    let engine = engine();
    let port = port(&engine, None);
    answer(&engine, &port, 1);
    let first = take(&engine, 1);
    // The first store of the release of `first`, whose thread then rests: the slot comes round.
    engine.control().worker(0).slots.free[0].fetch_or(1, Ordering::Release);
    answer(&engine, &port, 2);
    let second = take(&engine, 2);
    assert_eq!(first.pointer(0, 1), second.pointer(0, 1), "the slot of both is the same");
    drop(port);
    engine.close();
    check(&engine, &second);
    drop(first);
    check(&engine, &second);
}

#[test]
fn nothing_is_handed_out_after_closing() {
    let engine = engine();
    let port = port(&engine, None);
    answer(&engine, &port, 1);
    drop(port);
    engine.close();
    assert!(engine.try_next().unwrap().is_none(), "its memory was given back");
}

/// As a worker whose iterable dataset has ended: it takes tasks and answers none, so nothing says that there is room.
#[test]
fn tasks_that_had_no_room_follow_though_none_is_answered() {
    let engine = engine();
    let port = port(&engine, None);
    let sent = 3 * u64::from(engine.control().geometry().ring_capacity);
    (0..sent).for_each(|seq| engine.put_task(0, task(seq)).unwrap());
    let mut taken = 0;
    for _ in 0..3 {
        while let Some(task) = port.try_task().unwrap() {
            assert_eq!(task.seq, taken);
            taken += 1;
        }
        assert!(engine.try_next().unwrap().is_none());
    }
    assert_eq!(taken, sent);
}

#[test]
fn only_bytes_of_the_batch_have_an_address() {
    let engine = engine();
    let port = port(&engine, None);
    answer(&engine, &port, 1);
    answer_oversize(&engine, &port, 2);
    for seq in [1, 2] {
        let delivery = take(&engine, seq);
        let len = delivery.len();
        assert!(delivery.pointer(0, len).is_ok() && delivery.pointer(len, 0).is_ok());
        for (offset, len) in [(0, len + 1), (len, 1), (u64::MAX, 2), (4096, 1)] {
            assert!(delivery.pointer(offset, len).is_err(), "{len} bytes at {offset}");
        }
    }
}

#[test]
fn a_commit_without_bytes_anywhere_is_refused() {
    let engine = engine();
    let port = port(&engine, None);
    take_task(&engine, &port, 1);
    assert!(port.begin_commit().finish(1, ResultKind::Batch, 0..0, 0, false).is_err());
    assert!(engine.try_next().unwrap().is_none(), "nothing was committed");
}

#[test]
fn a_successor_leaves_what_is_held_and_gets_no_old_task() {
    let engine = engine();
    let port_of_the_first = port(&engine, None);
    answer(&engine, &port_of_the_first, 1);
    answer(&engine, &port_of_the_first, 2);
    engine.put_task(0, task(3)).unwrap();
    assert!(matches!(engine.succeed(0), Err(Error::Config(_))), "results were not taken");
    let held = take(&engine, 1);
    drop(take(&engine, 2));
    // As if it had died after sending the memory of an oversize batch.
    take_sent_task(&port_of_the_first, 3);
    let mut commit = port_of_the_first.begin_commit();
    let (_segment, fd) = commit.own_segment(1).unwrap().unwrap();
    assert!(commit.send(&fd).unwrap());
    drop(commit);
    drop(port_of_the_first);

    let busy = engine.succeed(0).unwrap();
    assert_eq!(busy.iter().map(|word| word.count_ones()).sum::<u32>(), 1);
    let successor = port(&engine, Some(&busy));
    assert_eq!(successor.try_task().unwrap(), None);
    for seq in 3..200 {
        answer(&engine, &successor, seq);
        drop(take(&engine, seq));
        check(&engine, &held);
    }
    answer_oversize(&engine, &successor, 200);
    assert!(take(&engine, 200).is_oversize());
    drop(held);
    drop(successor);
    assert_eq!(engine.succeed(0).unwrap(), [0]);
    engine.close();
    assert!(matches!(engine.succeed(0), Err(Error::Config(_))), "closed");
}

#[test]
fn a_worker_that_runs_is_not_succeeded() {
    let engine = engine();
    let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
    engine.watch_worker(0, child.id()).unwrap();
    assert!(matches!(engine.succeed(0), Err(Error::Config(_))));
    child.kill().unwrap();
    while engine.take_ended().is_none() {
        engine.wait_for(None, std::time::Duration::from_secs(1)).unwrap();
    }
    assert!(engine.succeed(0).is_ok());
    child.wait().unwrap();
}

/// Bytes that the segment behind a descriptor keeps of arenas and windows.
fn kept(memfd: &OwnedFd) -> u64 {
    use rustix::fs::{SeekFrom, seek};
    let (mut kept, mut at) = (0, engine().control().arena(0).start);
    while let Ok(data) = seek(memfd, SeekFrom::Data(at)) {
        at = seek(memfd, SeekFrom::Hole(data)).unwrap();
        kept += at - data;
    }
    kept
}

fn memfd(engine: &Engine) -> OwnedFd {
    engine.worker_fds(0).segment.try_clone_to_owned().unwrap()
}

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
    engine.put_task(0, task(5)).unwrap();
    engine.set_done();
    drop(first);

    let cached = engine.store(SHARE).expect("no one else has it");
    let warm = cached.resident();
    assert!(warm >= 3 * LEAF, "{warm}");
    let engine = cached.take().unwrap();
    assert!(!engine.control().is_done());
    assert_eq!(engine.control().worker(0).counters.read().map(|(_, count)| count), [0; 5]);
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
        assert!(commit.finish(seq, ResultKind::Batch, SHARE..end, end, false).unwrap());
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

/// A batch in a slot, delivered and registered.
fn deliver_registered(engine: &Engine, port: &Port, seq: u64) -> Delivery {
    answer(engine, port, seq);
    let delivery = take(engine, seq);
    let window = delivery.backing().window().unwrap();
    assert!(delivery.backing().set_registered(window.touched));
    delivery
}

#[test]
fn windows_are_found_by_their_addresses() {
    let engine = Engine::new(3, 8, SHARE).unwrap();
    let port = port(&engine, None);
    answer(&engine, &port, 1);
    let delivery = take(&engine, 1);
    let memory = engine.slot_memory();
    let window = delivery.backing().window().unwrap();
    assert!(window.touched >= LEAF && window.registered == 0);
    assert_eq!(memory.window_of(window.address), Some(window));
    let size = engine.control().geometry().window as usize;
    assert_eq!(memory.window_of(window.address + size - 1), Some(window));
    assert_ne!(memory.window_of(window.address + size), Some(window));
    let base = engine.control().segment().base().as_ptr() as usize;
    let windows = engine.control().window(0, SlotId::new(0)).start as usize;
    let outside = [0, base, base + windows - 1, base + engine.control().segment().len() as usize, usize::MAX];
    assert!(outside.iter().all(|&address| memory.window_of(address).is_none()));

    assert!(!memory.set_registered(base, 1) && !memory.set_registered(window.address, window.touched + 1));
    assert!(memory.set_registered(window.address + 100, 1));
    let page = rustix::param::page_size() as u64;
    assert_eq!(memory.registered_windows(), [Window { registered: page, ..window }]);
    assert_eq!(memory.registered_bytes(), page);
    memory.clear_registered();
    assert_eq!((memory.registered_windows(), memory.registered_bytes()), (vec![], 0));
    drop(delivery);
    assert!(!memory.set_registered(window.address, 1), "it is not held");
    answer_oversize(&engine, &port, 2);
    let oversize = take(&engine, 2);
    assert!(oversize.backing().window().is_none() && !oversize.backing().set_registered(1));
}

#[test]
fn an_idle_worker_keeps_what_is_registered() {
    let engine = engine();
    let port = port(&engine, None);
    let registered = deliver_registered(&engine, &port, 1);
    answer(&engine, &port, 2);
    drop((registered, take(&engine, 2)));
    let resident = || engine.control().worker(0).slots.resident.load(Ordering::Relaxed);
    let both = resident();
    let rest = || (0..10).for_each(|_| assert!(port.wait(Duration::from_secs(1)).is_ok()));
    rest();
    assert_eq!(resident(), both / 2);
    engine.slot_memory().clear_registered();
    rest();
    assert_eq!(resident(), 0);
}

/// Room that registered slots take is not waited for: batches travel alone.
#[test]
fn a_share_that_is_registered_is_not_waited_for() {
    let engine = engine();
    let port = port(&engine, None);
    // As with a worker whose slots were small at first.
    let words = engine.control().worker(0).slots;
    let mut small: Vec<_> = (0..48).map(|seq| deliver_large(&engine, &port, seq, 12 << 10)).collect();
    let registered = small.iter().filter(|one| one.backing().set_registered(12 << 10)).count() as u64;
    assert_eq!(registered, SHARE / 2 / (12 << 10), "half the share");
    let held = small.split_off(small.len() / 2);
    drop(small);
    take_task(&engine, &port, 50);
    let mut commit = port.begin_commit();
    assert!(matches!(commit.reserve(engine.largest()).unwrap(), Room::Oversize));
    send_own(&mut commit, 50);
    assert!(take(&engine, 50).is_oversize());
    drop(commit);
    drop(held);
    take_task(&engine, &port, 51);
    assert!(matches!(port.begin_commit().reserve(engine.largest()).unwrap(), Room::Ready));
    assert!(words.resident.load(Ordering::Relaxed) <= SHARE);
}

/// A batch in a slot that keeps so many bytes.
fn deliver_large(engine: &Engine, port: &Port, seq: u64, bytes: u64) -> Delivery {
    take_task(engine, port, seq);
    let chunk = port.allocate(bytes - LEAF).unwrap().expect("a slot is free");
    let segment = engine.control().segment();
    let mut commit = port.begin_commit();
    let block = describe(&commit);
    let end = LEAF + block.len() as u64;
    assert!(matches!(commit.reserve(bytes).unwrap(), Room::Ready));
    let at = chunk.address() as u64 - segment.base().as_ptr() as u64;
    segment.copy_in(at, &content(seq)).unwrap();
    segment.copy_in(at + LEAF, &block).unwrap();
    assert!(commit.finish(seq, ResultKind::Batch, LEAF..end, end, false).unwrap());
    drop((commit, chunk));
    take(engine, seq)
}

/// What a process has mapped of the segment behind a descriptor.
fn mapped(memfd: &OwnedFd) -> u64 {
    let inode = rustix::fs::fstat(memfd).unwrap().st_ino.to_string();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let ours = maps.lines().filter(|line| line.split_whitespace().nth(4) == Some(&inode));
    ours.map(|line| {
        let (start, end) = line.split_once(' ').unwrap().0.split_once('-').unwrap();
        u64::from_str_radix(end, 16).unwrap() - u64::from_str_radix(start, 16).unwrap()
    })
    .sum()
}

#[test]
fn what_is_registered_outlives_closing() {
    for last in ["cleared", "dropped", "closed", "never cleared"] {
        let engine = engine();
        let (memfd, memory, port) = (memfd(&engine), engine.slot_memory(), port(&engine, None));
        let window = engine.control().geometry().window;
        let delivery = deliver_registered(&engine, &port, 1);
        let registered = delivery.backing().window().unwrap().registered;
        drop(port);
        match last {
            "cleared" => {
                engine.close();
                drop(delivery);
                assert_eq!(kept(&memfd), registered, "{last}");
                drop(engine);
                assert_eq!(kept(&memfd), registered, "{last}");
                memory.clear_registered();
            }
            "dropped" => {
                engine.close();
                memory.clear_registered();
                check(&engine, &delivery);
                drop(delivery);
            }
            "closed" => {
                memory.clear_registered();
                drop(delivery);
                engine.close();
            }
            _ => {
                engine.close();
                drop((delivery, engine, memory));
                assert_eq!((kept(&memfd), mapped(&memfd)), (registered, window), "until the process ends");
                continue;
            }
        }
        assert_eq!(kept(&memfd), 0, "{last}");
        drop(memory);
    }
}

#[test]
fn registered_memory_is_kept_for_the_next_epoch() {
    let engine = engine();
    let (memfd, memory, first) = (memfd(&engine), engine.slot_memory(), port(&engine, None));
    let mut batches: Vec<_> = (0..4).map(|seq| deliver_large(&engine, &first, seq, 64 << 10)).collect();
    assert!(batches[1].backing().set_registered(64 << 10) && batches[2].backing().set_registered(16 << 10));
    let windows = memory.registered_windows();
    batches.truncate(1);
    drop(first);
    let cached = engine.store((64 << 10) + (16 << 10) + (64 << 10)).expect("no one else has it");
    assert_eq!(
        cached.resident(),
        (64 << 10) + (64 << 10) + (16 << 10),
        "what is held, and what is registered"
    );
    assert_eq!(memory.registered_bytes(), 80 << 10);

    let engine = cached.take().unwrap();
    let second = port(&engine, None);
    // The warmest slot comes first.
    answer(&engine, &second, 10);
    let again = take(&engine, 10);
    assert!(windows.contains(&again.backing().window().unwrap()), "a registered slot is used again");
    drop((again, second));
    assert!(engine.store(80 << 10).is_none(), "what is held was too much");
    batches.clear();
    let page = rustix::param::page_size() as u64;
    assert_eq!(kept(&memfd), 2 * page, "it was closed instead, and of each window one page was written");
    memory.clear_registered();
    assert_eq!(kept(&memfd), 0);
}

#[test]
fn held_slots_of_another_segment_are_refused() {
    let engine = engine();
    let fds = engine.worker_fds(0).for_port().unwrap();
    let refused = Port::take_over(engine.control().clone(), 0, SHARE, fds, &[0, 0]);
    assert!(matches!(refused, Err(Error::Config(_))), "{refused:?}");
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
    assert!(worker.leave());
    drop(worker);
    engine.note_left(0);
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
    engine.note_left(0);
    assert!(engine.store(SHARE).is_none(), "its end of the socket is open");
    drop(worker);
}

#[test]
fn what_collation_has_outlives_the_port() {
    let engine = engine();
    let fds = engine.worker_fds(0).for_port().unwrap();
    // A mapping of its own, as in a process that is no child of the parent's.
    let segment = Segment::attach(engine.worker_fds(0).segment).unwrap();
    let control = Arc::new(Control::attach(segment).unwrap());
    let worker = Port::attach(control, 0, engine.share(), fds).unwrap();
    take_task(&engine, &worker, 1);
    let chunk = worker.allocate(LEAF).unwrap().expect("a slot is free");
    assert!(!worker.leave(), "the chunk is in a slot");
    assert!(worker.allocate(LEAF).unwrap().is_none(), "it has left");
    let is_mapped = |address: usize| {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        maps.lines().any(|line| {
            let (begin, rest) = line.split_once('-').unwrap();
            let end = rest.split(' ').next().unwrap();
            (usize::from_str_radix(begin, 16).unwrap()..usize::from_str_radix(end, 16).unwrap())
                .contains(&address)
        })
    };
    drop(worker);
    assert!(is_mapped(chunk.address()));

    let fds = engine.worker_fds(0).for_port().unwrap();
    let segment = Segment::attach(engine.worker_fds(0).segment).unwrap();
    let base = segment.base().as_ptr() as usize;
    let worker = Port::attach(Arc::new(Control::attach(segment).unwrap()), 0, engine.share(), fds).unwrap();
    assert!(worker.leave());
    drop(worker);
    assert!(!is_mapped(base));
}
