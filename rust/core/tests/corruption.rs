//! Every word of a live segment's structures is overwritten, and then all is done with it that a parent and a worker
//! do. What comes is an error or no effect: no panic, no access outside the mapping, which would end this process, and
//! the memory of a batch that the user holds stays mapped.
#![cfg(all(target_os = "linux", not(ringloader_portable), not(ringloader_loom)))]

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use ringloader_core::batch::{Dtype, MetaWriter, StorageRecord};
use ringloader_core::os::Segment;
use ringloader_core::os::fd_passing::SendOutcome;
use ringloader_core::sync::Ordering;
use ringloader_core::transport::engine::Engine;
use ringloader_core::transport::message::{ResultKind, Task, TaskKind};
use ringloader_core::transport::port::{Commit, Port, Room};
use ringloader_core::transport::received::Received;
use ringloader_core::transport::{Control, Transport};
use ringloader_core::{Error, Result};

const SHARE: u64 = 1 << 20;
const LEAF: u64 = 256;
/// The start of a worker's structures. The worker's arena is the first thing behind them.
const GRANULE: u64 = 64 << 10;
/// Lap the rings, so that behind what is there lies what was once valid.
const BEFORE: u64 = 20;

/// An engine and its only worker's end, in one process, with a batch of each kind on its way and one held.
struct Live {
    engine: Engine,
    port: Port,
    held: Received,
    next: u64,
}

fn port(engine: &Engine) -> Result<Port> {
    let fds = engine.worker_fds(0).for_port().expect("there is room for descriptors");
    Port::attach(engine.control().clone(), 0, engine.share(), fds, None)
}

fn send(engine: &Engine, seq: u64) -> Result<()> {
    engine.put(0, Task { seq, kind: TaskKind::Index, bytes: seq.to_le_bytes().to_vec() })
}

fn block(commit: &Commit<'_>) -> Vec<u8> {
    let mut meta = MetaWriter::default();
    let storage = meta.add_storage(StorageRecord { offset: 0, nbytes: LEAF });
    let leaf = meta.add_tensor(storage, 0, Dtype::U8, &[LEAF as i64], &[1]);
    meta.skeleton().leaf(leaf);
    meta.finish(commit.generation()).to_vec()
}

/// Answers the task `seq` that was taken: in a slot, of which part is written by collate, or in a segment of its own.
fn answer(engine: &Engine, port: &Port, seq: u64, kind: ResultKind, own: bool) -> Result<bool> {
    let chunk = port.allocate(LEAF)?;
    let mut commit = port.begin_commit();
    let block = block(&commit);
    let end = LEAF + block.len() as u64;
    let content = [seq as u8; LEAF as usize];
    if own {
        if !commit.own_segment(end)? {
            return Ok(false);
        }
        let segment = commit.own().expect("there is one");
        segment.copy_in(0, &content)?;
        segment.copy_in(LEAF, &block)?;
        return Ok(commit.send()? == SendOutcome::Yes && commit.finish(seq, kind, LEAF..end, end)?);
    }
    let Room::Ready = commit.reserve(end)? else { return Ok(false) };
    let segment = engine.control().segment();
    let at = commit.pointer(0, end)?.as_ptr() as u64 - segment.base().as_ptr() as u64;
    segment.copy_in(at, &content)?;
    segment.copy_in(at + LEAF, &block)?;
    drop(chunk);
    commit.finish(seq, kind, LEAF..end, end)
}

/// Reads a received result as its decoder does, and all bytes that its table names.
fn read(received: &Received) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let meta = received.meta()?;
    for storage in (0..meta.storage_count()).filter_map(|number| meta.storage(number)) {
        received.pointer(storage.offset, storage.nbytes)?;
        received.backing().copy_out(storage.offset, storage.nbytes, &mut bytes)?;
    }
    Ok(bytes)
}

