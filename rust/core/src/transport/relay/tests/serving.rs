//! The thread of the main process: several connections at once, and its end.

use std::net::TcpListener;
use std::sync::Condvar;

use super::*;
use crate::os::eventfd::EventFd;
use crate::sync::{Arc, Lock};
use crate::transport::relay::link::{Link, Reading};
use crate::transport::relay::serving::Serving;
use crate::transport::relay::shared::{Command, MainShared, MainState, Status};

/// A relay's thread that the test runs itself, with workers that have connected, and the workers' ends.
fn serving_of(engine: &Engine, workers: u32) -> (Serving, Vec<TcpStream>) {
    let listener = TcpListener::bind((HOST, 0)).unwrap();
    let state = MainState { workers: vec![Status::default(); workers as usize], ..MainState::default() };
    let shared =
        MainShared { state: Lock::new(state), changed: Condvar::new(), bell: EventFd::new().unwrap() };
    let mut peers = Vec::new();
    let links = (0..workers).map(|worker| {
        peers.push(TcpStream::connect(listener.local_addr().unwrap()).unwrap());
        let socket = listener.accept().unwrap().0;
        socket.set_nonblocking(true).unwrap();
        let fds = engine.inherited_fds(worker).unwrap();
        let port = Port::attach(engine.control().clone(), worker, engine.share(), fds, None).unwrap();
        let mut link = Link::new(1, Arc::new(port), EventFd::new().unwrap());
        link.connect(socket);
        link.flush().unwrap();
        Some(link)
    });
    let links: Vec<_> = links.collect();
    let control = engine.control().clone();
    let mut serving = Serving::new(Arc::new(shared), control, listener, TOKEN, None, Beats::default());
    serving.links = links;
    (serving, peers)
}

#[test]
fn each_connection_has_its_own_answer_whatever_the_others_have() {
    let engine = Engine::new(3, 4, SHARE).unwrap();
    for first in [Reading::Idle, Reading::Ready, Reading::More, Reading::Stalled] {
        let (mut serving, mut peers) = serving_of(&engine, 3);
        serving.links[0].as_mut().unwrap().reading = first;
        peers[2].write_all(FrameHeader::new(FrameKind::Beat).as_bytes()).unwrap();
        serving.sleep(false);
        let reading = |at: usize| serving.links[at].as_ref().unwrap().reading;
        assert_eq!([0, 1, 2].map(reading), [first, Reading::Idle, Reading::Ready]);
    }
}

#[test]
fn a_panic_ends_all_connections_with_its_text() {
    let engine = Engine::new(4, 4, SHARE).unwrap();
    let main = relay(&engine, None, Beats::default());
    let numbers = [0, 1].map(|worker| main.expect(&engine, worker, None).unwrap());
    let _connected = hello(&main, TOKEN, numbers[0]);
    assert_eq!(main.standing(0, numbers[0], LONG), Standing::Connected);
    let mut state = main.shared.state.lock();
    state.commands.push_back(Command::Lose { worker: 99, number: 1, why: String::new() });
    main.shared.bell.notify();
    drop(state);
    // It is told of this one after, or finds it closed.
    let number = main.expect(&engine, 2, None).unwrap();
    let mut lost = [ended(&engine), ended(&engine), ended(&engine)];
    lost.sort_unstable();
    assert_eq!(lost, [0, 1, 2]);
    let text = main.failure(0).unwrap();
    assert!(text.contains("has panicked: index out of bounds"), "{text}");
    assert_eq!(main.standing(1, numbers[1], LONG), Standing::Lost(text.clone()));
    assert_eq!(main.standing(2, number, LONG), Standing::Lost(text));
    // The engine waits for nobody who would never come.
    main.expect(&engine, 3, None).unwrap();
    assert_eq!(ended(&engine), 3);
    assert!(main.failure(3).is_some());
}
