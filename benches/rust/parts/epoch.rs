//! Worker selector and reorder buffer over an epoch.

use std::collections::VecDeque;

use ringloader_core::plan::{Next, ReorderBuffer, ResultOrder, WorkerSelector};

/// An epoch without end whose workers answer at once, but not in order.
pub(crate) struct Epoch {
    selector: WorkerSelector,
    pub(crate) tasks: ReorderBuffer<u64>,
    /// Tasks under way. The youngest but one arrives first, so that results wait in the buffer.
    pub(crate) under_way: VecDeque<u64>,
    in_order: bool,
}

impl Epoch {
    pub(crate) fn new(workers: u32, order: ResultOrder) -> Self {
        let mut this = Self {
            selector: WorkerSelector::new(workers, 2, order),
            tasks: ReorderBuffer::new(),
            under_way: VecDeque::new(),
            in_order: order == ResultOrder::InOrder,
        };
        (0..this.selector.max_tasks()).for_each(|_| this.put());
        this
    }

    fn put(&mut self) {
        let worker = self.selector.choose().expect("a worker with room");
        let seq = self.tasks.send(worker);
        self.selector.record_sent(worker);
        self.under_way.push_back(seq);
    }

    /// One batch: its task's number.
    pub(crate) fn step(&mut self) -> u64 {
        loop {
            let (seq, worker) = match self.tasks.next(|worker| self.selector.is_active(worker)) {
                Next::Ready { seq, worker, .. } => (seq, worker),
                Next::End => panic!("the epoch has no end"),
                Next::Wait { .. } => {
                    let index = usize::from(self.under_way.len() > 1);
                    let seq = self.under_way.remove(index).expect("a task under way");
                    if self.in_order {
                        self.tasks.arrive(seq, seq).expect("a task under way");
                        continue;
                    }
                    (seq, self.tasks.take(seq).expect("a task under way"))
                }
            };
            self.selector.record_delivered(worker);
            self.put();
            return seq;
        }
    }
}
