//! Scheduling: torch's rules for which worker is asked for what, and whose turn it is, over the transport.
//!
//! Composition of [`plan`](crate::plan) and any [`Transport`]. `T` is what a caller makes of a received result before
//! its turn.
//!
//! The parent pays the same for a batch whether there are one or many workers: in order it looks at one ring, out of
//! order at the rings whose [bit](crate::sync::ready) is set (`benches/rust/engine.rs` counts it).
//!
//! A task's number has its epoch in the upper bits. Results of an abandoned epoch are recognised by it and dropped, and
//! nobody waits for them.
//!
//! A result may arrive and still be unusable: its memory cannot be received, or its table is corrupt. [`Poll::Failed`]
//! names the task, whose descriptor has left the ring, so the error comes in its turn and the other batches come too. A
//! descriptor that cannot be read stays in its ring, and every later call raises again.
//!
//! | file | about |
//! |---|---|
//! | `poll.rs` | the next step towards the next batch |
//! | `lost.rs` | lost workers |
//! | `epochs.rs` | the numbers of epochs |
//! | `features/` | what features change, and the hooks by which they do |

mod epochs;
mod features;
mod lost;
mod poll;

use std::time::Instant;

pub use self::lost::PATIENCE;
pub use self::poll::Poll;

use self::epochs::EpochNumbers;
use self::features::Features;
use self::lost::Missing;
use crate::error::{Error, Result};
use crate::plan::{Next, ReorderBuffer, ResultOrder, WorkerSelector};
use crate::testing::fault::fault;
use crate::transport::Transport;
use crate::transport::message::ResultKind;
pub use crate::transport::task_number::EPOCH_SHIFT;
use crate::transport::task_number::epoch_of;

const SEQ_MASK: u64 = (1 << EPOCH_SHIFT) - 1;
// INVARIANT: no result is so late that the number of its epoch comes again: all that an epoch left in a ring stands
// before the tasks of the next, and a ring holds fewer.

/// Keeps which worker was asked for what, in this epoch.
#[derive(Debug)]
pub struct Scheduler<T> {
    selector: WorkerSelector,
    tasks: ReorderBuffer<T>,
    order: ResultOrder,
    /// True if only the worker whose result is next is looked at.
    looks_in_turn: bool,
    /// Modulo [`EPOCHS`](crate::transport::task_number::EPOCHS).
    epoch: u64,
    /// Workers whose process has ended, and has no successor.
    ended: Vec<u32>,
    /// The time since which results of a worker that has ended wait for another worker's.
    behind: Option<Instant>,
    numbers: EpochNumbers,
    features: Features,
}

impl<T> Scheduler<T> {
    /// For `workers` workers, each of which is asked for `prefetch_factor` batches ahead.
    #[must_use]
    pub fn new(workers: u32, prefetch_factor: u32, order: ResultOrder) -> Self {
        Self {
            selector: WorkerSelector::new(workers, prefetch_factor, order),
            tasks: ReorderBuffer::new(),
            order,
            looks_in_turn: order == ResultOrder::InOrder,
            epoch: 0,
            ended: Vec::new(),
            behind: None,
            numbers: EpochNumbers::default(),
            features: Features::default(),
        }
    }