impl Live {
    fn new() -> Self {
        let engine = Engine::new(1, 8, SHARE).unwrap();
        let port = port(&engine).unwrap();
        let commit = |seq: u64, kind, own| {
            send(&engine, seq).unwrap();
            assert_eq!(port.try_task().unwrap().unwrap().seq, seq);
            assert!(answer(&engine, &port, seq, kind, own).unwrap());
        };
        let mut held = None;
        for seq in 0..BEFORE {
            commit(seq, ResultKind::Batch, seq % 5 == 4);
            let mut received = engine.try_next().unwrap().unwrap();
            assert!(received.lease());
            assert_eq!(read(&received).unwrap(), [seq as u8; LEAF as usize]);
            held = (seq >= BEFORE - 2).then_some(received).filter(|it| !it.is_oversize()).or(held);
        }
        commit(BEFORE, ResultKind::Batch, false);
        commit(BEFORE + 1, ResultKind::Batch, true);
        commit(BEFORE + 2, ResultKind::Object, false);
        send(&engine, BEFORE + 3).unwrap();
        send(&engine, BEFORE + 4).unwrap();
        Self { engine, port, held: held.unwrap(), next: BEFORE + 5 }
    }

    /// All that the two sides do with shared words, each whatever came of the others. Returns what went wrong.
    fn use_all(&mut self) -> Vec<Error> {
        let Self { engine, port, next, .. } = self;
        let mut errors = Vec::new();
        for _ in 0..2 {
            errors.extend(send(engine, *next).err());
            *next += 1;
            errors.extend(engine.peek_of(0).err());
            errors.extend(engine.committed().err());
            errors.extend(engine.in_hand(0).err());
            errors.extend(engine.wait_for(None, Duration::ZERO).err());
            errors.extend(engine.wait_for(Some(0), Duration::ZERO).err());
            for _ in 0..24 {
                match engine.try_next() {
                    Ok(None) => break,
                    Ok(Some(mut received)) => {
                        received.lease();
                        errors.extend(read(&received).err());
                    }
                    Err(error) => {
                        errors.push(error);
                        break;
                    }
                }
            }
            errors.extend(port.wait(Duration::ZERO).err());
            for own in [false, true] {
                match port.try_task() {
                    Ok(None) => {}
                    Ok(Some(task)) => {
                        errors.extend(answer(engine, port, task.seq, ResultKind::Batch, own).err());
                    }
                    Err(error) => errors.push(error),
                }
            }
        }
        errors
    }

    /// Checks that a batch that the user holds can be read for as long as he holds it, whichever side ends before. The
    /// bytes may be another batch's: a worker that is told that its slot is free fills it again.
    fn still_mapped(held: &Received) {
        assert_eq!(read(held).unwrap().len(), LEAF as usize);
    }
}

/// The end of a case, after the words were used.
#[derive(Clone, Copy)]
enum End {
    /// The epoch's end.
    Closed,
    /// Another worker in its place.
    Succeeded,
    /// The engine's segment is kept for the next epoch's workers.
    Stored,
}

fn run(at: u64, value: impl Fn(u64) -> u64, end: End) -> Vec<Error> {
    let mut live = Live::new();
    {
        let segment = live.engine.control().segment();
        let mut word = Vec::new();
        segment.copy_out(at, 8, &mut word).unwrap();
        let word = u64::from_le_bytes(word.try_into().unwrap());
        segment.copy_in(at, &value(word).to_le_bytes()).unwrap();
    }
    if let End::Closed = end {
        // Closes for some words before anything has stored over them.
        let first = at.is_multiple_of(16);
        let mut errors = if first { Vec::new() } else { live.use_all() };
        let Live { engine, port, held, .. } = live;
        drop(port);
        engine.close();
        errors.extend(engine.control().take_refusal());
        Live::still_mapped(&held);
        drop(engine);
        Live::still_mapped(&held);
        return errors;
    }
    let mut errors = live.use_all();
    let Live { engine, port: first, held, mut next } = live;
    drop(first);
    while let Ok(Some(_)) = engine.try_next() {}
    let engine = match end {
        End::Stored => match engine.store(SHARE) {
            Some(stored) => {
                let _ = stored.resident();
                stored.take().unwrap()
            }
            None => {
                Live::still_mapped(&held);
                return errors;
            }
        },
        _ => engine,
    };
    let second = match end {
        End::Succeeded => engine.succeed(0).and_then(|busy| {
            let fds = engine.worker_fds(0).for_port().expect("there is room for descriptors");
            Port::attach(engine.control().clone(), 0, SHARE, fds, Some(&busy))
        }),
        _ => port(&engine),
    };
    match second {
        Err(error) => errors.push(error),
        Ok(port) => {
            next += 1;
            let mut live = Live { engine, port, held, next };
            errors.extend(live.use_all());
            Live::still_mapped(&live.held);
            live.engine.close();
            Live::still_mapped(&live.held);
        }
    }
    errors
}

