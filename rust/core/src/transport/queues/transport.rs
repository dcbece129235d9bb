//! The queues as the [`Transport`] of a scheduler.

use super::joint::ThreadTasks;
use super::{Queues, Reply, Request};
use crate::error::Result;
use crate::sync::Ordering;
use crate::transport::interface::Transport;
use crate::transport::joint::Joint;
use crate::transport::message::ResultKind;

impl<I, R> Queues<I, R> {
    fn of_tasks(&self, ask: impl FnOnce(&ThreadTasks<I, R>) -> bool) -> bool {
        self.lock().is_ok_and(|state| state.joint.as_ref().is_some_and(ask))
    }

    /// Takes the next reply of one of these workers.
    fn take_reply(&self, workers: impl FnOnce(usize, usize) -> (usize, usize)) -> Result<Option<Reply<R>>> {
        let mut state = self.lock()?;
        let count = state.workers.len();
        let (from, looked_at) = workers(state.turn, count);
        let found = (from..from + looked_at)
            .find_map(|at| Some((at, state.workers[at % count].replies.pop_front()?)));
        let Some((at, reply)) = found else { return Ok(None) };
        if looked_at > 1 {
            state.turn = at % count + 1;
        }
        let answered = state
            .joint
            .as_mut()
            .filter(|_| reply.kind == ResultKind::Batch)
            .map(|joint| joint.answered(reply.seq));
        drop(state);
        if let Some((task, is_laid_out)) = answered {
            drop(task);
            if is_laid_out {
                self.wake_workers();
            }
        }
        Ok(Some(reply))
    }
}

impl<I, R> Transport for Queues<I, R> {
    type Index = I;
    type Received = Reply<R>;

    fn answered(reply: &Reply<R>) -> (u64, ResultKind) {
        (reply.seq, reply.kind)
    }

    fn put_task(&self, worker: u32, seq: u64, index: I) -> Result<()> {
        if self.shares.load(Ordering::Relaxed) {
            return self.share(seq, index);
        }
        self.put(worker, Request::Task { seq, index })
    }

    fn try_next(&self) -> Result<Option<Reply<R>>> {
        self.take_reply(|turn, count| (turn, count))
    }

    fn try_next_of(&self, worker: u32) -> Result<Option<Reply<R>>> {
        self.take_reply(|_, _| (worker as usize, 1))
    }

    fn peek_of(&self, worker: u32) -> Result<Option<(u64, ResultKind)>> {
        Ok(self.lock()?.workers[worker as usize].replies.front().map(Self::answered))
    }

    fn begin_epoch(&self, epoch: u64) {
        if !self.shares.load(Ordering::Relaxed) {
            return;
        }
        let Ok(mut state) = self.lock() else { return };
        // Nobody waits for what an epoch that was given up has left.
        let stale = state.joint.as_mut().map(|joint| joint.begin_epoch(epoch));
        drop(state);
        drop(stale);
        self.wake_workers();
    }

    fn there_of(&self, worker: u32) -> Result<u64> {
        Ok(self.lock()?.workers[worker as usize].replies.len() as u64)
    }

    fn take_ended(&self) -> Option<u32> {
        self.lock().ok()?.ended.pop_front()
    }

    fn joint(&self) -> Option<&dyn Joint> {
        self.shares.load(Ordering::Relaxed).then_some(self)
    }
}

impl<I, R> Joint for Queues<I, R> {
    fn lose(&self, worker: u32) {
        let Ok(mut state) = self.lock() else { return };
        state.workers[worker as usize].collating = None;
        if let Some(joint) = &state.joint {
            joint.tasks.lose(joint.claims(), worker);
        }
        drop(state);
        self.wake_workers();
    }

    fn share_among(&self, workers: u32) {
        if let Ok(mut state) = self.lock()
            && let Some(joint) = &mut state.joint
        {
            joint.tasks.share_among(workers);
        }
    }

    fn has_claim(&self, worker: u32) -> bool {
        self.of_tasks(|joint| joint.tasks.has_claim(joint.claims(), worker))
    }

    fn is_open(&self) -> bool {
        self.of_tasks(|joint| joint.tasks.is_open(joint.claims()))
    }

    fn has_made(&self, worker: u32) -> bool {
        self.of_tasks(|joint| joint.tasks.has_made(worker))
    }
}
