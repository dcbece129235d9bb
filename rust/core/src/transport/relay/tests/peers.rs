//! Peers that know the secret, and send what no worker sends, or nothing.

use std::net::TcpListener;

use super::*;
use crate::sync::{AtomicBool, Ordering};

/// Beats that the two ends of a test give each other.
const BEATS: Beats = Beats { every: Duration::from_millis(20), lost_after: Duration::from_millis(600) };

/// A relay with a connected peer for each worker.
fn connected(engine: &Engine, workers: u32) -> (MainRelay, Vec<TcpStream>) {
    let main = relay(engine, None, Beats::default());
    let peers = (0..workers).map(|worker| {
        let number = main.expect(engine, worker, None).unwrap();
        hello_of(&main, Identity { token: TOKEN, worker, number })
    });
    let peers = peers.collect();
    (main, peers)
}

fn next_of(engine: &Engine, worker: u32) -> Received {
    let until = Instant::now() + LONG;
    loop {
        if let Some(received) = engine.try_next_of(worker).unwrap() {
            return received;
        }
        assert!(Instant::now() < until, "nothing has come");
        engine.wait_for(Some(worker), Duration::from_millis(10)).unwrap();
    }
}

#[test]
fn beats_without_end_cost_no_other_worker_anything() {
    let engine = Engine::new(2, 4, SHARE).unwrap();
    let (_main, mut peers) = connected(&engine, 2);
    let mut right = peers.pop().unwrap();
    let beating = peers.pop().unwrap();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let beats = FrameHeader::new(FrameKind::Beat).as_bytes().repeat(4096);
            while !is_over.load(Ordering::Relaxed) {
                (&beating).write_all(&beats).unwrap();
            }
        });
        for seq in 0..20 {
            send(&mut right, seq, 500);
            assert_eq!(bytes_of(&next_of(&engine, 1)), pattern(seq, 500));
            std::thread::sleep(Duration::from_millis(20));
        }
        is_over.store(true, Ordering::Relaxed);
    });
    // A question for each of them would take memory, as nobody reads it.
    beating.set_nonblocking(true).unwrap();
    let mut came = Vec::new();
    let _ = (&beating).read_to_end(&mut came);
    assert!(came.len() <= 20 * HEADER, "{} questions", came.len() / HEADER);
}

#[test]
fn a_worker_is_sent_tasks_in_the_middle_of_its_batch() {
    let engine = Engine::new(1, 4, SHARE).unwrap();
    let main = relay(&engine, None, Beats { lost_after: LONG, ..BEATS });
    let number = main.expect(&engine, 0, None).unwrap();
    let mut socket = hello(&main, TOKEN, number);
    socket.write_all(result(0, 500).as_bytes()).unwrap();
    socket.write_all(&pattern(0, 500)[..100]).unwrap();
    for seq in 1..4 {
        engine.put(0, task(seq)).unwrap();
        assert_eq!(frame(&mut socket).0.seq.get(), seq);
    }
    socket.write_all(&pattern(0, 500)[100..]).unwrap();
    assert_eq!(bytes_of(&next(&engine)), pattern(0, 500));
}

#[test]
fn what_no_worker_sends_is_the_workers_fault() {
    let beat = FrameHeader::new(FrameKind::Beat);
    let table = |at: u64, len: u64| FrameHeader { at: [at, len, 1].map(Into::into), ..result(0, 500) };
    let cases = [
        (FrameHeader { of: ResultKind::Batch as u8, len: 5.into(), ..beat }, "a Beat of 5 bytes"),
        (result(0, 0), "a result of 0 bytes"),
        (result(0, LONGEST_BATCH), "a result of 1099511627776 bytes"),
        (result(0, 1 << 50), "a result of 1125899906842624 bytes"),
        (result(0, u64::MAX), "a result of 18446744073709551615 bytes"),
        (FrameHeader { of: 9, ..result(0, 500) }, "a result of kind 9"),
        (table(493, 8), "a table outside of its batch"),
        (table(u64::MAX, 8), "a table outside of its batch"),
        (FrameHeader::new(FrameKind::Ping), "a Ping of 0 bytes"),
    ];
    for (header, expected) in cases {
        let engine = Engine::new(1, 4, SHARE).unwrap();
        let (main, mut peers) = connected(&engine, 1);
        peers[0].write_all(header.as_bytes()).unwrap();
        assert_eq!(ended(&engine), 0);
        let why = main.why_lost(0).unwrap();
        assert!(why.starts_with("it has sent ") && why.contains(expected), "{why}");
        assert_eq!(main.failure(0), None, "{why}");
    }
    let engine = Engine::new(1, 4, SHARE).unwrap();
    let (main, mut peers) = connected(&engine, 1);
    peers[0].write_all(&[7; HEADER]).unwrap();
    assert_eq!(ended(&engine), 0);
    assert!(main.why_lost(0).unwrap().contains("begins no frame"));
    assert_eq!(main.failure(0), None);
}

#[test]
fn counts_may_be_any_numbers() {
    let engine = Engine::new(1, 4, SHARE).unwrap();
    let (main, mut peers) = connected(&engine, 1);
    let counts = [u64::MAX; 5].map(Into::into);
    peers[0].write_all(FrameHeader { counts, ..result(0, 500) }.as_bytes()).unwrap();
    peers[0].write_all(&pattern(0, 500)).unwrap();
    assert_eq!(next(&engine).seq, 0);
    drop(peers);
    assert_eq!(ended(&engine), 0);
    let busy = engine.succeed(0).unwrap();
    let number = main.expect(&engine, 0, Some(&busy)).unwrap();
    let mut successor = hello(&main, TOKEN, number);
    send(&mut successor, 1, 500);
    assert_eq!(next(&engine).seq, 1);
}

