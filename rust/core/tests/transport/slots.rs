//! Slots, tasks and results in an epoch and at its end.

use std::time::Duration;

use ringloader_core::os::Segment;
use ringloader_core::sync::{Arc, Ordering};
use ringloader_core::transport::message::ResultKind;
use ringloader_core::transport::port::Port;
use ringloader_core::transport::{Control, Transport};

use crate::both_ends::{LEAF, answer, answer_oversize, check, engine, port, take, take_task, task};

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

/// The worker acts like one whose iterable dataset has ended: it takes tasks and answers none, so nothing says that
/// there is room.
#[test]
fn tasks_that_had_no_room_follow_though_none_is_answered() {
    let engine = engine();
    let port = port(&engine, None);
    let sent = 3 * u64::from(engine.control().geometry().ring_capacity);
    (0..sent).for_each(|seq| engine.put(0, task(seq)).unwrap());
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
        let received = take(&engine, seq);
        let len = received.len();
        assert!(received.pointer(0, len).is_ok() && received.pointer(len, 0).is_ok());
        for (offset, len) in [(0, len + 1), (len, 1), (u64::MAX, 2), (4096, 1)] {
            assert!(received.pointer(offset, len).is_err(), "{len} bytes at {offset}");
        }
    }
}

#[test]
fn a_commit_without_bytes_anywhere_is_refused() {
    let engine = engine();
    let port = port(&engine, None);
    take_task(&engine, &port, 1);
    assert!(port.begin_commit().finish(1, ResultKind::Batch, 0..0, 0).is_err());
    assert!(engine.try_next().unwrap().is_none(), "nothing was committed");
}

#[test]
fn what_collation_has_outlives_the_port() {
    let engine = engine();
    let fds = engine.worker_fds(0).for_port().unwrap();
    // A mapping of its own, as in a process that is no child of the parent's.
    let segment = Segment::attach(engine.worker_fds(0).segment).unwrap();
    let control = Arc::new(Control::attach(segment).unwrap());
    let worker = Port::attach(control, 0, engine.share(), fds, None).unwrap();
    take_task(&engine, &worker, 1);
    let chunk = worker.allocate(LEAF).unwrap().expect("a slot is free");
    assert!(!worker.detach(), "the chunk is in a slot");
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
    let worker =
        Port::attach(Arc::new(Control::attach(segment).unwrap()), 0, engine.share(), fds, None).unwrap();
    assert!(worker.detach());
    drop(worker);
    assert!(!is_mapped(base));
}
