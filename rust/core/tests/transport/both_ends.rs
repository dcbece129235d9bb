//! An engine and a port in one process, and batches of which every byte is known.

use std::os::fd::OwnedFd;

use ringloader_core::batch::{Dtype, MetaWriter, StorageRecord};
use ringloader_core::os::fd_passing::SendOutcome;
use ringloader_core::transport::Transport;
use ringloader_core::transport::engine::Engine;
use ringloader_core::transport::message::{ResultKind, Task, TaskKind};
use ringloader_core::transport::port::{Commit, Port, Room};
use ringloader_core::transport::received::Received;

pub(crate) const SHARE: u64 = 1 << 20;

pub(crate) const LEAF: u64 = 256;

pub(crate) fn engine() -> Engine {
    Engine::new(1, 8, SHARE).unwrap()
}

/// A worker's end, over the parent's mapping: to the bytes it makes no difference.
pub(crate) fn port(engine: &Engine, busy: Option<&[u64]>) -> Port {
    let fds = engine.worker_fds(0).for_port().unwrap();
    let control = engine.control().clone();
    Port::attach(control, 0, engine.share(), fds, busy).unwrap()
}

pub(crate) fn task(seq: u64) -> Task {
    Task { seq, kind: TaskKind::Index, bytes: seq.to_le_bytes().to_vec() }
}

/// One leaf, all of whose bytes are the lowest of the task's number.
pub(crate) fn content(seq: u64) -> [u8; LEAF as usize] {
    [seq as u8; LEAF as usize]
}

pub(crate) fn describe(commit: &Commit<'_>) -> Vec<u8> {
    let mut meta = MetaWriter::default();
    let storage = meta.add_storage(StorageRecord { offset: 0, nbytes: LEAF });
    let leaf = meta.add_tensor(storage, 0, Dtype::U8, &[LEAF as i64], &[1]);
    meta.skeleton().leaf(leaf);
    meta.finish(commit.generation()).to_vec()
}

pub(crate) fn take_task(engine: &Engine, port: &Port, seq: u64) {
    engine.put(0, task(seq)).unwrap();
    take_sent_task(port, seq);
}

pub(crate) fn take_sent_task(port: &Port, seq: u64) {
    assert_eq!(port.try_task().unwrap(), Some(task(seq)));
}

/// Answers a task in a slot.
pub(crate) fn answer(engine: &Engine, port: &Port, seq: u64) {
    take_task(engine, port, seq);
    let mut commit = port.begin_commit();
    let block = describe(&commit);
    let end = LEAF + block.len() as u64;
    assert!(matches!(commit.reserve(end).unwrap(), Room::Ready));
    let segment = engine.control().segment();
    let at = commit.pointer(0, end).unwrap().as_ptr() as u64 - segment.base().as_ptr() as u64;
    segment.copy_in(at, &content(seq)).unwrap();
    segment.copy_in(at + LEAF, &block).unwrap();
    assert!(commit.finish(seq, ResultKind::Batch, LEAF..end, end).unwrap());
}

/// Answers a task in a segment of its own, after part of it had been written into a slot.
pub(crate) fn answer_oversize(engine: &Engine, port: &Port, seq: u64) {
    take_task(engine, port, seq);
    let chunk = port.allocate(LEAF).unwrap().expect("a slot is free");
    let mut commit = port.begin_commit();
    assert!(matches!(commit.reserve(SHARE).unwrap(), Room::Oversize));
    assert!(send_own(&mut commit, seq, 2 * LEAF).is_some());
    drop(chunk);
}

/// Commits a batch in a segment of its own of `len` bytes. Returns where the worker has mapped it; `None`: there is no
/// room yet.
pub(crate) fn send_own(commit: &mut Commit<'_>, seq: u64, len: u64) -> Option<usize> {
    if !commit.own_segment(len).unwrap() {
        return None;
    }
    let block = describe(commit);
    let end = LEAF + block.len() as u64;
    let segment = commit.own().unwrap();
    let address = segment.base().as_ptr() as usize;
    segment.copy_in(0, &content(seq)).unwrap();
    segment.copy_in(LEAF, &block).unwrap();
    assert_eq!(commit.send().unwrap(), SendOutcome::Yes);
    assert!(commit.finish(seq, ResultKind::Batch, LEAF..end, end).unwrap());
    Some(address)
}

/// The next batch, which must be that of `seq`.
pub(crate) fn take(engine: &Engine, seq: u64) -> Received {
    let received = engine.try_next().unwrap().expect("a batch is committed");
    assert_eq!(received.seq, seq);
    assert_eq!(received.meta().unwrap().storage_count(), 1);
    check(engine, &received);
    received
}

/// Checks a batch that lies in a slot.
pub(crate) fn check(engine: &Engine, received: &Received) {
    if !received.is_oversize() {
        let segment = engine.control().segment();
        let at = received.pointer(0, LEAF).unwrap().as_ptr() as u64 - segment.base().as_ptr() as u64;
        let mut bytes = Vec::new();
        segment.copy_out(at, LEAF, &mut bytes).unwrap();
        assert_eq!(bytes, content(received.seq), "batch {} has changed", received.seq);
    }
}

/// Bytes that the segment behind a descriptor keeps of arenas and windows.
pub(crate) fn kept(memfd: &OwnedFd) -> u64 {
    use rustix::fs::{SeekFrom, seek};
    let (mut kept, mut at) = (0, engine().control().arena(0).start);
    while let Ok(data) = seek(memfd, SeekFrom::Data(at)) {
        at = seek(memfd, SeekFrom::Hole(data)).unwrap();
        kept += at - data;
    }
    kept
}

pub(crate) fn memfd(engine: &Engine) -> OwnedFd {
    engine.worker_fds(0).segment.try_clone_to_owned().unwrap()
}
