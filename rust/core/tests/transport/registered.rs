//! Slots that are registered with a driver.

use std::os::fd::OwnedFd;
use std::time::Duration;

use ringloader_core::pool::SlotId;
use ringloader_core::sync::Ordering;
use ringloader_core::transport::engine::Engine;
use ringloader_core::transport::message::ResultKind;
use ringloader_core::transport::port::{Port, Room};
use ringloader_core::transport::received::Received;
use ringloader_core::transport::slot_memory::{SlotMemory, SlotWindow};

use crate::both_ends::{
    LEAF, SHARE, answer, answer_oversize, check, content, describe, engine, kept, memfd, port, send_own,
    take, take_task,
};

/// Unregisters all.
fn clear(memory: &SlotMemory) {
    let windows = memory.registered_windows();
    windows.iter().for_each(|window| assert!(memory.set_registered(window.address, 0)));
}

fn bytes(memory: &SlotMemory) -> u64 {
    memory.registered_windows().iter().map(|window| window.registered).sum()
}

fn register(engine: &Engine, batch: &Received, bytes: u64) -> bool {
    batch.backing().window().is_some_and(|window| engine.slot_memory().set_registered(window.address, bytes))
}

/// A batch in a slot, delivered and registered.
fn deliver_registered(engine: &Engine, port: &Port, seq: u64) -> Received {
    answer(engine, port, seq);
    let received = take(engine, seq);
    let window = received.backing().window().unwrap();
    assert!(register(engine, &received, window.touched));
    received
}

#[test]
fn windows_are_found_by_their_addresses() {
    let engine = Engine::new(3, 8, SHARE).unwrap();
    let port = port(&engine, None);
    answer(&engine, &port, 1);
    let received = take(&engine, 1);
    let memory = engine.slot_memory();
    let window = received.backing().window().unwrap();
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
    assert_eq!(memory.registered_windows(), [SlotWindow { registered: page, ..window }]);
    assert_eq!(bytes(&memory), page);
    clear(&memory);
    assert_eq!((memory.registered_windows(), bytes(&memory)), (vec![], 0));
    drop(received);
    assert!(!memory.set_registered(window.address, 1), "it is not held");
    answer_oversize(&engine, &port, 2);
    let oversize = take(&engine, 2);
    assert!(oversize.backing().window().is_none());
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
    clear(&engine.slot_memory());
    rest();
    assert_eq!(resident(), 0);
}

/// Room that registered slots take is not waited for: batches travel alone.
#[test]
fn a_share_that_is_registered_is_not_waited_for() {
    let engine = engine();
    let port = port(&engine, None);
    // Registers small slots, as in a worker whose slots were small at first.
    let words = engine.control().worker(0).slots;
    let mut small: Vec<_> = (0..48).map(|seq| deliver_large(&engine, &port, seq, 12 << 10)).collect();
    let registered = small.iter().filter(|one| register(&engine, one, 12 << 10)).count() as u64;
    assert_eq!(registered, SHARE / 2 / (12 << 10), "half the share");
    let held = small.split_off(small.len() / 2);
    drop(small);
    take_task(&engine, &port, 50);
    let mut commit = port.begin_commit();
    assert!(matches!(commit.reserve(engine.largest()).unwrap(), Room::Oversize));
    assert!(send_own(&mut commit, 50, 2 * LEAF).is_some());
    assert!(take(&engine, 50).is_oversize());
    drop(commit);
    drop(held);
    take_task(&engine, &port, 51);
    assert!(matches!(port.begin_commit().reserve(engine.largest()).unwrap(), Room::Ready));
    assert!(words.resident.load(Ordering::Relaxed) <= SHARE);
}

/// A batch in a slot that keeps so many bytes.
fn deliver_large(engine: &Engine, port: &Port, seq: u64, bytes: u64) -> Received {
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
    assert!(commit.finish(seq, ResultKind::Batch, LEAF..end, end).unwrap());
    drop((commit, chunk));
    take(engine, seq)
}

/// Returns true if this process has mapped the segment behind a descriptor.
fn is_mapped(memfd: &OwnedFd) -> bool {
    let inode = rustix::fs::fstat(memfd).unwrap().st_ino.to_string();
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines().any(|line| line.split_whitespace().nth(4) == Some(&inode))
}

#[test]
fn what_is_registered_outlives_closing() {
    for last in ["cleared", "dropped", "closed", "never cleared"] {
        let engine = engine();
        let (memfd, memory, port) = (memfd(&engine), engine.slot_memory(), port(&engine, None));
        let received = deliver_registered(&engine, &port, 1);
        let registered = received.backing().window().unwrap().registered;
        drop(port);
        match last {
            "cleared" => {
                engine.close();
                drop(received);
                assert_eq!(kept(&memfd), registered, "{last}");
                drop(engine);
                assert_eq!(kept(&memfd), registered, "{last}");
                clear(&memory);
            }
            "dropped" => {
                engine.close();
                clear(&memory);
                check(&engine, &received);
                drop(received);
            }
            "closed" => {
                clear(&memory);
                drop(received);
                engine.close();
            }
            _ => {
                engine.close();
                drop((received, engine, memory));
                assert_eq!((kept(&memfd), is_mapped(&memfd)), (registered, true), "until the process ends");
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
    assert!(register(&engine, &batches[1], 64 << 10) && register(&engine, &batches[2], 16 << 10));
    let windows = memory.registered_windows();
    batches.truncate(1);
    drop(first);
    let cached = engine.store((64 << 10) + (16 << 10) + (64 << 10)).expect("no one else has it");
    assert_eq!(
        cached.resident(),
        (64 << 10) + (64 << 10) + (16 << 10),
        "what is held, and what is registered"
    );
    assert_eq!(bytes(&memory), 80 << 10);

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
    clear(&memory);
    assert_eq!(kept(&memfd), 0);
}
