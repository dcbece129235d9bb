//! Both ends over real connections of this machine.

mod flow_limit;
mod peers;

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, TcpStream};
use std::time::{Duration, Instant};

use zerocopy::IntoBytes;

use super::frame::{FrameHeader, FrameKind, HEADER};
use super::handshake::{CHALLENGE, Hello};
use super::link::{AHEAD, LONGEST_BATCH};
use super::main_end::{MainRelay, Standing};
use super::worker_end::WorkerRelay;
use super::{Beats, Identity, Token};
use crate::transport::Transport;
use crate::transport::engine::Engine;
use crate::transport::message::{ResultKind, Task, TaskKind};
use crate::transport::port::{Port, Room};
use crate::transport::received::Received;

const TOKEN: Token = [42; 32];
const HOST: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
const LONG: Duration = Duration::from_secs(60);
const SHARE: u64 = 4 << 20;

fn relay(engine: &Engine, most: Option<u64>, beats: Beats) -> MainRelay {
    MainRelay::new(engine, HOST, TOKEN, most, beats).unwrap()
}

fn task(seq: u64) -> Task {
    Task { seq, kind: TaskKind::Indices, bytes: seq.to_le_bytes().to_vec() }
}

/// Answers the challenge of a main process as its worker 0.
fn hello(main: &MainRelay, token: Token, number: u64) -> TcpStream {
    hello_of(main, Identity { token, worker: 0, number })
}

fn hello_of(main: &MainRelay, identity: Identity) -> TcpStream {
    let mut socket = TcpStream::connect(main.address()).unwrap();
    socket.set_read_timeout(Some(LONG)).unwrap();
    let mut challenge = [0; CHALLENGE];
    socket.read_exact(&mut challenge).unwrap();
    socket.write_all(Hello::new(&challenge, &identity).as_bytes()).unwrap();
    socket
}

/// The next frame that is no question for the clock.
fn frame(socket: &mut TcpStream) -> (FrameHeader, Vec<u8>) {
    loop {
        let mut bytes = [0; HEADER];
        socket.read_exact(&mut bytes).unwrap();
        let header = FrameHeader::read(&bytes).unwrap();
        let mut content = vec![0; header.len.get() as usize];
        socket.read_exact(&mut content).unwrap();
        if header.kind != FrameKind::Ping {
            return (header, content);
        }
    }
}

/// The header of a batch of `len` bytes.
fn result(seq: u64, len: u64) -> FrameHeader {
    FrameHeader {
        of: ResultKind::Batch as u8,
        seq: seq.into(),
        len: len.into(),
        counts: [seq + 1, 0, 0, 0, 0].map(Into::into),
        ..FrameHeader::with_moments(FrameKind::Result, [0, 8, seq + 1])
    }
}

/// Sends a batch of `len` bytes.
fn send(socket: &mut TcpStream, seq: u64, len: usize) {
    socket.write_all(result(seq, len as u64).as_bytes()).unwrap();
    socket.write_all(&pattern(seq, len)).unwrap();
}

fn next(engine: &Engine) -> Received {
    let until = Instant::now() + LONG;
    loop {
        if let Some(received) = engine.try_next().unwrap() {
            return received;
        }
        assert!(Instant::now() < until, "nothing has come");
        engine.wait_for(None, Duration::from_millis(100)).unwrap();
    }
}

fn ended(engine: &Engine) -> u32 {
    let until = Instant::now() + LONG;
    loop {
        assert!(engine.try_next().unwrap().is_none());
        if let Some(worker) = engine.take_ended() {
            return worker;
        }
        assert!(Instant::now() < until, "no worker has ended");
        engine.wait_for(None, Duration::from_millis(100)).unwrap();
    }
}

fn bytes_of(received: &Received) -> Vec<u8> {
    let mut bytes = Vec::new();
    received.backing().copy_out(0, received.len(), &mut bytes).unwrap();
    bytes
}

fn pattern(seq: u64, len: usize) -> Vec<u8> {
    (0..len).map(|at| (at as u64 * 31 + seq) as u8).collect()
}

