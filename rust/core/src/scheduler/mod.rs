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
//! # A worker that dies
//!
//! A worker that ends while it owes a result is [lost](Poll::Lost). The scheduler reports the loss once nothing that
//! the worker committed is left in its ring.
//!
//! - Out of order, it reports the loss at once, whatever the other workers have ready.
//! - In order, a committed result may have to wait for another, slow worker. The caller waits for [`PATIENCE`] at most.
//!   Then the scheduler takes the result before its turn and keeps it, reports the loss, and hands the result out in
//!   its turn to a caller that goes on.
//!
//! A worker that has answered all its tasks is missed only when it is asked again.

use std::time::{Duration, Instant};

use crate::error::{Error, Result};
use crate::plan::{Next, ReorderBuffer, ResultOrder, WorkerSelector};
use crate::testing::fault::fault;
use crate::transport::Transport;
use crate::transport::message::ResultKind;
pub use crate::transport::task_number::EPOCH_SHIFT;
use crate::transport::task_number::{EPOCHS, epoch_of};

const SEQ_MASK: u64 = (1 << EPOCH_SHIFT) - 1;
// INVARIANT: no result is so late that the number of its epoch comes again: all that an epoch left in a ring stands
// before the tasks of the next, and a ring holds fewer.

/// The longest time for which a loss goes unreported because the lost worker's results wait for another worker's.
pub const PATIENCE: Duration = Duration::from_millis(50);

/// Keeps which worker was asked for what, in this epoch.
#[derive(Debug)]
pub struct Scheduler<T> {
    selector: WorkerSelector,
    tasks: ReorderBuffer<T>,
    order: ResultOrder,
    /// True if only the worker whose result is next is looked at.
    looks_in_turn: bool,
    /// True if all workers share all tasks. Then a task's worker is only the one that its result is counted for.
    shares: bool,
    /// Modulo [`EPOCHS`].
    epoch: u64,
    /// Workers whose process has ended, and has no successor.
    ended: Vec<u32>,
    /// The time since which results of a worker that has ended wait for another worker's.
    behind: Option<Instant>,
    /// Memory in which [`balance`](Self::balance) counts each worker's unanswered tasks; `None` without balancing.
    loads: Option<Box<[u64]>>,
    /// The epoch that follows, once its tasks may be out, after all tasks of this one.
    follower: Option<u64>,
    /// The last number that an epoch got, also one that never began.
    last_number: u64,
    /// The number of the epoch that begins next, if it has one already.
    told: Option<u64>,
    /// True if the number of workers that get tasks may change.
    varies: bool,
    /// The worker that [began](Self::begin_worker) last, and the first task that it got since.
    added: Option<(u32, Option<u64>)>,
}

/// Why there is no result.
enum Missing {
    /// This worker will never send one.
    Lost(u32),
    /// The result is late; look again after this time.
    Late(Duration),
    /// This worker has ended, and what it had committed before has waited long enough for its turn.
    Behind(u32),
}