/// The words of the header and of the worker's structures.
fn offsets() -> Vec<u64> {
    let engine = Engine::new(1, 8, SHARE).unwrap();
    let geometry = *engine.control().geometry();
    let (slots, ring) = (u64::from(geometry.slots), u64::from(geometry.ring_capacity));
    let block = 1024 + 6 * 128 + slots.div_ceil(64) * 8 + slots * (4 + 16) + 2 * ring * 64;
    assert!(GRANULE + block <= engine.control().arena(0).start);
    (0..256).step_by(8).chain((GRANULE..GRANULE + block).step_by(8)).collect()
}

const ODD: u64 = 0x9e37_79b9_7f4a_7c15;

type Value = (&'static str, fn(u64) -> u64);

/// The new values of a word: all bits, some bits, its neighbours, and each half alone, where two values share a word.
const VALUES: [Value; 11] = [
    ("zero", |_| 0),
    ("ones", |_| u64::MAX),
    ("one more", |word| word.wrapping_add(1)),
    ("one less", |word| word.wrapping_sub(1)),
    ("high bit", |word| word ^ 1 << 63),
    ("low bit", |word| word ^ 1),
    ("middle bit", |word| word ^ 1 << 20),
    ("low half", |word| word & !0xffff_ffff),
    ("high half", |word| word & 0xffff_ffff),
    ("high half full", |word| word | 0xffff_ffff << 32),
    ("random", |word| (word ^ ODD).wrapping_mul(ODD)),
];

/// Of the cases, one in so many is run, unless `RINGLOADER_TEST_ALL` is set; no number of values divides it, so each
/// word has its turn.
const STEP: usize = 23;

fn storm(end: End, name: &str) {
    let (mut cases, mut refused) = (0, 0);
    let mut kinds = BTreeMap::<&'static str, usize>::new();
    let mut failed = Vec::new();
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|info| eprintln!("{info}")));
    let step = if std::env::var_os("RINGLOADER_TEST_ALL").is_some() { 1 } else { STEP };
    let all = offsets().into_iter().flat_map(|at| VALUES.map(|(value, change)| (at, value, change)));
    for (at, value, change) in all.step_by(step) {
        cases += 1;
        if std::env::var_os("RINGLOADER_TEST_NAMES").is_some() {
            eprintln!("{name}: {value} at {at:#x}");
        }
        match catch_unwind(AssertUnwindSafe(|| run(at, change, end))) {
            Ok(errors) => {
                refused += usize::from(!errors.is_empty());
                for error in errors {
                    *kinds.entry(kind(&error)).or_default() += 1;
                }
            }
            Err(_) => failed.push(format!("{value} at {at:#x}")),
        }
    }
    std::panic::set_hook(hook);
    println!("{name}: {cases} words overwritten, {refused} with an error, {kinds:?}");
    assert!(failed.is_empty(), "{} of {cases} panicked: {failed:?}", failed.len());
    assert!(cases * step > 5000 && refused > 5 && refused < cases, "{refused} of {cases}");
}

