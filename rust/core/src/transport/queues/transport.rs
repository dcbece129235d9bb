//! The queues as the [`Transport`] of a scheduler.

use std::collections::VecDeque;
use std::sync::Condvar;

use super::sharing::Sharing;
use super::{Queues, Reply, Request, TaskRun};
use crate::error::Result;
use crate::sync::Ordering;
use crate::transport::interface::Transport;
use crate::transport::message::ResultKind;
use crate::transport::task_number::{epoch_of, is_before};

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
        let state = &mut *self.lock()?;
        let count = state.workers.len();
        let from = state.turn;
        for at in (from..from + count).map(|at| at % count) {
            if let Some(reply) = state.workers[at].replies.pop_front() {
                state.turn = at + 1;
                return Ok(Some(reply));
            }
        }
        Ok(None)
    }

    fn try_next_of(&self, worker: u32) -> Result<Option<Reply<R>>> {
        Ok(self.lock()?.workers[worker as usize].replies.pop_front())
    }

    fn peek_of(&self, worker: u32) -> Result<Option<(u64, ResultKind)>> {
        Ok(self.lock()?.workers[worker as usize].replies.front().map(Self::answered))
    }

    fn begin_epoch(&self, epoch: u64) {
        if !self.shares.load(Ordering::Relaxed) {
            return;
        }
        let Ok(mut state) = self.lock() else { return };
        let mut stale = VecDeque::new();
        if let Some(sharing) = &mut state.sharing {
            // Nobody waits for what an epoch that was given up has left.
            sharing.unanswered.retain(|&seq| !is_before(epoch_of(seq), epoch));
            (stale, sharing.runs) = std::mem::take(&mut sharing.runs)
                .into_iter()
                .partition(|run| is_before(epoch_of(run.task.seq), epoch));
        }
        drop(state);
        drop(stale);
        self.requested.iter().for_each(Condvar::notify_one);
    }

    fn there_of(&self, worker: u32) -> Result<u64> {
        Ok(self.lock()?.workers[worker as usize].replies.len() as u64)
    }

    fn take_ended(&self) -> Option<u32> {
        self.lock().ok()?.ended.pop_front()
    }

    fn lose(&self, worker: u32) {
        let Ok(mut state) = self.lock() else { return };
        let lost = state.workers[worker as usize].in_hand.take();
        if let (Some(sharing), Some(run)) = (&mut state.sharing, &lost)
            && sharing.unanswered.contains(&run.task.seq)
        {
            for lost in run.task.lost_with(run.run).rev() {
                sharing.runs.push_front(TaskRun { task: run.task.clone(), run: lost });
            }
        }
        drop(state);
        drop(lost);
        self.requested.iter().for_each(Condvar::notify_one);
    }

    fn share_among(&self, workers: u32) {
        let Ok(mut state) = self.lock() else { return };
        let Some(sharing) = &mut state.sharing else { return };
        let before = std::mem::replace(&mut sharing.sharers, workers).min(workers);
        state.workers[before as usize..].iter_mut().for_each(|worker| worker.has_made = false);
    }

    fn has_claim(&self, worker: u32) -> bool {
        self.lock().is_ok_and(|state| state.workers[worker as usize].in_hand.is_some())
    }

    fn is_open(&self) -> bool {
        let is_open =
            |sharing: &Sharing<I, R>| sharing.runs.front().is_some_and(|run| run.task.seq != sharing.newest);
        self.lock().is_ok_and(|state| state.sharing.as_ref().is_some_and(is_open))
    }

    fn has_made(&self, worker: u32) -> bool {
        self.lock().is_ok_and(|state| state.workers[worker as usize].has_made)
    }
}
