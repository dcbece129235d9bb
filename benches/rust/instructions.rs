//! Instructions for one operation, counted by valgrind: the same on a busy machine. Fails where a batch costs more the
//! more workers there are.
//!
//! Each case is a process under callgrind, which counts within functions that have `measured` in their names.

use std::env;
use std::hint::black_box;
use std::process::{Command, ExitCode};

use ringloader_core::plan::ResultOrder;
use ringloader_core::ring::Consumer;
use ringloader_core::sync::AtomicU64;
use ringloader_core::sync::ready::{Ready, ReadyBits};

#[path = "parts/ends.rs"]
mod ends;
#[path = "parts/epoch.rs"]
mod epoch;
#[path = "parts/fleet.rs"]
mod fleet;

use ends::{Ours, Pop, Push, SLOTS, Storage, ours, words, yardstick};
use epoch::Epoch;
use fleet::Fleet;

/// The case that a process under valgrind runs.
const CASE: &str = "RINGLOADER_BENCH_CASE";
const OPERATIONS: u64 = 10_000;
const WORKERS: [u32; 4] = [1, 8, 64, 128];
/// More for many workers than for one.
const ALLOWED: f64 = 1.1;

const PARTS: [(&str, fn(u32, ResultOrder)); 4] =
    [("plan", plan), ("look", look), ("ready", ready), ("awaited", awaited)];
const ORDERS: [(&str, ResultOrder); 2] =
    [("in_order", ResultOrder::InOrder), ("as_completed", ResultOrder::AsCompleted)];
const RINGS: [(&str, fn()); 2] = [
    ("ringloader", || {
        let storage = Storage::new();
        let (push, pop) = ours(storage.ring());
        measured_ring(push, pop);
    }),
    ("rtrb", || {
        let (push, pop) = yardstick();
        measured_ring(push, pop);
    }),
];

#[inline(never)]
fn measured_ring(mut push: impl Push, mut pop: impl Pop) {
    for _ in 0..OPERATIONS {
        assert!(push.push(black_box(&words(7))));
        black_box(&pop.pop());
    }
}

/// Worker selector and reorder buffer alone.
fn plan(workers: u32, order: ResultOrder) {
    let mut epoch = Epoch::new(workers, order);
    (0..4096).for_each(|_| _ = epoch.step());
    measured_plan(&mut epoch);
}

#[inline(never)]
fn measured_plan(epoch: &mut Epoch) {
    (0..OPERATIONS).for_each(|_| _ = black_box(epoch.step()));
}

/// Finding the one worker that has committed, and popping its descriptor: in order, whose turn it is is known.
fn look(workers: u32, order: ResultOrder) {
    let rings: Vec<Storage> = (0..workers).map(|_| Storage::new()).collect();
    let (mut push, mut pop): (Vec<_>, Vec<_>) = rings.iter().map(|storage| ours(storage.ring())).unzip();
    let shared: Vec<_> = (0..ReadyBits::words(workers)).map(|_| AtomicU64::new(0)).collect();
    let mut ready = (order == ResultOrder::AsCompleted).then(|| Ready::new(workers));
    for turn in 0..OPERATIONS {
        let worker = (turn % u64::from(workers)) as u32;
        assert!(push[worker as usize].push(&words(turn)));
        ReadyBits::new(&shared).set(worker);
        measured_look(ready.as_mut(), ReadyBits::new(&shared), &mut pop, worker);
    }
}

#[inline(never)]
fn measured_look(
    ready: Option<&mut Ready>,
    shared: ReadyBits<'_>,
    ends: &mut [Ours<'_, Consumer>],
    turn: u32,
) {
    let has = |worker: u32| {
        let Ours { ring, end } = &mut ends[worker as usize];
        Ok(!end.is_empty(*ring)?)
    };
    let found = ready.map_or(Some(turn), |ready| {
        let found = ready.find(shared, has).expect("sound");
        found.inspect(|&worker| ready.pass(worker))
    });
    assert_eq!(found, Some(turn));
    assert!(black_box(&ends[turn as usize].pop()).is_some());
}

/// The parent's work for a batch that is there.
fn ready(workers: u32, order: ResultOrder) {
    Fleet::new(workers, order).ready(OPERATIONS, false);
}

/// The parent's work for a batch, with the wait before it.
fn awaited(workers: u32, order: ResultOrder) {
    Fleet::new(workers, order).awaited(OPERATIONS, false);
}

fn run(case: &str) {
    let fields: Vec<&str> = case.split(' ').collect();
    if let Some((_, run)) = RINGS.iter().find(|(name, _)| fields == [*name]) {
        return run();
    }
    let part = PARTS.iter().find(|(name, _)| *name == fields[0]).expect("a case");
    let order = ORDERS.iter().find(|(name, _)| *name == fields[1]).expect("a case");
    part.1(fields[2].parse().expect("a number of workers"), order.1);
}

/// Instructions for one operation of `case`; `None` where this valgrind does not know `pidfd_open`, which an engine needs.
fn count(case: &str) -> Option<f64> {
    let program = env::current_exe().expect("a path");
    let valgrind = ["--tool=callgrind", "--callgrind-out-file=/dev/null", "--toggle-collect=*measured*"];
    let output = Command::new("valgrind").args(valgrind).arg(program).env(CASE, case).output();
    let output = output.unwrap_or_else(|error| panic!("valgrind cannot be run ({error}): install it"));
    let text = String::from_utf8_lossy(&output.stderr);
    if text.contains("pidfd_open") {
        return None;
    }
    assert!(output.status.success(), "{case}: {text}");
    let collected = text.lines().find_map(|line| line.split("Collected :").nth(1));
    let count: f64 = collected.and_then(|number| number.trim().parse().ok()).unwrap_or(0.0);
    assert!(count > OPERATIONS as f64, "{case}: nothing was counted: {text}");
    Some(count / OPERATIONS as f64)
}

fn main() -> ExitCode {
    if let Ok(case) = env::var(CASE) {
        run(&case);
        return ExitCode::SUCCESS;
    }
    println!("| {SLOTS} slots, one thread | instructions for a push and a pop |\n|---|--:|");
    for (name, _) in RINGS {
        println!("| {name} | {:.1} |", count(name).expect("no engine"));
    }
    println!("\n| instructions for a batch | {} workers |", WORKERS.map(|n| n.to_string()).join(" | "));
    println!("|---|{}", "--:|".repeat(WORKERS.len()));
    let mut flat = true;
    for (part, order) in PARTS.iter().flat_map(|part| ORDERS.map(|order| (part.0, order.0))) {
        let counts: Option<Vec<f64>> =
            WORKERS.iter().map(|workers| count(&format!("{part} {order} {workers}"))).collect();
        let Some(counts) = counts else {
            eprintln!("{part}, {order}: not counted, this valgrind does not know pidfd_open");
            continue;
        };
        flat &= counts.iter().all(|&one| one <= counts[0] * ALLOWED);
        let cells: Vec<_> = counts.iter().map(|one| format!("{one:.0}")).collect();
        println!("| {part}, {order} | {} |", cells.join(" | "));
    }
    if !flat {
        eprintln!("a batch costs more the more workers there are");
    }
    if flat { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