/// The next step towards the next batch.
#[derive(Debug)]
pub enum Poll<T, D> {
    /// The epoch is over.
    End,
    /// A result that [`Scheduler::accept`] kept; it is its turn.
    Ready {
        /// The task that the result answers.
        seq: u64,
        /// The worker that made it.
        worker: u32,
        /// The result.
        data: T,
    },
    /// A result has come: look at it, then [`Scheduler::accept`] it or say that it was the worker's
    /// [end](Scheduler::end_worker).
    Arrived {
        /// The task that the result answers.
        seq: u64,
        /// The result.
        received: D,
    },
    /// A result has come and cannot be had. Give [`Scheduler::accept`] a stand-in, so that the caller does not wait for
    /// it.
    Failed {
        /// The task that the result answers.
        seq: u64,
        /// Why.
        error: Error,
    },
    /// A result of the epoch that [follows](Scheduler::follow) has come before this one is over:
    /// [`buffer`](Scheduler::buffer) it there.
    Early {
        /// The task that the result answers.
        seq: u64,
        /// The result, or why it cannot be had.
        found: Result<D>,
    },
    /// Nothing is there: wait for this worker, or for any.
    Wait {
        /// The worker whose result is next; `None` when any will do.
        worker: Option<u32>,
        /// No longer than this.
        limit: Duration,
    },
    /// This worker's process has ended, and a result of its will never come.
    Lost {
        /// The worker.
        worker: u32,
    },
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
            shares: false,
            epoch: 0,
            ended: Vec::new(),
            behind: None,
            loads: None,
            follower: None,
            last_number: 0,
            told: None,
            varies: false,
            added: None,
        }
    }

    /// Sends each task from now on to the worker with the fewest unanswered tasks, and not by torch's rule. Of several
    /// such workers, the next in turn gets it. The order of the results stays. Only for map-style datasets, where any
    /// worker may do any task.
    ///
    /// A result in a worker's ring counts as answered: in order, it may wait there for a slow worker's batch. Results
    /// of an abandoned epoch are dropped before the ring is counted. One worker may get all tasks, so its ring has room
    /// for all of them.
    pub fn balance(&mut self) {
        self.loads.get_or_insert_with(|| vec![0; self.selector.workers()].into());
    }

    /// Sends tasks to the first `workers` workers only from now on, of which `most` may be out. It may be called again
    /// with other numbers. Results of the others' tasks still come. Only with [`balance`](Self::balance) or
    /// [`share_tasks`](Self::share_tasks).
    pub fn use_first(&mut self, transport: &impl Transport, workers: u32, most: u64) {
        self.varies = true;
        self.added = self.added.filter(|&(added, _)| added < workers);
        self.selector.use_first(workers, most);
        if self.shares {
            transport.share_among(workers);
        }
    }

    /// Returns true if more tasks than [`most_tasks`](Self::most_tasks) may be out, because fewer workers get tasks than
    /// did.
    #[must_use]
    pub fn varies(&self) -> bool {
        self.varies
    }

    /// A process runs as `worker`, which had none, or whose process was to end and owed nothing.
    pub fn begin_worker(&mut self, worker: u32) {
        self.ended.retain(|&ended| ended != worker);
        self.added = Some((worker, None));
    }

    /// Returns true if the worker that [began](Self::begin_worker) last has made a batch since, or some of one that all
    /// workers make; in the epochs after; and once it gets no more tasks.
    pub fn has_begun(&self, transport: &impl Transport) -> bool {
        match self.added {
            None => true,
            Some((worker, _)) if self.shares => transport.has_made(worker),
            Some((_, None)) => false,
            Some((_, Some(first))) => self.tasks.awaited_tasks().all(|(seq, _)| seq != first),
        }
    }

    /// Returns true if `worker` owes nothing of tasks that all workers share. Its process was told to end, and has
    /// ended; what it had committed was taken. If it owes something, it is [lost](Poll::Lost).
    pub fn retire(&mut self, transport: &impl Transport, worker: u32) -> bool {
        if self.shares && transport.has_claim(worker) {
            return false;
        }
        if self.shares {
            self.ended.extend(std::iter::from_fn(|| transport.take_ended()));
            self.ended.retain(|&ended| ended != worker);
        }
        true
    }

    /// Returns how many tasks each worker has that it has not answered. A result in a worker's ring counts as answered.
    /// If workers share tasks: 0 for one that makes nothing and finds nothing to make.
    pub fn unanswered(&self, transport: &impl Transport) -> Box<[u64]> {
        if self.shares {
            let is_open = transport.is_open();
            let has_some = |worker| (is_open && worker < self.selector.used()) || transport.has_claim(worker);
            return (0..self.selector.workers() as u32).map(|worker| has_some(worker).into()).collect();
        }
        let mut loads = vec![0; self.selector.workers()].into_boxed_slice();
        self.count_unanswered(transport, &mut loads);
        loads
    }

    /// Lets all workers share all tasks, of which `most` may be out: the transport hands them out, and any worker may
    /// send the result of any task. Before the first task. The order of the results stays.
    pub fn share_tasks(&mut self, most: u64) {
        self.shares = true;
        self.looks_in_turn = false;
        self.selector = WorkerSelector::for_shared(self.selector.workers() as u32, most);
    }

    /// Begins a new epoch: results of tasks sent before are thrown away when they come, also those of an epoch that was
    /// to [follow](Self::follow).
    pub fn reset(&mut self) {
        self.selector.reset();
        self.tasks.reset();
        self.behind = None;
        self.added = None;
        self.epoch = self.next_number();
        self.follower = None;
    }

    /// Makes the scheduler of the next epoch, whose tasks may be sent while results of this one still come. The caller
    /// sends nothing more in this one, and polls nothing in the next one before it [continues](Self::continue_from)
    /// from this one. Until then the tasks of the next one go to the workers in turn.
    ///
    /// INVARIANT: a worker answers in the order of its tasks, and where all workers share them, it begins an epoch once all
    /// tasks of the one before are answered. So in its ring nothing of this epoch comes after anything of the next.
    #[must_use]
    pub fn follow(&mut self) -> Self {
        let number = self.next_number();
        self.follower = Some(number);
        let mut next = Self::new(self.selector.workers() as u32, self.selector.prefetch_factor(), self.order);
        next.epoch = number;
        if self.shares {
            next.share_tasks(self.most_tasks());
        }
        if self.varies {
            next.varies = true;
            next.selector.use_first(self.selector.used(), self.selector.max_tasks());
        }
        next
    }

    /// Continues from `before`, which this one [follows](Self::follow) and which is over, or was given up.
    pub fn continue_from(&mut self, before: &mut Self) {
        self.ended = std::mem::take(&mut before.ended);
        self.loads = before.loads.take();
        (self.last_number, self.told) = (before.last_number, before.told);
    }

    /// Returns the number of this epoch in the numbers of its tasks.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Returns a number for the epoch that begins next, by [`reset`](Self::reset) or [`follow`](Self::follow). No epoch
    /// before has it, also none that was given a number here and never began.
    pub fn number_next(&mut self) -> u64 {
        self.last_number = (self.last_number + 1) % EPOCHS;
        self.told = Some(self.last_number);
        self.last_number
    }

    fn next_number(&mut self) -> u64 {
        let told = self.told.take();
        told.unwrap_or_else(|| {
            self.last_number = (self.last_number + 1) % EPOCHS;
            self.last_number
        })
    }

    /// Returns true if all workers share all tasks.
    #[must_use]
    pub fn shares(&self) -> bool {
        self.shares
    }

    /// Numbers this epoch as if `epochs` epochs had begun and ended before. For tests of the numbers.
    #[must_use]
    pub fn after_epochs(mut self, epochs: u64) -> Self {
        self.epoch = epochs % EPOCHS;
        self.last_number = self.epoch;
        self
    }

    /// Returns true if torch's limit forbids another task. Where the limit may fall, results that wait for their turn
    /// count too: as many would always be kept.
    #[must_use]
    pub fn is_full(&self) -> bool {
        let is_in_order = self.order == ResultOrder::InOrder;
        let out = if self.varies && is_in_order {
            self.tasks.send_idx() - self.tasks.rcvd_idx()
        } else {
            self.tasks.outstanding()
        };
        out >= self.selector.max_tasks()
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

    fn choose(&mut self, transport: &impl Transport) -> Option<u32> {
        let Some(mut loads) = self.loads.take() else { return self.selector.choose() };
        self.count_unanswered(transport, &mut loads);
        let chosen = self.selector.choose_least(&loads);
        self.loads = Some(loads);
        if let Some((worker, first @ None)) = &mut self.added
            && chosen == Some(*worker)
        {
            *first = Some(self.tasks.send_idx());
        }
        chosen
    }

    fn count_unanswered(&self, transport: &impl Transport, loads: &mut [u64]) {
        loads.fill(0);
        for (_, worker) in self.tasks.awaited_tasks() {
            loads[worker as usize] += 1;
        }
        for (worker, load) in (0..).zip(loads).filter(|(_, load)| **load > 0) {
            // The error of a ring that cannot be read is raised in its turn, and not in place of another worker's
            // batch.
            let there = self.drop_stale(transport, worker).and_then(|_| transport.there_of(worker));
            *load = load.saturating_sub(there.unwrap_or(0));
        }
    }

    /// Returns the next step towards the next batch. Never waits. `transport` is `None` after shutdown: then, as in
    /// torch, what was taken before is still handed out, and the epoch is over.
    ///
    /// # Errors
    /// As [`Transport::try_next`], but for a result that cannot be had, which has [failed](Poll::Failed).
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
    /// this worker, which may wait for room. [`buffer`](Self::buffer) what comes. `None`: nothing is there.
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
                if self.is_early(seq, kind) {
                    return Ok(Some(Poll::Early { seq: seq & SEQ_MASK, found: Ok(received) }));
                }
                let seq = (!self.is_stale(seq, kind)).then_some(seq & SEQ_MASK);
                Ok(seq.map(|seq| Poll::Arrived { seq, received }))
            }
            Err(Error::Arrival { task: Some(seq), error }) if self.is_early(seq, ResultKind::Batch) => {
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

    /// Returns true if a result answers a task of the epoch that follows.
    fn is_early(&self, seq: u64, kind: ResultKind) -> bool {
        kind != ResultKind::Object && self.follower == Some(epoch_of(seq))
    }

    /// Workers that have ended and owe a result, which may still be in their rings. Where all workers share all tasks,
    /// each one owes the results, but one that was to end only what it has begun.
    fn debtors(&self, transport: &impl Transport) -> impl Iterator<Item = u32> {
        let ended = self.ended.iter().copied();
        ended.filter(|&worker| {
            let owes_all = worker < self.selector.used();
            self.selector.is_active(worker)
                && if self.shares {
                    self.tasks.outstanding() > 0 && (owes_all || transport.has_claim(worker))
                } else {
                    self.tasks.awaits(worker)
                }
        })
    }

    /// One of them that has nothing of this epoch left in its ring.
    fn lost(&self, transport: &impl Transport) -> Result<Option<u32>> {
        for worker in self.debtors(transport) {
            let is_drained = self.drop_stale(transport, worker)?;
            if is_drained || fault("lost_before_drained") {
                return Ok(Some(worker));
            }
        }
        Ok(None)
    }

    /// Drops the results at the head of a worker's ring that no epoch waits for. Returns true if nothing of this
    /// epoch comes after them. If workers share tasks, the next epoch is not lost with a
    /// worker: then nothing of the next epoch either.
    fn drop_stale(&self, transport: &impl Transport, worker: u32) -> Result<bool> {
        loop {
            match transport.peek_of(worker)? {
                Some((seq, kind)) if self.is_early(seq, kind) => return Ok(!self.shares),
                Some((seq, kind)) if self.is_stale(seq, kind) => match transport.try_next_of(worker) {
                    Ok(_) | Err(Error::Arrival { .. }) => {}
                    Err(error) => return Err(error),
                },
                next => return Ok(next.is_none()),
            }
        }
    }

    /// Called when the result whose turn it is has not come. Returns the reason, which tells the caller what to do.
    fn missing(&mut self, transport: &impl Transport, wanted: Option<u32>) -> Result<Missing> {
        if fault("lost_in_turn_only") && wanted.is_some_and(|turn| !self.ended.contains(&turn)) {
            return Ok(Missing::Late(Duration::MAX));
        }
        if let Some(worker) = self.lost(transport)? {
            return Ok(Missing::Lost(worker));
        }
        let Some(worker) = self.debtors(transport).next() else {
            self.behind = None;
            return Ok(Missing::Late(Duration::MAX));
        };
        let waited = self.behind.get_or_insert_with(Instant::now).elapsed();
        let left = PATIENCE.saturating_sub(waited);
        Ok(if left.is_zero() { Missing::Behind(worker) } else { Missing::Late(left) })
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

    /// Expects nothing more of a worker that was [lost](Poll::Lost): said once, the epoch goes on without
    /// it, as torch's does.
    pub fn give_up(&mut self, worker: u32) {
        self.selector.deactivate(worker);
    }

    /// As [`give_up`](Self::give_up), where all workers share all tasks: the others do what this one had, if any is
    /// left.
    pub fn leave_to_others(&mut self, transport: &impl Transport, worker: u32) {
        self.give_up(worker);
        if self.shares {
            transport.lose(worker);
            match self.selector.choose() {
                Some(other) => {
                    for _ in 0..self.tasks.reassign(worker, other) {
                        self.selector.record_sent(other);
                    }
                }
                // Tasks are counted for workers that were to end, too.
                None => (0..self.selector.workers() as u32).for_each(|other| self.selector.deactivate(other)),
            }
        }
    }

    /// A successor runs in place of a worker that was [lost](Poll::Lost): sends the tasks again whose results have not
    /// come, in their order, with the indices that `index` knows.
    ///
    /// # Errors
    /// As [`Transport::put_task`]; [`Error::Config`] for a task whose index is not known.
    pub fn resume<C: Transport>(
        &mut self,
        transport: &C,
        worker: u32,
        index: impl Fn(u64) -> Option<C::Index>,
    ) -> Result<()> {
        self.ended.retain(|&ended| ended != worker);
        self.behind = None;
        if self.shares {
            transport.lose(worker);
            return Ok(());
        }
        let of_worker = self.tasks.awaited_tasks().filter(|&(_, of)| of == worker);
        let mut awaited: Vec<u64> = of_worker.map(|(seq, _)| seq).collect();
        awaited.sort_unstable();
        for seq in awaited {
            let index =
                index(seq).ok_or_else(|| Error::Config(format!("the index of task {seq} was not kept")))?;
            transport.put_task(worker, (self.epoch << EPOCH_SHIFT) | seq, index)?;
        }
        Ok(())
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