fn kind(error: &Error) -> &'static str {
    match error {
        Error::Corrupt(_) => "corrupt",
        Error::Arrival { .. } => "arrival",
        Error::Config(_) => "config",
        Error::Os { .. } => "os",
        _ => "other",
    }
}

/// The words that say that a batch of the user's is his: all values of these, in every run of the tests.
#[test]
fn what_the_user_holds_stays_mapped_and_whole_whatever_its_words_say() {
    let live = Live::new();
    let segment = live.engine.control().segment();
    let slots = live.engine.control().worker(0).slots;
    let held =
        slots.holds.iter().position(|holds| holds.load(Ordering::Relaxed) > 0).expect("a batch is held");
    let offset = |address: usize| (address - segment.base().as_ptr() as usize) as u64 / 8 * 8;
    let words = [
        offset(&raw const slots.holds[held] as usize),
        offset(&raw const slots.touched()[held] as usize),
        offset(&raw const slots.touched()[slots.holds.len() - 1] as usize),
        offset(&raw const slots.free[0] as usize),
    ];
    for at in words {
        for (_, change) in VALUES {
            for end in [End::Closed, End::Succeeded, End::Stored] {
                run(at, change, end);
            }
            lowered_before_all_else(at, change);
        }
    }
}

/// A word changes while nothing but the end is left to come: the bytes too are the user's then.
fn lowered_before_all_else(at: u64, change: fn(u64) -> u64) {
    for stored in [false, true] {
        let Live { engine, port, held, .. } = Live::new();
        let before = read(&held).unwrap();
        drop(port);
        while let Ok(Some(_)) = engine.try_next() {}
        let mut word = [0; 8].to_vec();
        engine.control().segment().copy_out(at, 8, &mut word).unwrap();
        let word = change(u64::from_le_bytes(word.try_into().unwrap()));
        engine.control().segment().copy_in(at, &word.to_le_bytes()).unwrap();
        let kept = if stored { engine.store(64 * SHARE) } else { None };
        assert_eq!(read(&held).unwrap(), before, "{word:#x} at {at:#x}");
        drop(kept);
        assert_eq!(read(&held).unwrap(), before, "{word:#x} at {at:#x}");
    }
}

#[test]
fn words_are_refused_or_of_no_effect_until_the_end() {
    storm(End::Closed, "closed");
}

#[test]
fn words_are_refused_or_of_no_effect_for_a_successor() {
    storm(End::Succeeded, "succeeded");
}

#[test]
fn words_are_refused_or_of_no_effect_in_a_kept_segment() {
    storm(End::Stored, "stored");
}

#[test]
fn a_header_is_refused_or_names_only_what_is_there() {
    let engine = Engine::new(2, 8, SHARE).unwrap();
    let (mut refused, mut attached) = (0, 0);
    for at in (0..256).step_by(8) {
        let whole = engine.control().segment();
        let mut word = Vec::new();
        whole.copy_out(at, 8, &mut word).unwrap();
        let before = u64::from_le_bytes(word.try_into().unwrap());
        for bit in 0..64 {
            for value in [before ^ 1 << bit, before.wrapping_add(1 << bit), before.wrapping_sub(1 << bit)] {
                whole.copy_in(at, &value.to_le_bytes()).unwrap();
                let segment = Segment::attach(engine.worker_fds(0).segment).unwrap();
                let len = segment.len();
                match Control::attach(segment) {
                    Err(Error::Corrupt(_)) => refused += 1,
                    Err(other) => panic!("{value:#x} at {at}: {other}"),
                    Ok(control) => {
                        attached += 1;
                        assert!(control.geometry().total() <= len, "{value:#x} at {at}");
                    }
                }
            }
        }
        whole.copy_in(at, &before.to_le_bytes()).unwrap();
    }
    println!("header: {refused} refused, {attached} attached");
    assert!(refused > 500 && attached > 100, "{refused} refused, {attached} attached");
}
