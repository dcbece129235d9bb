//! Workers that take the place of others.

use ringloader_core::Error;
use ringloader_core::os::fd_passing::SendOutcome;
use ringloader_core::transport::Transport;
use ringloader_core::transport::port::Port;

use crate::both_ends::{SHARE, answer, answer_oversize, check, engine, port, take, take_sent_task, task};

#[test]
fn a_successor_leaves_what_is_held_and_gets_no_old_task() {
    let engine = engine();
    let port_of_the_first = port(&engine, None);
    answer(&engine, &port_of_the_first, 1);
    answer(&engine, &port_of_the_first, 2);
    engine.put(0, task(3)).unwrap();
    assert!(matches!(engine.succeed(0), Err(Error::Config(_))), "results were not taken");
    let held = take(&engine, 1);
    drop(take(&engine, 2));
    // The worker stops here, as if it had died after sending the memory of an oversize batch.
    take_sent_task(&port_of_the_first, 3);
    let mut commit = port_of_the_first.begin_commit();
    assert!(commit.own_segment(1).unwrap());
    assert_eq!(commit.send().unwrap(), SendOutcome::Yes);
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
fn memory_that_a_process_of_the_worker_may_write_to_has_no_successor() {
    let engine = engine();
    // Stands for a process that the worker forked, which has the worker's memory.
    let theirs = port(&engine, None);
    answer(&engine, &theirs, 1);
    drop(take(&engine, 1));
    let mut worker = std::process::Command::new("true").spawn().unwrap();
    worker.wait().unwrap();
    engine.watch_worker(0, worker.id()).unwrap();
    for _ in 0..2 {
        let refused = engine.succeed(0).unwrap_err().to_string();
        assert!(refused.contains("a process that it forked"), "{refused}");
        assert!(!engine.is_deserted(0).unwrap());
    }
    drop(theirs);
    assert!(engine.is_deserted(0).unwrap());
    assert!(engine.succeed(0).is_ok());
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

#[test]
fn held_slots_of_another_segment_are_refused() {
    let engine = engine();
    let fds = engine.worker_fds(0).for_port().unwrap();
    let refused = Port::attach(engine.control().clone(), 0, SHARE, fds, Some(&[0, 0]));
    assert!(matches!(refused, Err(Error::Config(_))), "{refused:?}");
}
