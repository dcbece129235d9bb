//! Batches whose first bytes the worker's thread sends from its own memory.

use std::net::{Ipv4Addr, TcpListener};

use super::*;
use crate::transport::relay::worker_end::{Ahead, Answer};

/// Bytes of a batch: more than the buffers of a connection take.
const LEN: usize = 2 << 20;

/// A worker whose main process is the test: nothing is read but by it.
fn worker_of(address: Ipv4Addr) -> (WorkerRelay, Port, TcpStream) {
    let listener = TcpListener::bind((address, 0)).unwrap();
    let identity = Identity { token: TOKEN, worker: 0, number: 1 };
    let port = listener.local_addr().unwrap().port();
    // Signs of life between the frames, wherever they may be.
    let beats = Beats { every: Duration::from_millis(1), lost_after: LONG };
    let worker =
        WorkerRelay::connect(&address.to_string(), port, identity, 4, SHARE * 4, LONG, beats).unwrap();
    let mut socket = listener.accept().unwrap().0;
    socket.set_read_timeout(Some(LONG)).unwrap();
    socket.read_exact(&mut [0; super::super::handshake::HELLO]).unwrap();
    let port = worker.port().unwrap();
    (worker, port, socket)
}

/// The next result.
fn result_of(socket: &mut TcpStream) -> (Header, Vec<u8>) {
    loop {
        let (header, content) = frame(socket);
        if header.kind != FrameKind::Beat {
            return (header, content);
        }
    }
}

/// Answers a task, and sends ahead what goes. Returns how many bytes did, `None` if the batch was not begun.
fn answer_ahead(ahead: &Ahead, port: &Port, seq: u64, bytes: &[u8]) -> Option<usize> {
    let len = bytes.len() as u64;
    let mut commit = port.begin_commit();
    while !matches!(commit.reserve(len).unwrap(), Room::Ready) {
        port.wait_for_room().unwrap();
    }
    let answer = Answer { seq, kind: ResultKind::Batch, len, meta: (0, 8), generation: commit.generation() };
    let begun = ahead.begin(commit.committed(), &answer);
    let sent = begun.map(|mut begun| begun.send_bytes(bytes));
    if sent.is_some() {
        std::thread::sleep(Duration::from_millis(3));
    }
    // Bytes that have gone are not in the slot.
    commit.copy_in(0, &vec![0xEE; sent.unwrap_or(0)], None).unwrap();
    commit.copy_in(sent.unwrap_or(0) as u64, &bytes[sent.unwrap_or(0)..], None).unwrap();
    while !commit.finish(seq, ResultKind::Batch, 0..8, len, false).unwrap() {
        port.wait_for_room().unwrap();
    }
    sent
}

/// As [`answer_ahead`], once what was committed before has gone.
fn answer_begun(ahead: &Ahead, port: &Port, seq: u64, bytes: &[u8]) -> usize {
    let until = Instant::now() + LONG;
    while port.untaken().unwrap() > 0 {
        assert!(Instant::now() < until, "nothing is sent");
        std::thread::yield_now();
    }
    // The last one may still be on its way.
    std::thread::sleep(Duration::from_millis(20));
    answer_ahead(ahead, port, seq, bytes).expect("all before was sent")
}

