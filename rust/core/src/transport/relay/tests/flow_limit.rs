//! The limit on batches that are out.

use super::*;

#[test]
fn tasks_are_sent_in_order_within_the_window() {
    let engine = Engine::new(2, 8, SHARE).unwrap();
    let main = relay(&engine, Some(1000), Beats::default());
    let numbers = [0, 1].map(|worker| main.expect(&engine, worker, None).unwrap());
    for seq in 0..8 {
        engine.put((seq % 2) as u32, task(seq)).unwrap();
    }
    let mut sockets = [0, 1]
        .map(|worker| hello_of(&main, Identity { token: TOKEN, worker, number: numbers[worker as usize] }));
    // One for each until the first has come.
    for (seq, socket) in sockets.iter_mut().enumerate() {
        assert_eq!(frame(socket).0.seq.get(), seq as u64);
    }
    let is_empty = |socket: &mut TcpStream| {
        socket.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
        let is_empty = socket.read(&mut [0; 1]).is_err();
        socket.set_read_timeout(Some(LONG)).unwrap();
        is_empty
    };
    assert!(sockets.iter_mut().all(is_empty));
    let [first, second] = &mut sockets;
    // Two batches of 400 bytes, of which one is here and one is made: there is no room for a third.
    send(second, 1, 400);
    let there = |worker| {
        while engine.there_of(worker).unwrap() == 0 {
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    there(1);
    assert!(is_empty(first) && is_empty(second));
    send(first, 0, 400);
    there(0);
    assert!(is_empty(first) && is_empty(second));
    assert_eq!(engine.try_next_of(0).unwrap().unwrap().seq, 0);
    assert_eq!(frame(first).0.seq.get(), 2, "the first that was not sent");
    assert!(is_empty(first) && is_empty(second));
    drop(main);
    assert_eq!(first.read(&mut [0; 1]).unwrap(), 0, "the relay has closed it");
}

#[test]
fn a_worker_whose_part_has_ended_holds_up_no_other() {
    let engine = Engine::new(2, 8, SHARE).unwrap();
    let main = relay(&engine, Some(1), Beats::default());
    let numbers = [0, 1].map(|worker| main.expect(&engine, worker, None).unwrap());
    let mut sockets = [0, 1]
        .map(|worker| hello_of(&main, Identity { token: TOKEN, worker, number: numbers[worker as usize] }));
    for seq in 0..6 {
        engine.put((seq % 2) as u32, task(seq)).unwrap();
    }
    let [first, second] = &mut sockets;
    let answer = |socket: &mut TcpStream, seq, ends_part| {
        socket.write_all(FrameHeader { ends_part, ..result(seq, 100) }.as_bytes()).unwrap();
        socket.write_all(&pattern(seq, 100)).unwrap();
        assert_eq!(next(&engine).seq, seq);
    };
    assert_eq!((frame(first).0.seq.get(), frame(second).0.seq.get()), (0, 1));
    answer(first, 0, true);
    // Tasks that it does not answer count no more.
    engine.put(0, task(6)).unwrap();
    assert_eq!([2, 4, 6].map(|_| frame(first).0.seq.get()), [2, 4, 6]);
    answer(second, 1, false);
    assert_eq!(frame(second).0.seq.get(), 3);
    answer(second, 3, false);
    assert_eq!(frame(second).0.seq.get(), 5);
    answer(second, 5, false);
    engine.put(0, Task { seq: 0, kind: TaskKind::Object, bytes: vec![1] }).unwrap();
    engine.put(0, task(8)).unwrap();
    assert_eq!(frame(first).0.of, TaskKind::Object as u8);
    assert_eq!(frame(first).0.seq.get(), 8, "another epoch");
}

#[test]
fn the_end_of_a_part_concerns_no_task_of_the_next_epoch() {
    let engine = Engine::new(1, 8, SHARE).unwrap();
    let main = relay(&engine, None, Beats::default());
    let number = main.expect(&engine, 0, None).unwrap();
    let mut socket = hello(&main, TOKEN, number);
    engine.put(0, task(0)).unwrap();
    engine.put(0, Task { seq: 0, kind: TaskKind::Object, bytes: vec![1] }).unwrap();
    assert_eq!(frame(&mut socket).0.seq.get(), 0);
    assert_eq!(frame(&mut socket).0.of, TaskKind::Object as u8);
    // The answer comes after the next epoch was begun.
    socket.write_all(FrameHeader { ends_part: true, ..result(0, 100) }.as_bytes()).unwrap();
    socket.write_all(&pattern(0, 100)).unwrap();
    assert_eq!(next(&engine).seq, 0);
    engine.put(0, task(8)).unwrap();
    assert_eq!(frame(&mut socket).0.seq.get(), 8);
}