fn take(port: &Port) -> Task {
    let until = Instant::now() + LONG;
    loop {
        if let Some(task) = port.try_task().unwrap() {
            return task;
        }
        assert!(Instant::now() < until, "no task has come");
        port.wait(Duration::from_millis(100)).unwrap();
    }
}

/// Answers a task as a worker does.
fn answer(port: &Port, seq: u64, len: usize) {
    let bytes = pattern(seq, len);
    let mut commit = port.begin_commit();
    loop {
        match commit.reserve(len as u64).unwrap() {
            Room::Ready => break,
            Room::Oversize => {
                if commit.own_segment(len as u64).unwrap() {
                    break;
                }
            }
            Room::Later => {}
        }
        port.wait_for_room().unwrap();
    }
    commit.copy_in(0, &bytes).unwrap();
    if commit.own().is_some() {
        let _ = commit.send().unwrap();
    }
    while !commit.finish(seq, ResultKind::Batch, 0..8, len as u64).unwrap() {
        port.wait_for_room().unwrap();
    }
}

#[test]
fn tasks_go_out_and_batches_of_any_size_come_back() {
    let engine = Engine::new(1, 4, SHARE).unwrap();
    let main = relay(&engine, None, Beats::default());
    let number = main.expect(&engine, 0, None).unwrap();
    assert_eq!(main.standing(0, number, Duration::ZERO), Standing::Expected);
    let identity = Identity { token: TOKEN, worker: 0, number };
    let (host, port) = (main.address().ip().to_string(), main.address().port());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let worker =
                WorkerRelay::connect(&host, port, identity, 4, SHARE, LONG, Beats::default()).unwrap();
            let port = worker.port().unwrap();
            loop {
                let task = take(&port);
                if task.kind == TaskKind::End {
                    break;
                }
                // The third and the sixth are larger than any slot.
                let len = if task.seq % 3 == 2 { 5 << 20 } else { 1000 + 100_000 * task.seq as usize };
                answer(&port, task.seq, len);
            }
            worker.finish();
            assert!(!worker.is_lost());
        });
        assert_eq!(main.standing(0, number, LONG), Standing::Connected);
        for seq in 0..4 {
            engine.put(0, task(seq)).unwrap();
        }
        let mut held = Vec::new();
        for seq in 0..8 {
            let received = next(&engine);
            assert_eq!((received.seq, received.is_oversize()), (seq, seq % 3 == 2));
            assert!(bytes_of(&received) == pattern(seq, received.len() as usize), "batch {seq}");
            held.push(received);
            held.truncate(2);
            if seq < 4 {
                engine.put(0, task(seq + 4)).unwrap();
            }
        }
        assert!(main.received() > 10 << 20);
        engine.put(0, Task { seq: 0, kind: TaskKind::End, bytes: vec![] }).unwrap();
        assert_eq!(ended(&engine), 0);
    });
}

#[test]
fn a_frame_may_come_byte_by_byte() {
    let engine = Engine::new(1, 4, SHARE).unwrap();
    let main = relay(&engine, None, Beats::default());
    let number = main.expect(&engine, 0, None).unwrap();
    engine.put(0, task(7)).unwrap();
    let mut socket = TcpStream::connect(main.address()).unwrap();
    socket.set_nodelay(true).unwrap();
    let mut challenge = [0; CHALLENGE];
    socket.read_exact(&mut challenge).unwrap();
    let hello = Hello::new(&challenge, &Identity { token: TOKEN, worker: 0, number });
    hello.as_bytes().iter().for_each(|byte| socket.write_all(&[*byte]).unwrap());
    let (header, content) = frame(&mut socket);
    assert_eq!((header.kind, header.seq.get(), content), (FrameKind::Task, 7, task(7).bytes));
    let bytes = pattern(7, 500);
    for byte in result(7, 500).as_bytes().iter().chain(&bytes) {
        socket.write_all(&[*byte]).unwrap();
    }
    let received = next(&engine);
    assert_eq!((received.seq, bytes_of(&received)), (7, bytes));
    let counts = engine.control().worker(0).counters.read(0);
    assert_eq!(counts[0], ("batches", 8));
}

