//! Tasks on their way from an engine to its workers.

use std::os::fd::{AsFd, BorrowedFd};

use super::Engine;
use super::channel::WorkerChannel;
use crate::error::{Error, Result};
use crate::os::fd_passing::{self, SendOutcome};
use crate::transport::message::{Task, TaskDescriptor};

impl Engine {
    /// Sends `task` to `worker`, or keeps it until there is room. Never blocks.
    ///
    /// # Errors
    /// [`Error::Config`] when it can never be sent, [`Error::Corrupt`] from the ring, [`Error::Inherited`]
    /// in a forked child.
    pub fn put(&self, worker: u32, task: Task) -> Result<()> {
        let state = &mut *self.lock_own()?;
        let channel = &mut state.channels[worker as usize];
        if !channel.arena.fits(task.bytes.len() as u64) {
            let (len, capacity) = (task.bytes.len() as u64, self.control.geometry().arena);
            return Err(Error::task_too_large(len, capacity));
        }
        channel.pending.push_back(task);
        self.flush(worker, channel)?;
        state.behind |= !channel.pending.is_empty();
        Ok(())
    }

    /// Sends `fd` to `worker`, for a task that names `tag`. Tags ascend. `false`: there is no room, try again later.
    ///
    /// # Errors
    /// [`Error::Os`] when the worker has ended, [`Error::Inherited`] in a forked child.
    pub fn send_fd(&self, worker: u32, fd: BorrowedFd<'_>, tag: u64) -> Result<bool> {
        match &self.lock_own()?.channels[worker as usize].socket {
            Some(socket) => Ok(fd_passing::send(socket.as_fd(), fd, tag)? == SendOutcome::Yes),
            None => Err(Error::Config(format!("worker {worker} has left"))),
        }
    }

    /// Sends pending tasks while there is room.
    pub(super) fn flush(&self, worker: u32, channel: &mut WorkerChannel) -> Result<()> {
        let view = self.control.worker(worker);
        let mut sent = false;
        while let Some(task) = channel.pending.front() {
            let head = channel.tasks.head(view.tasks)?;
            // The bytes of the task that the worker took last stay, if there is room: for `in_hand`.
            channel.arena.reclaim(head.wrapping_sub(1));
            let len = task.bytes.len() as u64;
            if channel.tasks.tail() - head >= view.tasks.capacity() {
                break;
            }
            let offset = channel.arena.reserve(len).or_else(|| {
                channel.arena.reclaim(head);
                channel.arena.reserve(len)
            });
            let Some(offset) = offset else { break };
            self.control.segment().copy_in(self.control.arena(worker).start + offset, &task.bytes)?;
            let words = TaskDescriptor { seq: task.seq, kind: task.kind, offset, len }.to_words();
            channel.arena.commit(channel.tasks.tail());
            if !channel.tasks.push(view.tasks, &words)? {
                return Err(Error::Corrupt("a task ring filled up without a producer".into()));
            }
            channel.pending.pop_front();
            sent = true;
        }
        if sent {
            self.handles[worker as usize].wake();
        }
        Ok(())
    }

    /// Returns the task that `worker` took last, if its bytes are still there. The worker is at that task, unless the
    /// task's result has come. `None` also where the transport does not know it.
    ///
    /// # Errors
    /// [`Error::Corrupt`] from the ring, [`Error::Inherited`] in a forked child.
    pub fn in_hand(&self, worker: u32) -> Result<Option<Task>> {
        let mut state = self.lock_own()?;
        let channel = &mut state.channels[worker as usize];
        let ring = self.control.worker(worker).tasks;
        let Some((position, words)) = channel.in_hand(ring)? else { return Ok(None) };
        if !channel.arena.holds(position) {
            return Ok(None);
        }
        let TaskDescriptor { seq, kind, offset, len } = TaskDescriptor::from_words(&words)?;
        let arena = self.control.arena(worker);
        if offset.checked_add(len).is_none_or(|end| end > arena.end - arena.start) {
            return Ok(None);
        }
        let mut bytes = Vec::new();
        self.control.segment().copy_out(arena.start + offset, len, &mut bytes)?;
        Ok(Some(Task { seq, kind, bytes }))
    }
}
