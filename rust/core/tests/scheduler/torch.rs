//! The scheduler against torch's iterator: which worker is asked for what, which batch comes out when, and
//! torch's counters, over epochs that are left half-way and workers that end.

use std::ops::ControlFlow;

use proptest::prelude::*;
use ringloader_core::plan::ResultOrder;
use ringloader_core::scheduler::{EPOCH_SHIFT, Poll};

use crate::cases::{Event, event, lengths, order, schedule, script};
use crate::double::Double;
use crate::fleet::{Backend, Fleet};
use crate::queues::ThreadQueues;
use crate::rings::Rings;
use crate::torch_iterator::{Answer, Indices, TorchIterator, Workers};

/// A worker's answer when its part of an iterable dataset has ended.
const STOP: i64 = -1;

/// A worker as its port sees it: it does all tasks in their order, those of abandoned epochs too.
#[derive(Clone)]
struct Process {
    length: Option<u32>,
    left: Option<u32>,
    ended: bool,
    epoch: u64,
    dead: bool,
    /// Batches of this epoch that it has committed and that were not taken.
    committed: usize,
}

/// The scheduler's steps up to the next result.
enum Did {
    /// `next` returns this: a batch, or none at the end.
    Next(Option<(u64, u32)>),
    /// A result came that `next` does not return.
    GoOn,
    Lost(u32),
}

struct Native<B> {
    fleet: Fleet<B>,
    order: ResultOrder,
    /// Says which worker is next, and what it answers.
    workers: Workers,
    processes: Vec<Process>,
    indices: Indices,
    epoch: u64,
    max_tasks: u32,
    log: Vec<(u64, u32)>,
    /// Work that other workers do in order while one is awaited.
    eagerness: Vec<u8>,
    waits: usize,
}

impl<B: Backend> Native<B> {
    fn new(
        order: ResultOrder,
        prefetch_factor: u32,
        (lengths, workers): (&[Option<u32>], Workers),
        indices: Indices,
        eagerness: Vec<u8>,
    ) -> Self {
        let process = |&length: &Option<u32>| Process {
            length,
            left: length,
            ended: false,
            epoch: 0,
            dead: false,
            committed: 0,
        };
        let count = lengths.len() as u32;
        let mut native = Self {
            fleet: Fleet::new(count, prefetch_factor, order),
            order,
            workers,
            processes: lengths.iter().map(process).collect(),
            indices,
            epoch: 0,
            max_tasks: count * prefetch_factor,
            log: Vec::new(),
            eagerness,
            waits: 0,
        };
        native.prime();
        native
    }

    fn prime(&mut self) {
        (0..self.max_tasks).for_each(|_| self.put());
    }

    fn reset(&mut self) {
        self.fleet.scheduler.reset();
        self.epoch += 1;
        self.processes.iter_mut().for_each(|process| process.committed = 0);
        self.workers.resume();
        self.prime();
    }

    fn put(&mut self) {
        if !self.indices.next() {
            return;
        }
        let (seq, ..) = self.fleet.scheduler.positions();
        if let Some(worker) = self.fleet.send() {
            self.workers.put(worker, seq);
            self.log.push((seq, worker));
        }
    }

    /// A worker does its tasks until it has committed one of this epoch. `false`: it has none.
    fn work(&mut self, worker: u32) -> bool {
        let process = &mut self.processes[worker as usize];
        if process.dead {
            return false;
        }
        while let Some(seq) = self.fleet.backend.take_task(worker) {
            if seq >> EPOCH_SHIFT != process.epoch {
                (process.epoch, process.left, process.ended) = (seq >> EPOCH_SHIFT, process.length, false);
            }
            if process.ended {
                continue;
            }
            let content = (seq & ((1 << EPOCH_SHIFT) - 1)) as i64;
            process.ended = process.left == Some(0);
            process.left = process.left.map(|left| left.saturating_sub(1));
            self.fleet.backend.commit(worker, seq, if process.ended { STOP } else { content });
            if process.epoch == self.epoch {
                process.committed += 1;
                return true;
            }
        }
        false
    }

    fn kill(&mut self, worker: u32) {
        let process = &mut self.processes[worker as usize];
        if !std::mem::replace(&mut process.dead, true) {
            self.workers.kill(worker, process.committed);
            self.fleet.backend.end(worker);
        }
    }

    fn hand_out(&mut self, seq: u64, worker: u32) -> Did {
        self.fleet.scheduler.record_delivered(worker);
        self.put();
        Did::Next(Some((seq, worker)))
    }