#[test]
fn frames_of_any_length_may_come_at_once() {
    let engine = Engine::new(1, 4, SHARE).unwrap();
    let main = relay(&engine, None, Beats::default());
    let number = main.expect(&engine, 0, None).unwrap();
    let mut socket = hello(&main, TOKEN, number);
    // Around what is read ahead, and more of them than the ring takes.
    let lens = [8, 500, AHEAD - HEADER, AHEAD - 1, AHEAD, AHEAD + 1, 9, 5 * AHEAD + 7, 3 << 20, 10, 11, 12];
    let mut bytes = Vec::new();
    for (seq, &len) in lens.iter().enumerate() {
        bytes.extend(result(seq as u64, len as u64).as_bytes());
        bytes.extend(pattern(seq as u64, len));
    }
    std::thread::scope(|scope| {
        scope.spawn(|| socket.write_all(&bytes).unwrap());
        for (seq, &len) in lens.iter().enumerate() {
            let received = next(&engine);
            assert_eq!((received.seq, received.len()), (seq as u64, len as u64));
            assert!(bytes_of(&received) == pattern(seq as u64, len), "frame {seq}");
        }
    });
}

#[test]
fn callers_that_are_not_expected_are_closed() {
    let engine = Engine::new(1, 4, SHARE).unwrap();
    let main = relay(&engine, None, Beats::default());
    let number = main.expect(&engine, 0, None).unwrap();
    let mut wrong = TOKEN;
    wrong[31] ^= 1;
    for mut socket in [hello(&main, wrong, number), hello(&main, TOKEN, number + 1), hello(&main, TOKEN, 0)] {
        assert_eq!(socket.read(&mut [0; 8]).unwrap(), 0, "it was closed");
    }
    assert_eq!(main.standing(0, number, Duration::ZERO), Standing::Expected);
    let _first = hello(&main, TOKEN, number);
    assert_eq!(main.standing(0, number, LONG), Standing::Connected);
    let mut second = TcpStream::connect(main.address()).unwrap();
    second.set_read_timeout(Some(Duration::from_millis(300))).unwrap();
    assert!(second.read(&mut [0; 8]).is_err(), "nobody is let in while nobody is expected");
}

#[test]
fn a_worker_that_goes_in_the_middle_of_a_batch_is_succeeded() {
    let engine = Engine::new(1, 4, SHARE).unwrap();
    let main = relay(&engine, None, Beats::default());
    let number = main.expect(&engine, 0, None).unwrap();
    for seq in 0..3 {
        engine.put(0, task(seq)).unwrap();
    }
    let mut socket = hello(&main, TOKEN, number);
    send(&mut socket, 0, 500);
    socket.write_all(result(1, 500).as_bytes()).unwrap();
    socket.write_all(&pattern(1, 499)).unwrap();
    assert_eq!(next(&engine).seq, 0);
    drop(socket);
    assert_eq!(ended(&engine), 0);
    let why = main.why_lost(0).unwrap();
    assert!(why.contains("in the middle of a batch"), "{why}");
    assert_eq!(main.failure(0), None);
    assert!(engine.in_hand(0).unwrap().is_none() && engine.is_deserted(0).unwrap());

    let busy = engine.succeed(0).unwrap();
    let second = main.expect(&engine, 0, Some(&busy)).unwrap();
    assert_ne!(second, number);
    engine.put(0, task(1)).unwrap();
    let mut late = hello(&main, TOKEN, number);
    assert_eq!(late.read(&mut [0; 8]).unwrap(), 0, "the earlier number never counts");
    let mut socket = hello(&main, TOKEN, second);
    assert_eq!(frame(&mut socket).0.seq.get(), 1, "tasks that were not sent again are dropped");
    send(&mut socket, 1, 500);
    let received = next(&engine);
    assert_eq!((received.seq, bytes_of(&received)), (1, pattern(1, 500)));
}

#[test]
fn a_batch_without_memory_here_is_not_its_workers_fault() {
    let engine = Engine::new(1, 4, SHARE).unwrap();
    let main = relay(&engine, None, Beats::default());
    let number = main.expect(&engine, 0, None).unwrap();
    let mut socket = hello(&main, TOKEN, number);
    socket.write_all(result(0, LONGEST_BATCH - 1).as_bytes()).unwrap();
    assert_eq!(ended(&engine), 0);
    let failure = main.failure(0).unwrap();
    assert!(failure.starts_with("a batch needs"), "{failure}");
    assert_eq!(main.why_lost(0), Some(failure));
}

