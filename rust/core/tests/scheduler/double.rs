//! A transport without processes and shared memory: queues. What it does is what [`Transport`] promises, and no more.

use std::cell::RefCell;
use std::collections::VecDeque;

use ringloader_core::transport::Transport;
use ringloader_core::transport::message::ResultKind;
use ringloader_core::{Error, Result};

use crate::fleet::Backend;

#[derive(Debug)]
pub(crate) struct Batch {
    worker: u32,
    seq: u64,
    content: i64,
}

/// Something that a worker has committed.
enum Committed {
    Batch(Batch),
    Missing { seq: u64 },
    Nonsense,
}

#[derive(Default)]
struct Worker {
    tasks: VecDeque<u64>,
    results: VecDeque<Committed>,
}

#[derive(Default)]
struct State {
    workers: Vec<Worker>,
    ended: VecDeque<u32>,
    /// The worker at which the next look of all begins.
    turn: usize,
    closed: bool,
}

#[derive(Default)]
pub(crate) struct Double(RefCell<State>);

impl State {
    fn take(&mut self, worker: usize) -> Result<Option<Batch>> {
        let results = &mut self.workers[worker].results;
        match results.front() {
            _ if self.closed => Ok(None),
            None => Ok(None),
            Some(Committed::Nonsense) => Err(nonsense()),
            Some(_) => match results.pop_front() {
                Some(Committed::Batch(batch)) => Ok(Some(batch)),
                Some(Committed::Missing { seq }) => {
                    Err(Error::Arrival { task: Some(seq), error: Box::new(nonsense()) })
                }
                _ => unreachable!("seen just now"),
            },
        }
    }
}

fn nonsense() -> Error {
    Error::Corrupt("a result of the double".into())
}

impl Transport for Double {
    type Index = ();
    type Received = Batch;

    fn answered(batch: &Batch) -> (u64, ResultKind) {
        (batch.seq, ResultKind::Batch)
    }

    fn put_task(&self, worker: u32, seq: u64, (): ()) -> Result<()> {
        self.0.borrow_mut().workers[worker as usize].tasks.push_back(seq);
        Ok(())
    }

    fn try_next(&self) -> Result<Option<Batch>> {
        let state = &mut *self.0.borrow_mut();
        let count = state.workers.len();
        let from = state.turn;
        let Some(worker) =
            (from..from + count).map(|at| at % count).find(|&at| !state.workers[at].results.is_empty())
        else {
            return Ok(None);
        };
        state.turn = worker + 1;
        state.take(worker)
    }

    fn try_next_of(&self, worker: u32) -> Result<Option<Batch>> {
        self.0.borrow_mut().take(worker as usize)
    }

    fn peek_of(&self, worker: u32) -> Result<Option<(u64, ResultKind)>> {
        let state = self.0.borrow();
        match state.workers[worker as usize].results.front() {
            _ if state.closed => Ok(None),
            None => Ok(None),
            Some(Committed::Batch(Batch { seq, .. }) | Committed::Missing { seq }) => {
                Ok(Some((*seq, ResultKind::Batch)))
            }
            Some(Committed::Nonsense) => Err(nonsense()),
        }
    }

    fn there_of(&self, worker: u32) -> Result<u64> {
        let state = self.0.borrow();
        Ok(if state.closed { 0 } else { state.workers[worker as usize].results.len() as u64 })
    }

    fn take_ended(&self) -> Option<u32> {
        self.0.borrow_mut().ended.pop_front()
    }
}

impl Backend for Double {
    type Transport = Self;

    fn new(workers: u32, _max_tasks: u32) -> Self {
        let workers = (0..workers).map(|_| Worker::default()).collect();
        Self(RefCell::new(State { workers, ..State::default() }))
    }

    fn transport(&self) -> &Self {
        self
    }

    fn index() {}

    fn take_task(&self, worker: u32) -> Option<u64> {
        self.0.borrow_mut().workers[worker as usize].tasks.pop_front()
    }

    fn commit(&self, worker: u32, seq: u64, content: i64) {
        let batch = Committed::Batch(Batch { worker, seq, content });
        self.0.borrow_mut().workers[worker as usize].results.push_back(batch);
    }

    fn commit_missing(&self, worker: u32, seq: u64) {
        self.0.borrow_mut().workers[worker as usize].results.push_back(Committed::Missing { seq });
    }

    fn commit_nonsense(&self, worker: u32) {
        self.0.borrow_mut().workers[worker as usize].results.push_back(Committed::Nonsense);
    }

    fn end(&self, worker: u32) {
        self.0.borrow_mut().ended.push_back(worker);
    }

    fn close(&mut self) {
        self.0.borrow_mut().closed = true;
    }

    fn read(batch: &Batch) -> (u32, i64) {
        (batch.worker, batch.content)
    }
}