    fn step(&mut self) -> Did {
        let mut expected = None;
        loop {
            match self.fleet.poll() {
                Poll::End => return Did::Next(None),
                Poll::Ready { worker, data, .. } => return self.hand_out(data, worker),
                Poll::Lost { worker } => {
                    self.fleet.scheduler.give_up(worker);
                    return Did::Lost(worker);
                }
                Poll::Wait { worker: Some(worker), .. } => {
                    assert_eq!(self.order, ResultOrder::InOrder);
                    // The others' results wait in their rings.
                    let eager = *self.eagerness.get(self.waits % self.eagerness.len()).unwrap();
                    (0..self.processes.len() as u32).filter(|other| eager >> (other % 8) & 1 == 1).for_each(
                        |other| {
                            self.work(other);
                        },
                    );
                    self.waits += 1;
                    assert!(self.processes[worker as usize].committed > 0 || self.work(worker), "for ever");
                }
                Poll::Wait { worker: None, .. } => {
                    let (seq, answer) = self.workers.get();
                    let worker = self.log.iter().rev().find(|(sent, _)| *sent == seq).unwrap().1;
                    // Tasks that found the ring full are sent by the next poll.
                    let has_task = self.work(worker) || {
                        assert!(matches!(self.fleet.poll(), Poll::Wait { .. }));
                        self.work(worker)
                    };
                    assert!(has_task, "worker {worker} has no task {seq}");
                    expected = Some((seq, answer));
                }
                Poll::Failed { seq, error } => panic!("task {seq}: {error}"),
                Poll::Early { seq, .. } => panic!("task {seq} of an epoch that was not begun"),
                Poll::Arrived { seq, received } => {
                    let (worker, content) = B::read(&received);
                    self.processes[worker as usize].committed -= 1;
                    let expected = expected.unwrap_or_else(|| self.workers.get_of(worker as usize));
                    if content == STOP {
                        assert_eq!(expected, (seq, Answer::Stop));
                        assert_eq!(self.fleet.scheduler.end_worker(seq), Ok(worker));
                        self.put();
                        return Did::GoOn;
                    }
                    assert_eq!((content, expected), (seq as i64, (seq, Answer::Batch)));
                    return match self.fleet.scheduler.accept(seq, seq).unwrap() {
                        Some((worker, data)) => self.hand_out(data, worker),
                        None => Did::GoOn,
                    };
                }
            }
        }
    }
}

fn assert_equal<B: Backend>(ours: &Native<B>, torch: &TorchIterator) {
    assert_eq!(ours.log, torch.workers.log);
    assert_eq!(ours.indices.calls, torch.indices.calls);
    let positions = (torch.send_idx, torch.rcvd_idx, torch.tasks_outstanding);
    assert_eq!(ours.fleet.scheduler.positions(), positions);
}

#[derive(Debug)]
struct Case {
    order: ResultOrder,
    prefetch_factor: u32,
    lengths: Vec<Option<u32>>,
    script: Vec<bool>,
    schedule: Vec<u8>,
    eagerness: Vec<u8>,
    events: Vec<Event>,
}

fn case() -> impl Strategy<Value = Case> {
    let eagerness = prop::collection::vec(any::<u8>(), 1..20);
    let events = prop::collection::vec(event(), 1..200);
    (order(), 1..5_u32, lengths(), script(), schedule(), eagerness, events).prop_map(
        |(order, prefetch_factor, lengths, script, schedule, eagerness, events)| Case {
            order,
            prefetch_factor,
            lengths,
            script,
            schedule,
            eagerness,
            events,
        },
    )
}

fn does_what_torch_does<B: Backend>(case: Case) -> Result<(), TestCaseError> {
    let Case { order, prefetch_factor, lengths, script, schedule, eagerness, events } = case;
    let workers = Workers::new(lengths.clone(), schedule);
    let indices = Indices { script, calls: 0 };
    let mut torch = TorchIterator::new(order, prefetch_factor, workers.clone(), indices.clone());
    torch.arrive_in_order = true;
    let mut ours = Native::<B>::new(order, prefetch_factor, (&lengths, workers), indices, eagerness);
    assert_equal(&ours, &torch);
    for event in events {
        match event {
            Event::Next => loop {
                match ours.step() {
                    Did::Next(next) => {
                        prop_assert_eq!(ControlFlow::Break(next), torch.step());
                        break;
                    }
                    Did::GoOn => prop_assert_eq!(ControlFlow::Continue(()), torch.step()),
                    Did::Lost(worker) => {
                        let process = &ours.processes[worker as usize];
                        prop_assert!(process.dead && process.committed == 0);
                        prop_assert!(torch.workers_status[worker as usize], "told once in an epoch");
                        prop_assert!(torch.workers_num_tasks[worker as usize] > 0, "nothing is missing");
                        torch.workers_status[worker as usize] = false;
                        continue;
                    }
                }
                assert_equal(&ours, &torch);
            },
            Event::Reset => {
                ours.reset();
                torch.reset();
            }
            Event::Kill(worker) => {
                let worker = u32::from(worker) % lengths.len() as u32;
                torch.workers.kill(worker, ours.processes[worker as usize].committed);
                ours.kill(worker);
            }
        }
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn does_what_torch_does_over_rings(case in case()) {
        does_what_torch_does::<Rings>(case)?;
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn does_what_torch_does_over_double(case in case()) {
        does_what_torch_does::<Double>(case)?;
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn does_what_torch_does_over_queues(case in case()) {
        does_what_torch_does::<ThreadQueues>(case)?;
    }
}