#[test]
fn a_silent_worker_is_lost_and_one_with_a_heartbeat_is_not() {
    let beats = Beats { every: Duration::from_millis(20), lost_after: Duration::from_secs(1) };
    let engine = Engine::new(2, 4, SHARE).unwrap();
    let main = relay(&engine, None, beats);
    let numbers = [0, 1].map(|worker| main.expect(&engine, worker, None).unwrap());
    let _silent = hello(&main, TOKEN, numbers[0]);
    let address = main.address();
    let identity = Identity { token: TOKEN, worker: 1, number: numbers[1] };
    let _lives =
        WorkerRelay::connect(&address.ip().to_string(), address.port(), identity, 4, SHARE, LONG, beats)
            .unwrap();
    assert_eq!(main.standing(1, numbers[1], LONG), Standing::Connected);
    assert_eq!(ended(&engine), 0);
    let why = main.why_lost(0).unwrap();
    assert!(why.starts_with("nothing was heard"), "{why}");
    assert_eq!(main.why_lost(1), None);
}

#[test]
fn a_worker_may_be_given_up_under_its_own_number_only() {
    let engine = Engine::new(1, 4, SHARE).unwrap();
    let main = relay(&engine, None, Beats::default());
    let number = main.expect(&engine, 0, None).unwrap();
    main.lose(0, number + 1, "another".into());
    main.lose(0, number, "Ray says so".into());
    assert_eq!(ended(&engine), 0);
    assert_eq!(main.standing(0, number, LONG), Standing::Lost("Ray says so".into()));
}

#[test]
fn a_worker_for_whose_batch_there_is_no_room_may_be_given_up() {
    for gives_up in [true, false] {
        let engine = Engine::new(1, 4, SHARE).unwrap();
        let main = relay(&engine, None, Beats::default());
        let number = main.expect(&engine, 0, None).unwrap();
        let mut socket = hello(&main, TOKEN, number);
        let until = Instant::now() + LONG;
        std::thread::scope(|scope| {
            // Nobody takes any: together they are larger than the memory.
            scope.spawn(|| {
                let mut bytes = Vec::new();
                for seq in 0..6 {
                    bytes.extend(result(seq, 1 << 20).as_bytes());
                    bytes.extend(pattern(seq, 1 << 20));
                }
                let _ = socket.write_all(&bytes);
            });
            while engine.there_of(0).unwrap() < 3 {
                assert!(Instant::now() < until, "nothing has come");
                std::thread::sleep(Duration::from_millis(1));
            }
            if gives_up {
                main.lose(0, number, "Ray says so".into());
            } else {
                main.close();
            }
            while !engine.has_ended(0).unwrap() {
                assert!(Instant::now() < until, "it has not ended");
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        let why = if gives_up { "Ray says so" } else { "the relay was closed" };
        assert_eq!(main.why_lost(0).unwrap(), why);
    }
}

#[test]
fn what_comes_after_the_end_is_dropped() {
    let engine = Engine::new(1, 4, SHARE).unwrap();
    let main = relay(&engine, None, Beats::default());
    let number = main.expect(&engine, 0, None).unwrap();
    let identity = Identity { token: TOKEN, worker: 0, number };
    let (host, port) = (main.address().ip().to_string(), main.address().port());
    std::thread::scope(|scope| {
        let worker = scope.spawn(|| {
            let worker =
                WorkerRelay::connect(&host, port, identity, 4, SHARE, LONG, Beats::default()).unwrap();
            let port = worker.port().unwrap();
            let mut made = 0;
            while take(&port).kind != TaskKind::End {
                if !port.is_done() {
                    // More than there is room for in the main process: nobody takes any.
                    answer(&port, made, 1 << 20);
                    made += 1;
                }
            }
            worker.finish();
        });
        for seq in 0..4 {
            engine.put(0, task(seq)).unwrap();
        }
        while engine.committed().unwrap() == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
        engine.set_done();
        engine.put(0, Task { seq: 0, kind: TaskKind::End, bytes: vec![] }).unwrap();
        worker.join().unwrap();
    });
}