#[test]
fn a_batch_goes_from_the_workers_memory_as_far_as_the_connection_takes_it() {
    let engine = Engine::new(1, 4, 4 * SHARE).unwrap();
    let main = relay(&engine, None, Beats::default());
    let number = main.expect(&engine, 0, None).unwrap();
    let identity = Identity { token: TOKEN, worker: 0, number };
    let (host, port) = (main.address().ip().to_string(), main.address().port());
    std::thread::scope(|scope| {
        let sent = scope.spawn(|| {
            let worker =
                WorkerRelay::connect(&host, port, identity, 4, SHARE * 4, LONG, Beats::default()).unwrap();
            let (port, ahead) = (worker.port().unwrap(), worker.ahead());
            let mut sent = Vec::new();
            loop {
                let Task { seq, kind, .. } = take(&port);
                match kind {
                    TaskKind::End => break,
                    // Some at once, which are sent from their slots if the one before is not gone.
                    _ if seq % 3 == 2 => sent.extend(answer_ahead(&ahead, &port, seq, &pattern(seq, LEN))),
                    _ => sent.push(answer_begun(&ahead, &port, seq, &pattern(seq, LEN))),
                }
            }
            worker.finish();
            assert!(!worker.is_lost());
            sent
        });
        for seq in 0..12 {
            engine.put_task(0, task(seq)).unwrap();
            if seq % 3 == 2 {
                for seq in seq - 2..=seq {
                    let received = next(&engine);
                    assert_eq!((received.seq, received.generation), (seq, seq + 1));
                    assert!(bytes_of(&received) == pattern(seq, LEN), "batch {seq}");
                }
            }
        }
        engine.put_task(0, Task { seq: 0, kind: TaskKind::End, bytes: vec![] }).unwrap();
        let sent = sent.join().unwrap();
        assert!(sent.len() >= 8 && sent.iter().sum::<usize>() > LEN, "{sent:?}");
    });
}

#[test]
fn a_connection_that_takes_nothing_does_not_keep_the_worker() {
    let (worker, port, mut socket) = worker_of(Ipv4Addr::LOCALHOST);
    let (ahead, began) = (worker.ahead(), Instant::now());
    let sent = answer_begun(&ahead, &port, 0, &pattern(0, LEN));
    assert!(0 < sent && sent < LEN, "{sent}");
    assert!(began.elapsed() < Duration::from_secs(10));
    // The rest of that batch is not sent yet.
    assert_eq!(answer_ahead(&ahead, &port, 1, &pattern(1, LEN)), None);
    for seq in 0..2 {
        let (header, content) = result_of(&mut socket);
        assert_eq!((header.kind, header.seq, header.at), (FrameKind::Result, seq, [0, 8, seq + 1]));
        assert!(content == pattern(seq, LEN), "batch {seq}");
    }
}

#[test]
fn frames_come_in_the_order_of_their_commits() {
    let (worker, port, mut socket) = worker_of(Ipv4Addr::LOCALHOST);
    let sent = std::thread::scope(|scope| {
        let sent = scope.spawn(|| {
            let small = |seq| answer(&port, seq, 100);
            let ahead = worker.ahead();
            let large = |seq| answer_ahead(&ahead, &port, seq, &pattern(seq, 100_000)).is_some();
            (0..900)
                .filter(|&seq| {
                    if seq % 3 == 0 {
                        small(seq);
                        false
                    } else {
                        large(seq)
                    }
                })
                .count()
        });
        for seq in 0..900 {
            let (header, content) = result_of(&mut socket);
            assert_eq!((header.seq, header.at[2]), (seq, seq + 1));
            assert!(content == pattern(seq, content.len()), "batch {seq}");
        }
        sent.join().unwrap()
    });
    assert!(0 < sent && sent < 600, "{sent}");
}

#[test]
fn a_batch_that_was_begun_and_is_not_the_next_ends_the_connection() {
    let (worker, port, mut socket) = worker_of(Ipv4Addr::LOCALHOST);
    let bytes = pattern(0, LEN);
    let answer = Answer { seq: 0, kind: ResultKind::Batch, len: LEN as u64, meta: (0, 8), generation: 99 };
    let mut begun = worker.ahead().begin(0, &answer).unwrap();
    assert_eq!(begun.send_bytes(&bytes[..1000]), 1000);
    drop(begun);
    assert!(worker.ahead().begin(0, &answer).is_none(), "one at a time");
    super::answer(&port, 0, 500);
    let mut came = Vec::new();
    socket.read_to_end(&mut came).unwrap();
    assert!(came.ends_with(&bytes[..1000]), "nothing follows it");
    assert!(worker.is_lost());
}

#[test]
fn to_another_machine_batches_go_from_their_slots() {
    // The worker's own address is another one.
    let (worker, port, mut socket) = worker_of(Ipv4Addr::new(127, 0, 0, 2));
    assert_eq!(answer_ahead(&worker.ahead(), &port, 0, &pattern(0, 1000)), None);
    assert!(result_of(&mut socket).1 == pattern(0, 1000));
}
