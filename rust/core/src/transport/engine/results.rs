//! The engine as a transport, and results on their way from its workers: found, taken out of their ring, opened.

use std::os::fd::{AsFd, OwnedFd};

use super::channel::WorkerChannel;
use super::{Engine, EngineState};
use crate::error::{Error, Result};
use crate::number::u32_from;
use crate::os::{Segment, fd_passing};
use crate::ring::Words;
use crate::sync::Arc;
use crate::testing::failpoint::failpoint;
use crate::transport::message::{BatchLocation, ResultDescriptor, ResultKind, Task, TaskIndex};
use crate::transport::received::{Backing, HeldSlot, OwnSegment, Received};
use crate::transport::{LONGEST_SLEEP, Transport};

/// The largest memory of a table that is kept for the next one.
const MOST_KEPT: usize = 256 << 10;

impl Transport for Engine {
    type Index = TaskIndex;
    type Received = Received;

    #[inline]
    fn answered(received: &Received) -> (u64, ResultKind) {
        (received.seq, received.kind)
    }

    #[inline]
    fn put_task(&self, worker: u32, seq: u64, (kind, bytes): TaskIndex) -> Result<()> {
        self.put(worker, Task { seq, kind, bytes })
    }

    /// None after [`close`](Engine::close).
    fn try_next(&self) -> Result<Option<Received>> {
        let mut state = self.lock_own()?;
        if state.looked.elapsed() >= LONGEST_SLEEP / 2 {
            // A caller that always finds something never sleeps, and would never hear of a death.
            let ended = self.poller.ended()?;
            self.record_ended(&mut state, ended);
        }
        if state.behind && !state.closed {
            // Room comes without a word, and not all tasks are answered: workers with room are found only so.
            for (worker, channel) in state.channels.iter_mut().enumerate() {
                self.flush(u32_from(worker as u64), channel)?;
            }
            state.behind = state.channels.iter().any(|channel| !channel.pending.is_empty());
        }
        let Some(worker) = self.find(&mut state)? else { return Ok(None) };
        let taken = self.take(&mut state, worker);
        // On any other error the worker keeps its turn, so that the next call finds again what cannot be read.
        if matches!(taken, Ok(_) | Err(Error::Arrival { .. })) {
            state.ready.pass(worker);
        }
        taken
    }

    /// Looks for no worker's end: a caller that waits for one worker sleeps sooner or later.
    fn try_next_of(&self, worker: u32) -> Result<Option<Received>> {
        self.take(&mut *self.lock_own()?, worker)
    }

    fn peek_of(&self, worker: u32) -> Result<Option<(u64, ResultKind)>> {
        let mut state = self.lock_own()?;
        if state.closed {
            return Ok(None);
        }
        let words = state.channels[worker as usize].results.peek(self.control.worker(worker).results)?;
        let descriptor = words.map(|words| self.descriptor(&words)).transpose()?;
        Ok(descriptor.map(|descriptor| (descriptor.seq, descriptor.kind)))
    }

    fn there_of(&self, worker: u32) -> Result<u64> {
        // Under the lock, as in `committed`.
        let state = self.lock_own()?;
        if state.closed {
            return Ok(0);
        }
        self.control.worker(worker).results.len()
    }

    fn take_ended(&self) -> Option<u32> {
        self.state.lock().ended.pop_front()
    }
}

impl Engine {
    /// INVARIANT: under the lock from the descriptor to the hold, so that closing comes before the one or
    /// after the other, and gives no pages back in between.
    fn take(&self, state: &mut EngineState, worker: u32) -> Result<Option<Received>> {
        if state.closed {
            return Ok(None);
        }
        let channel = &mut state.channels[worker as usize];
        if !channel.pending.is_empty() {
            self.flush(worker, channel)?;
        }
        let ring = self.control.worker(worker).results;
        let Some(words) = channel.results.peek(ring)? else { return Ok(None) };
        // INVARIANT: what cannot be read stays in the ring, so that no call waits for what was in it.
        let descriptor = self.descriptor(&words)?;
        channel.results.advance(ring);
        let table = std::mem::take(&mut state.table);
        self.open(worker, &channel.socket, descriptor, table).map(Some).map_err(|error| {
            let task = (descriptor.kind == ResultKind::Batch).then_some(descriptor.seq);
            Error::Arrival { task, error: Box::new(error) }
        })
    }

    /// Turns a descriptor into a received result, whose table is copied to `meta`.
    fn open(
        &self,
        worker: u32,
        socket: &Option<OwnedFd>,
        descriptor: ResultDescriptor,
        mut meta: Vec<u8>,
    ) -> Result<Received> {
        let ResultDescriptor { seq, kind, location, meta_offset, meta_len, used, generation } = descriptor;
        let backing = match location {
            BatchLocation::Slot(slot) => {
                failpoint("drained-unheld");
                let held = HeldSlot::new(self.handles[worker as usize].clone(), slot);
                let start = self.control.window(worker, slot).start;
                self.control.segment().copy_out(start + meta_offset, meta_len, &mut meta)?;
                Backing::Slot(held)
            }
            BatchLocation::Shared(window) => self.joint.open(window, &descriptor, &mut meta)?,
            BatchLocation::Own => {
                // The worker may wait for room, which this batch took.
                self.handles[worker as usize].wake();
                let Some(socket) = socket else {
                    return Err(Error::Corrupt(format!("the memory of batch {generation} was not sent")));
                };
                let fd = fd_passing::receive(socket.as_fd(), generation)?;
                // Made first: its drop gives the memory back if the batch is corrupt.
                let backing = Backing::Own(OwnSegment::new(Segment::attach(fd.as_fd())?));
                backing.copy_out(meta_offset, meta_len, &mut meta)?;
                backing.pointer(0, used)?;
                backing
            }
        };
        Ok(Received { worker, seq, kind, generation, used, meta_offset, meta, backing: Arc::new(backing) })
    }

    fn descriptor(&self, words: &Words) -> Result<ResultDescriptor> {
        let geometry = self.control.geometry();
        ResultDescriptor::from_words(words, geometry.slots, geometry.window)
    }

    /// A worker whose ring has a result, if there is one.
    fn find(&self, state: &mut EngineState) -> Result<Option<u32>> {
        let EngineState { channels, ready, .. } = state;
        ready.find(self.control.ready(), |worker| self.has(channels, worker))
    }

    fn has(&self, channels: &mut [WorkerChannel], worker: u32) -> Result<bool> {
        Ok(!channels[worker as usize].results.is_empty(self.control.worker(worker).results)?)
    }

    /// Returns true if a result of `only` (of any worker, if `None`) has come.
    pub(super) fn has_any_of(&self, only: Option<u32>) -> Result<bool> {
        let mut state = self.state.lock();
        match only {
            Some(worker) => self.has(&mut state.channels, worker),
            None => Ok(self.find(&mut state)?.is_some()),
        }
    }

    /// Takes the memory of a table that is done with: the table of the next received result is copied to it.
    pub fn reuse(&self, table: Vec<u8>) {
        if table.capacity() <= MOST_KEPT {
            self.state.lock().table = table;
        }
    }

    /// Results that are committed and not yet drained.
    ///
    /// # Errors
    /// [`Error::Corrupt`] from a ring.
    pub fn committed(&self) -> Result<u64> {
        // Under the lock the consumer's positions stand still, which `len` needs.
        let state = self.state.lock();
        let workers = 0..u32_from(state.channels.len() as u64);
        workers.map(|worker| self.control.worker(worker).results.len()).sum()
    }
}