#[test]
fn a_worker_ends_when_its_main_process_is_silent() {
    // As of a machine that has lost its power: nothing is read, and nothing ends the connection.
    for len in [500, 16 << 20] {
        let listener = TcpListener::bind((HOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let _silent = std::thread::spawn(move || {
            let mut socket = listener.accept().unwrap().0;
            socket.write_all(&[1; CHALLENGE]).unwrap();
            socket
        });
        let identity = Identity { token: TOKEN, worker: 0, number: 1 };
        let worker =
            WorkerRelay::connect(&HOST.to_string(), port, identity, 4, 8 * SHARE, LONG, BEATS).unwrap();
        answer(&worker.port().unwrap(), 0, len);
        let began = Instant::now();
        while !worker.is_lost() {
            assert!(began.elapsed() < LONG, "it waits for ever");
            std::thread::sleep(Duration::from_millis(5));
        }
        // Its threads end, also the one that waits for the connection to take the batch.
        worker.finish();
    }
}

#[test]
fn a_main_process_without_room_is_not_silent() {
    let engine = Engine::new(1, 8, SHARE).unwrap();
    let main = relay(&engine, None, BEATS);
    let number = main.expect(&engine, 0, None).unwrap();
    let identity = Identity { token: TOKEN, worker: 0, number };
    let (host, port) = (main.address().ip().to_string(), main.address().port());
    let worker = WorkerRelay::connect(&host, port, identity, 8, 4 * SHARE, LONG, BEATS).unwrap();
    let port = worker.port().unwrap();
    for seq in 0..8 {
        engine.put(0, task(seq)).unwrap();
    }
    for seq in 0..8 {
        assert_eq!(take(&port).seq, seq);
        answer(&port, seq, 1 << 20);
    }
    std::thread::sleep(3 * BEATS.lost_after);
    assert!(!worker.is_lost() && main.why_lost(0).is_none());
    for seq in 0..8 {
        assert!(bytes_of(&next(&engine)) == pattern(seq, 1 << 20), "batch {seq}");
    }
}

/// Numbers for a fuzzer.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed ^ mixed >> 31
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    /// A number as a garbled header has one.
    fn number(&mut self) -> u64 {
        let edges = [0, 1, 8, 96, 500, 1 << 20, 5 << 20, 1 << 39, LONGEST_BATCH, 1 << 63, u64::MAX];
        match self.below(4) {
            0 => self.next(),
            1 => self.below(3000),
            _ => edges[self.below(edges.len() as u64) as usize],
        }
    }

    /// The frames that a peer sends: frames as a worker's, and others.
    fn script(&mut self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for seq in 0..self.below(12) {
            match self.below(6) {
                0 => {
                    let beats = self.below(3000) as usize;
                    bytes.extend(FrameHeader::new(FrameKind::Beat).as_bytes().repeat(beats));
                }
                1 => {
                    let at = [0; 3].map(|_| self.number());
                    bytes.extend(FrameHeader::with_moments(FrameKind::Beat, at).as_bytes());
                }
                2 => {
                    let kinds = [FrameKind::Result, FrameKind::Result, FrameKind::Beat, FrameKind::Task];
                    let header = FrameHeader {
                        ends_part: self.below(2) == 1,
                        of: self.below(4) as u8,
                        seq: self.number().into(),
                        len: self.number().into(),
                        counts: [0; 5].map(|_| self.number().into()),
                        ..FrameHeader::with_moments(
                            kinds[self.below(4) as usize],
                            [0; 3].map(|_| self.number()),
                        )
                    };
                    bytes.extend(header.as_bytes());
                }
                3 => {
                    let len = self.below(300);
                    bytes.extend((0..len).map(|_| self.next() as u8));
                }
                _ => {
                    let len = 8 + self.below(40_000);
                    let header = FrameHeader { ends_part: self.below(8) == 0, ..result(seq, len) };
                    bytes.extend(header.as_bytes());
                    bytes.extend(pattern(seq, len as usize));
                }
            }
        }
        bytes.truncate(bytes.len() - self.below(200).min(bytes.len() as u64) as usize);
        bytes
    }
}

/// `RINGLOADER_TEST_SEED` gives other numbers.
#[test]
fn whatever_peers_send_the_batches_of_another_come() {
    let seed = std::env::var("RINGLOADER_TEST_SEED").ok().and_then(|seed| seed.parse().ok());
    let mut random = Random(seed.unwrap_or(1));
    let until = Instant::now() + Duration::from_secs(2);
    while Instant::now() < until {
        let engine = Engine::new(4, 4, SHARE).unwrap();
        let (main, mut peers) = connected(&engine, 4);
        let mut right = peers.remove(0);
        let scripts: Vec<_> = peers.iter().map(|_| (random.script(), random.below(2) == 1)).collect();
        std::thread::scope(|scope| {
            for (mut peer, (script, stays)) in peers.into_iter().zip(scripts) {
                scope.spawn(move || {
                    let _ = peer.write_all(&script);
                    stays.then_some(peer)
                });
            }
            for seq in 0..10 {
                let len = 8 + random.below(100_000) as usize;
                send(&mut right, seq, len);
                let received = next_of(&engine, 0);
                assert!((received.seq, bytes_of(&received)) == (seq, pattern(seq, len)), "batch {seq}");
                for worker in 1..4 {
                    while let Ok(Some(_)) = engine.try_next_of(worker) {}
                }
            }
            assert_eq!(main.why_lost(0), None);
            // The writers end, whatever is left of their scripts.
            drop(main);
        });
    }
}