    /// Returns true if torch's limit forbids another task.
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.features.counted(self.order, &self.tasks) >= self.selector.max_tasks()
    }

    /// Sends an index that was read to the worker whose turn it is, and returns which. `None`: no worker is
    /// left, and as in torch the index is lost.
    ///
    /// # Errors
    /// As [`Transport::put_task`].
    pub fn send<C: Transport>(&mut self, transport: &C, index: C::Index) -> Result<Option<u32>> {
        self.send_by(transport, |worker, seq| transport.put_task(worker, seq, index))
    }

    /// As [`send`](Self::send), where `put` gets the worker and the task's number, and sees to it that
    /// [`Transport::put_task`] is called with them.
    ///
    /// # Errors
    /// The error of `put`.
    pub fn send_by(
        &mut self,
        transport: &impl Transport,
        put: impl FnOnce(u32, u64) -> Result<()>,
    ) -> Result<Option<u32>> {
        let Some(worker) = self.choose(transport) else { return Ok(None) };
        put(worker, (self.epoch << EPOCH_SHIFT) | self.tasks.send_idx())?;
        self.tasks.send(worker);
        self.selector.record_sent(worker);
        Ok(Some(worker))
    }

    /// Returns the next step towards the next batch. Never waits. `transport` is `None` after shutdown: then, as in
    /// torch, what was taken before is still handed out, and the epoch is over.
    ///
    /// # Errors
    /// As [`Transport::try_next`], but for a result that is lost, which has [failed](Poll::Failed).
    pub fn poll<C: Transport>(&mut self, transport: Option<&C>) -> Result<Poll<T, C::Received>> {
        loop {
            let wanted =
                match self.tasks.next(|worker| transport.is_some() && self.selector.is_active(worker)) {
                    Next::End => return Ok(Poll::End),
                    Next::Ready { seq, worker, data } => return Ok(Poll::Ready { seq, worker, data }),
                    Next::Wait { worker, .. } => self.looks_in_turn.then_some(worker),
                };
            let Some(transport) = transport else { return Ok(Poll::End) };
            self.ended.extend(std::iter::from_fn(|| transport.take_ended()));
            // In order, results of other workers wait in their rings until it is their turn.
            let found = match wanted {
                Some(worker) => transport.try_next_of(worker),
                None => {
                    // Look first: busy workers could delay this report for as long as they are busy.
                    if let Some(worker) = self.lost(transport)? {
                        return Ok(Poll::Lost { worker });
                    }
                    transport.try_next()
                }
            };
            let found = match found {
                Ok(None) => match self.missing(transport, wanted)? {
                    Missing::Lost(worker) => return Ok(Poll::Lost { worker }),
                    Missing::Late(limit) => return Ok(Poll::Wait { worker: wanted, limit }),
                    Missing::Behind(worker) => transport.try_next_of(worker),
                },
                found => {
                    self.behind = None;
                    found
                }
            };
            if let Some(poll) = self.found::<C>(found)? {
                return Ok(poll);
            }
        }
    }

    /// The next result that `worker` has committed, before its turn: for a caller that waits for something else from
    /// this worker, which may wait for room. [`buffer`](Self::buffer) what comes. `None`: nothing has come.
    ///
    /// # Errors
    /// As [`poll`](Self::poll).
    pub fn poll_of<C: Transport>(
        &mut self,
        transport: &C,
        worker: u32,
    ) -> Result<Option<Poll<T, C::Received>>> {
        // One that has ended may have answers in its ring that nobody awaits.
        while self.selector.is_active(worker) {
            let found = transport.try_next_of(worker);
            if matches!(found, Ok(None)) {
                return Ok(None);
            }
            if let Some(poll) = self.found::<C>(found)? {
                return Ok(Some(poll));
            }
        }
        Ok(None)
    }

    /// Turns what a look into a ring has found into a step. `None`: the look found nothing, or nothing that this epoch
    /// waits for.
    #[inline]
    fn found<C: Transport>(
        &self,
        found: Result<Option<C::Received>>,
    ) -> Result<Option<Poll<T, C::Received>>> {
        match found {
            Ok(Some(received)) => {
                let (seq, kind) = C::answered(&received);
                if self.features.is_early(seq, kind) {
                    return Ok(Some(Poll::Early { seq: seq & SEQ_MASK, found: Ok(received) }));
                }
                let seq = (!self.is_stale(seq, kind)).then_some(seq & SEQ_MASK);
                Ok(seq.map(|seq| Poll::Arrived { seq, received }))
            }
            Err(Error::Arrival { task: Some(seq), error })
                if self.features.is_early(seq, ResultKind::Batch) =>
            {
                Ok(Some(Poll::Early { seq: seq & SEQ_MASK, found: Err(*error) }))
            }
            Err(Error::Arrival { task: Some(seq), error }) if !self.is_stale(seq, ResultKind::Batch) => {
                Ok(Some(Poll::Failed { seq: seq & SEQ_MASK, error: *error }))
            }
            Ok(None) | Err(Error::Arrival { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Returns true if a result answers a task of an epoch before, or only says that a worker is ready for a new epoch.
    fn is_stale(&self, seq: u64, kind: ResultKind) -> bool {
        kind == ResultKind::Object || epoch_of(seq) != self.epoch && !fault("epoch_ignored")
    }

    /// Takes a result that [`poll`](Self::poll) brought, or what stands for one that failed. Returns its worker
    /// and itself if it is its turn; else it is kept until it is.
    ///
    /// # Errors
    /// [`Error::Corrupt`] when no such task is out.
    pub fn accept(&mut self, seq: u64, data: T) -> Result<Option<(u32, T)>> {
        if self.order != ResultOrder::InOrder || seq == self.tasks.rcvd_idx() {
            let worker = self.tasks.take(seq)?;
            return Ok(Some((worker, data)));
        }
        self.buffer(seq, data)?;
        Ok(None)
    }

    /// Keeps a result until its turn, in any case: for a caller that can hand out nothing now.
    ///
    /// # Errors
    /// [`Error::Corrupt`] when no such task is out.
    pub fn buffer(&mut self, seq: u64, data: T) -> Result<()> {
        self.tasks.arrive(seq, data)
    }

    /// The answer to `seq` was that its worker has nothing more in this epoch. Returns the worker.
    ///
    /// # Errors
    /// [`Error::Corrupt`] when no such task is out.
    pub fn end_worker(&mut self, seq: u64) -> Result<u32> {
        let worker = self.tasks.record_end(seq)?;
        self.selector.deactivate(worker);
        Ok(worker)
    }

    /// The number in this epoch of a task that was sent as `seq`, if its result has not come.
    #[must_use]
    pub fn awaited_task(&self, seq: u64) -> Option<u64> {
        let of_epoch = epoch_of(seq) == self.epoch;
        (of_epoch && self.tasks.awaited_tasks().any(|(awaited, _)| awaited == seq & SEQ_MASK))
            .then_some(seq & SEQ_MASK)
    }

    /// Sends the next task, the epoch's first, to `worker`: for an epoch that stopped before the turn of `worker`.
    pub fn begin_at(&mut self, worker: u32) {
        self.selector.begin_at(worker);
    }

    /// The number of tasks of `worker` whose results have not come. Looks at every task.
    #[must_use]
    pub fn awaited_of(&self, worker: u32) -> u64 {
        self.tasks.awaited_tasks().filter(|&(_, of)| of == worker).count() as u64
    }

    /// Records that a batch of `worker` is about to be handed out.
    pub fn record_delivered(&mut self, worker: u32) {
        self.selector.record_delivered(worker);
    }

    /// The tasks whose results have not come, each with its worker, in no order. Looks at every task.
    pub fn awaited(&self) -> impl Iterator<Item = (u64, u32)> {
        self.tasks.awaited_tasks()
    }

    /// Returns the largest number of tasks that may be without a result.
    #[must_use]
    pub fn most_tasks(&self) -> u64 {
        self.selector.max_tasks()
    }

    /// torch's counters: the next task's number, the next batch's, and tasks without a result.
    #[must_use]
    pub fn positions(&self) -> (u64, u64, u64) {
        (self.tasks.send_idx(), self.tasks.rcvd_idx(), self.tasks.outstanding())
    }
}
