//! Worker selector and reorder buffer, composed as an engine does it, against torch's iterator: which worker gets which
//! task, which batch comes out when, and every counter after each request.

use std::ops::ControlFlow;

use proptest::prelude::*;
use ringloader_core::plan::{Next, ReorderBuffer, ResultOrder, WorkerSelector};

use crate::cases::{Event, event, lengths, order, schedule, script};
use crate::torch_iterator::{Answer, Indices, TorchIterator, Workers};

struct Plan {
    order: ResultOrder,
    workers: Workers,
    indices: Indices,
    selector: WorkerSelector,
    tasks: ReorderBuffer<u64>,
}

impl Plan {
    fn new(order: ResultOrder, prefetch_factor: u32, workers: Workers, indices: Indices, count: u32) -> Self {
        let selector = WorkerSelector::new(count, prefetch_factor, order);
        let mut this = Self { order, workers, indices, selector, tasks: ReorderBuffer::new() };
        this.prime();
        this
    }

    fn prime(&mut self) {
        (0..self.selector.max_tasks()).for_each(|_| self.put());
    }

    fn reset(&mut self) {
        self.selector.reset();
        self.tasks.reset();
        self.workers.resume();
        self.prime();
    }

    fn put(&mut self) {
        if !self.indices.next() {
            return;
        }
        let Some(worker) = self.selector.choose() else { return };
        let seq = self.tasks.send(worker);
        self.selector.record_sent(worker);
        self.workers.put(worker, seq);
    }

    fn deliver(&mut self, seq: u64, worker: u32) -> Option<(u64, u32)> {
        self.selector.record_delivered(worker);
        self.put();
        Some((seq, worker))
    }

    fn next(&mut self) -> Option<(u64, u32)> {
        loop {
            match self.tasks.next(|worker| self.selector.is_active(worker)) {
                Next::End => return None,
                Next::Ready { seq, worker, data } => {
                    assert_eq!(data, seq * 7);
                    return self.deliver(seq, worker);
                }
                Next::Wait { worker, .. } => assert!(self.selector.is_active(worker)),
            }
            match self.workers.get() {
                (seq, Answer::Stop) => {
                    let worker = self.tasks.record_end(seq).expect("a task under way");
                    self.selector.deactivate(worker);
                    self.put();
                }
                (seq, Answer::Batch) if self.order == ResultOrder::InOrder => {
                    self.tasks.arrive(seq, seq * 7).expect("a task under way");
                }
                (seq, Answer::Batch) => {
                    let worker = self.tasks.take(seq).expect("a task under way");
                    return self.deliver(seq, worker);
                }
            }
        }
    }
}

fn next_data(torch: &mut TorchIterator) -> Option<(u64, u32)> {
    loop {
        if let ControlFlow::Break(next) = torch.step() {
            return next;
        }
    }
}

fn assert_equal(ours: &Plan, torch: &TorchIterator) {
    assert_eq!(ours.workers.log, torch.workers.log);
    assert_eq!(ours.indices.calls, torch.indices.calls);
    assert_eq!(ours.tasks.outstanding(), torch.tasks_outstanding);
    assert_eq!((ours.tasks.rcvd_idx(), ours.tasks.send_idx()), (torch.rcvd_idx, torch.send_idx));
    let workers = 0..torch.workers_status.len() as u32;
    let status: Vec<bool> = workers.clone().map(|worker| ours.selector.is_active(worker)).collect();
    assert_eq!(status, torch.workers_status);
    let tasks: Vec<i64> = workers.map(|worker| ours.selector.outstanding(worker) as i64).collect();
    assert_eq!(tasks, torch.workers_num_tasks);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn decides_what_torch_decides(
        order in order(),
        prefetch_factor in 1..5_u32,
        lengths in lengths(),
        script in script(),
        schedule in schedule(),
        events in prop::collection::vec(event(), 1..200),
    ) {
        let count = lengths.len() as u32;
        let workers = Workers::new(lengths, schedule);
        let indices = Indices { script, calls: 0 };
        let mut torch = TorchIterator::new(order, prefetch_factor, workers.clone(), indices.clone());
        let mut ours = Plan::new(order, prefetch_factor, workers, indices, count);
        let mut dead = Vec::new();
        assert_equal(&ours, &torch);
        for event in events {
            match event {
                Event::Next => prop_assert_eq!(ours.next(), next_data(&mut torch)),
                Event::Reset => {
                    ours.reset();
                    torch.reset();
                    // Each of the dead is asked once more, and noticed once more.
                    for worker in dead.iter().copied() {
                        ours.selector.deactivate(worker);
                        torch.workers_status[worker as usize] = false;
                    }
                }
                Event::Kill(worker) => {
                    let worker = u32::from(worker) % count;
                    ours.workers.kill(worker, 0);
                    ours.selector.deactivate(worker);
                    torch.workers.kill(worker, 0);
                    torch.workers_status[worker as usize] = false;
                    dead.push(worker);
                }
            }
            assert_equal(&ours, &torch);
        }
    }

    /// An engine may take results out of its rings before torch would: a map-style epoch in order comes out the same.
    #[test]
    fn eager_arrivals_change_nothing_in_order(
        prefetch_factor in 1..5_u32,
        count in 1..9_u32,
        batches in 0..60_usize,
        schedule in schedule(),
        eagerness in prop::collection::vec(0..6_u8, 1..50),
    ) {
        let workers = Workers::new(vec![None; count as usize], schedule);
        let indices = Indices { script: vec![true; batches], calls: 0 };
        let mut torch = TorchIterator::new(ResultOrder::InOrder, prefetch_factor, workers.clone(), indices.clone());
        let mut ours = Plan::new(ResultOrder::InOrder, prefetch_factor, workers, indices, count);
        for eager in eagerness.iter().cycle().take(batches + 2) {
            for _ in 0..u64::from(*eager).min(ours.tasks.outstanding()) {
                let (seq, _) = ours.workers.get();
                ours.tasks.arrive(seq, seq * 7).expect("a task under way");
            }
            prop_assert_eq!(ours.next(), next_data(&mut torch));
            prop_assert_eq!(&ours.workers.log, &torch.workers.log);
        }
        prop_assert_eq!(ours.next(), None);
    }
}

#[test]
fn the_cycle_stands_still_over_a_round_without_a_worker() {
    let mut selector = WorkerSelector::new(3, 1, ResultOrder::AsCompleted);
    for expected in [0, 1, 2] {
        assert_eq!(selector.choose(), Some(expected));
        selector.record_sent(expected);
    }
    selector.record_delivered(1);
    assert_eq!(selector.choose(), Some(1));
    selector.record_sent(1);
    assert_eq!(selector.choose(), None);
    selector.record_delivered(0);
    selector.record_delivered(2);
    assert_eq!(selector.choose(), Some(2), "the cycle went once round and names worker 2");
}
