//! The queues as the [`Transport`] of a scheduler.

use super::{Queues, Reply, Request};
use crate::error::Result;
use crate::sync::Ordering;
use crate::transport::interface::Transport;
use crate::transport::joint::Joint;
use crate::transport::message::ResultKind;

impl<I, R> Queues<I, R> {
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
        let answered = (reply.kind == ResultKind::Batch).then(|| state.joint.answered(reply.seq));
        drop(state);
        if let Some((task, true)) = answered {
            drop(task);
            self.wake_workers();
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
        if self.has_joint.load(Ordering::Relaxed) {
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
        if self.has_joint.load(Ordering::Relaxed) {
            self.begin_joint(epoch);
        }
    }

    fn lose(&self, worker: u32) {
        self.lose_joint(worker);
    }

    fn there_of(&self, worker: u32) -> Result<u64> {
        Ok(self.lock()?.workers[worker as usize].replies.len() as u64)
    }

    fn take_ended(&self) -> Option<u32> {
        self.lock().ok()?.ended.pop_front()
    }

    fn joint(&self) -> Option<&dyn Joint> {
        self.has_joint.load(Ordering::Relaxed).then_some(self)
    }
}
