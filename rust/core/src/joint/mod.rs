//! Batches that all workers make together: which worker makes which samples, and which of them collates.
//!
//! A batch's samples are cut into at most [`MOST_RUNS`] **runs**. The main process lays a batch out in one of a fixed
//! number of places; idle workers **claim** its runs, make them, and write each into the bytes of the batch: its samples'
//! **rows**, where the batch is made of rows, and else a **part**. The worker that makes the last run collates: over the
//! rows it sends the batch as it lies there; of parts it makes a batch of its own, which it sends by its own ring.
//! Workers never wait for each other. Nothing here knows what a sample is, waits, or calls the system.
//!
//! ```text
//!  claim of a run:    CLOSED --lay_out--> FREE --claim--> worker w --(bit of the run in `made`)--> made
//!                                          ^                 | lose(w): w has ended
//!                                          +-----------------+
//!  the collation's:   CLOSED --last run--> worker w --its result is committed--> SENT --it is taken--> CLOSED (close)
//!                        | lose               | lose(w)
//!                        +------> FREE <------+ --claim--> worker v
//! ```
//!
//! The claim is the note of who has it: one word, changed by one compare-exchange. So no death falls between a claim and
//! its note. A claim has the generation of the batch that was laid out, and each change expects it. A worker that was
//! stopped for long changes nothing of a batch that was laid out since.
//!
//! # Who may read and write which bytes
//!
//! | bytes | written by | read by |
//! |---|---|---|
//! | what was laid out: number, index, size of runs | the main process, before it frees the first claim | whoever has a claim |
//! | the form of the rows | a worker, before it says where the form lies | whoever has a claim |
//! | the rows of a run | the worker with the claim of the run, before the run's bit is in `made` | the worker with the claim of the collation; of a batch of rows, then the main process |
//! | a part | the worker with the claim of its run, likewise | the worker with the claim of the collation |
//! | what comes after the rows | the worker with the claim of the collation | the main process |
//!
//! - Rows begin after the index, and their places follow from their form. Parts come from the end of the bytes. One word
//!   says where parts begin, and if rows are laid out: [`Room`]. So rows and parts never overlap, and all workers write
//!   rows of one form. Samples of another form go as a part, and the batch is collated from parts and rows.
//! - No two workers, living or dead, have the same part: a run that is made again gets another one. Its rows are the
//!   same. They are nobody else's, as a run has one claim, and a claim is freed only when its worker has ended.
//! - Bytes are used again when the batch is closed and nobody reads it any more. It is closed once its result was taken.
//!   Each run was made then, so its worker is done with it or has ended; and who collated has sent it. A batch that is
//!   sent where its rows lie is read by the main process until the user has dropped it, and a child that was forked
//!   meanwhile has ended. The next batch in its place gets other bytes
//!   ([`transport::joint`](crate::transport::joint)).
//!
//! # When a worker dies
//!
//! The main process takes all results of the dead worker, and then calls [`Batch::lose`] for each batch. INVARIANT: the
//! process has ended by then, and so has each that it had forked or none of these writes here. A worker that only seems
//! dead would write rows that are another's, and then those of the next batch.
//!
//! | the worker died | left behind | repaired by |
//! |---|---|---|
//! | with the claim of a run | bytes that no part names, rows written in part | `lose` frees the claim: the run is made again, and its rows are written again |
//! | after it wrote a form, before it said so | bytes that nobody uses | nothing to repair |
//! | after it laid the rows out | rows that are laid out, and none written | nothing to repair: the others continue |
//! | after the run's bit was set, not the last one | its part | nothing to repair |
//! | after the last bit, before it had the collation's claim | all parts | `lose` frees the claim of the collation |
//! | while it collated, the last run written | all parts | `lose` frees the claim of the collation |
//! | while it collated, its own run not written | all other parts | `lose` closes the collation, and frees the run |
//! | after it committed the batch | a whole batch | its result is taken first, and the batch closed |
//!
//! # From one epoch to the next
//!
//! A worker can make samples of one epoch only, that of its dataset. It begins the next one when each task before has a
//! place ([`Pending`]), and no batch before [is left](Batch::is_left): each was committed, so no death makes anything of it
//! be made again.

mod cost;
mod pending;
mod plan;
mod room;

pub use self::cost::{Cost, mean, per_run};
pub use self::pending::Pending;
pub use self::plan::JointPlan;
pub use self::room::Room;

use crate::number::u32_from;
use crate::sync::{AtomicU64, Ordering, acq_rel_unless, acquire_unless, release_unless};
use crate::testing::failpoint::failpoint;
use crate::testing::planted;

/// The most runs of a batch: `made` has a bit for each. Models have few words.
pub const MOST_RUNS: u32 = if cfg!(ringloader_loom) { 2 } else { u64::BITS };

/// The number of the collation's claim, after those of the runs.
const COLLATION: u32 = MOST_RUNS;

/// Words of a batch. Zeroed memory is a place where nothing is laid out.
pub const WORDS: usize = size_of::<Batch>() / size_of::<AtomicU64>();

const CLOSED: u64 = 0;
const FREE: u64 = 1;
/// Of the collation's claim alone: the result is committed.
const SENT: u64 = 2;
const FIRST_WORKER: u64 = 3;
const GENERATION: u32 = 32;

/// The length of a part that could not be written: its samples cannot be sent.
const UNSENT: u64 = u64::MAX;
/// The length of a part whose samples lie in the batch's rows.
const IN_ROWS: u64 = u64::MAX - 1;

fn get(word: &AtomicU64) -> u64 {
    word.load(Ordering::Relaxed)
}

fn set(word: &AtomicU64, value: u64) {
    word.store(value, Ordering::Relaxed);
}

fn code(claim: u64) -> u64 {
    claim & ((1 << GENERATION) - 1)
}

fn with_code(claim: u64, code: u64) -> u64 {
    claim >> GENERATION << GENERATION | code
}

fn of_worker(worker: u32) -> u64 {
    FIRST_WORKER + u64::from(worker)
}

/// A worker's claim: a run, or the collation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Claim {
    /// The run; `None` for the collation.
    pub run: Option<u32>,
    claim: u64,
}

/// A part of a batch, where its worker has written it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// The bytes.
    Bytes {
        /// Their start.
        offset: u64,
        /// Their number.
        len: u64,
    },
    /// The rows of its samples.
    Rows,
    /// The worker could not send the samples.
    Unsent,
}

/// One batch, as it lies in the memory that all workers have.
#[repr(C)]
#[derive(Debug)]
pub struct Batch {
    seq: AtomicU64,
    samples: AtomicU64,
    per_run: AtomicU64,
    kind: AtomicU64,
    len: AtomicU64,
    window: AtomicU64,
    room: AtomicU64,
    /// A bit for each run that is made.
    made: AtomicU64,
    /// Of the runs, and of the collation.
    claims: [AtomicU64; MOST_RUNS as usize + 1],
    /// By run: where its part begins, and its length.
    parts: [[AtomicU64; 2]; MOST_RUNS as usize],
    /// Batches begin at a cache line of their own.
    _rest: [AtomicU64; 7],
}

impl Batch {
    /// The batch in `words`, of which there must be [`WORDS`].
    #[must_use]
    #[allow(unsafe_code, reason = "sees words as the fields of a structure")]
    pub fn over(words: &[AtomicU64]) -> &Self {
        let words = &words[..WORDS];
        // SAFETY: the structure consists of as many atomics as `words` and of nothing else, so it has their size and
        // their alignment, and every value is valid.
        unsafe { &*words.as_ptr().cast() }
    }

    fn claim_word(&self, run: u32) -> &AtomicU64 {
        &self.claims[run as usize]
    }

    /// The batch as it was laid out. Without a claim, a reader may see parts of two batches.
    #[must_use]
    pub fn plan(&self) -> JointPlan {
        JointPlan {
            seq: get(&self.seq),
            samples: get(&self.samples),
            per_run: get(&self.per_run),
            kind: get(&self.kind),
            len: get(&self.len),
            window: u32_from(get(&self.window)),
        }
    }

    /// Returns the number of the batch's task. See [`plan`](Self::plan).
    #[must_use]
    pub fn seq(&self) -> u64 {
        get(&self.seq)
    }

    /// Lays a batch out, in the main process. Nothing is laid out here, or the batch here was [closed](Self::close).
    /// Its index is written. The window has `room` bytes.
    pub fn lay_out(&self, plan: &JointPlan, room: u64) {
        set(&self.seq, plan.seq);
        set(&self.samples, plan.samples);
        set(&self.per_run, plan.per_run);
        set(&self.kind, plan.kind);
        set(&self.len, plan.len);
        set(&self.window, plan.window.into());
        set(&self.room, Room::of(room).0);
        set(&self.made, 0);
        let generation = (get(self.claim_word(COLLATION)) >> GENERATION).wrapping_add(1) << GENERATION;
        self.claim_word(COLLATION).store(generation | CLOSED, Ordering::Relaxed);
        for run in 0..plan.runs() {
            // ORDERING joint-laid-out: what was laid out happens before the claim of a run.
            self.claim_word(run).store(generation | FREE, release_unless("joint_free_relaxed"));
        }
    }

    /// Forgets the batch, whose result the main process has taken. Nobody has a claim of it any more.
    pub fn close(&self) {
        for run in 0..=COLLATION {
            let word = self.claim_word(run);
            word.store(with_code(word.load(Ordering::Relaxed), CLOSED), Ordering::Relaxed);
        }
    }

    /// Returns true if something of the batch may be claimed.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.free().next().is_some()
    }

    fn free(&self) -> impl Iterator<Item = (u32, u64)> + '_ {
        let runs = self.plan().runs();
        std::iter::once(COLLATION).chain(0..runs).filter_map(move |run| {
            // ORDERING joint-laid-out: as above. ORDERING joint-made: the collation is free once `lose`, which has
            // acquired all parts, has released it.
            let claim = self.claim_word(run).load(acquire_unless("joint_claim_relaxed"));
            (code(claim) == FREE).then_some((run, claim))
        })
    }

    /// Claims something of the batch for `worker`, if its task `is_wanted`: the first run that is free, or the collation.
    pub fn claim(&self, worker: u32, is_wanted: impl Fn(u64) -> bool) -> Option<Claim> {
        self.free().find_map(|(run, free)| {
            // INVARIANT: no other batch is laid out here while something of this one is free.
            if !is_wanted(self.seq()) {
                return None;
            }
            let claim = with_code(free, of_worker(worker));
            // Again: it may have been claimed, lost, and freed meanwhile.
            let acquire = acquire_unless("joint_claim_relaxed");
            self.claim_word(run).compare_exchange(free, claim, acquire, Ordering::Relaxed).ok()?;
            failpoint("joint-claimed");
            Some(Claim { run: (run != COLLATION).then_some(run), claim })
        })
    }

    /// The bytes that are not reserved. For a worker with a claim.
    #[must_use]
    pub fn room(&self) -> Room {
        // ORDERING joint-rows: the form is written before it is seen where it lies.
        Room(self.room.load(acquire_unless("joint_rows_load_relaxed")))
    }

    fn set_room(&self, room: Room, to: Room, success: Ordering) -> Result<(), Room> {
        // ORDERING joint-rows: as above.
        let found = self.room.compare_exchange(room.0, to.0, success, Ordering::Acquire);
        found.map(drop).map_err(Room)
    }

    /// Reserves the bytes from `start` to the top of `room`. `start` is at no byte of the index or of rows.
    ///
    /// # Errors
    /// The room as another worker has left it.
    pub fn reserve(&self, room: Room, start: u64) -> Result<(), Room> {
        // Relaxed: a change of the word goes on with what the one before it has released.
        self.set_room(room, room.up_to(start), Ordering::Relaxed)
    }

    /// Lays the rows out, whose form is written at `form`. They end below the top of `room`, which has no rows yet.
    ///
    /// # Errors
    /// The room as another worker has left it.
    pub fn lay_out_rows(&self, room: Room, form: u64) -> Result<(), Room> {
        // ORDERING joint-rows: as above.
        self.set_room(room, room.with_form(form), release_unless("joint_rows_relaxed"))
    }

    fn all(&self) -> u64 {
        u64::MAX >> (u64::BITS - self.plan().runs())
    }

    /// Takes the collation if all other runs are made. Then this worker need not write its own: with its death, both
    /// are free again.
    pub fn begin_last(&self, claim: Claim) -> bool {
        let Some(run) = claim.run else { return true };
        // ORDERING joint-made: the parts of all runs whose bits are seen were written before.
        let made = self.made.load(acquire_unless("joint_last_relaxed")) | 1 << run;
        made == self.all() && self.take_collation(claim)
    }

    /// The run was made: its part is written. Returns true if this worker is to collate the batch.
    pub fn finish(&self, claim: Claim, part: Part) -> bool {
        let Some(run) = claim.run else { return true };
        let (offset, len) = match part {
            Part::Bytes { offset, len } => (offset, len),
            Part::Rows => (0, IN_ROWS),
            Part::Unsent => (0, UNSENT),
        };
        let [at, bytes] = &self.parts[run as usize];
        set(at, offset);
        set(bytes, len);
        failpoint("joint-written");
        // ORDERING joint-made: the part is written before its bit is seen; whoever sets the last bit sees all parts.
        let made = self.made.fetch_or(1 << run, acq_rel_unless("joint_made_relaxed")) | 1 << run;
        failpoint("joint-made");
        made == self.all() && self.take_collation(claim)
    }

    /// Fails if the main process has freed the collation meanwhile, because of the death of another worker.
    fn take_collation(&self, claim: Claim) -> bool {
        let word = self.claim_word(COLLATION);
        let closed = with_code(claim.claim, CLOSED);
        let taken = word.compare_exchange(closed, claim.claim, Ordering::Relaxed, Ordering::Relaxed).is_ok();
        failpoint("joint-collates");
        taken
    }

    /// The batch's result is committed by this worker, which has collated it.
    pub fn note_sent(&self, claim: Claim) {
        failpoint("joint-committed");
        let sent = with_code(claim.claim, SENT);
        // ORDERING joint-sent: the result is committed before the batch is seen to be sent.
        let order = release_unless("joint_sent_relaxed");
        // The main process may have taken the result meanwhile, and laid out another batch.
        let _ = self.claim_word(COLLATION).compare_exchange(claim.claim, sent, order, Ordering::Relaxed);
    }

    /// Returns true if something of the batch is left to be made, or to be sent.
    #[must_use]
    pub fn is_left(&self) -> bool {
        // ORDERING joint-sent: as above.
        let collation = self.claim_word(COLLATION).load(acquire_unless("joint_left_relaxed"));
        code(collation) != SENT && code(self.claim_word(0).load(Ordering::Relaxed)) != CLOSED
    }

    /// The part of a run that is made; `None` of one that is not. For the worker that collates.
    #[must_use]
    pub fn part(&self, run: u32) -> Option<Part> {
        if get(&self.made) & 1 << run == 0 {
            return None;
        }
        let [offset, len] = self.parts[run as usize].each_ref().map(get);
        Some(match len {
            UNSENT => Part::Unsent,
            IN_ROWS => Part::Rows,
            len => Part::Bytes { offset, len },
        })
    }

    /// Frees what `worker` has claimed and not finished, in the main process, for other workers. The worker's process
    /// has ended, and all its results were taken.
    pub fn lose(&self, worker: u32) {
        // ORDERING joint-made: what the dead worker had acquired, or this process sees, is acquired by the next.
        let made = self.made.load(Ordering::Acquire);
        let is_made = made == self.all();
        let word = self.claim_word(COLLATION);
        let claim = word.load(Ordering::Relaxed);
        // Before a run is free: the worker that makes it finds the collation closed, and takes it.
        if code(claim) == of_worker(worker) {
            word.store(with_code(claim, if is_made { FREE } else { CLOSED }), Ordering::Release);
        } else if code(claim) == CLOSED && is_made {
            // The last worker may live, and be about to take it.
            let free = with_code(claim, FREE);
            let _ = word.compare_exchange(claim, free, Ordering::Release, Ordering::Relaxed);
        }
        for run in (0..self.plan().runs()).filter(|run| made & 1 << run == 0) {
            planted!("joint_run_kept" => break);
            let word = self.claim_word(run);
            let claim = word.load(Ordering::Relaxed);
            if code(claim) == of_worker(worker) {
                word.store(with_code(claim, FREE), Ordering::Release);
            }
        }
    }

    /// The worker of each run. For the main process, which has the batch's result and has not
    /// [closed](Self::close) it.
    pub fn makers(&self) -> impl Iterator<Item = u32> + '_ {
        let of = |run| code(self.claim_word(run).load(Ordering::Relaxed)).checked_sub(FIRST_WORKER);
        (0..self.plan().runs()).filter_map(of).map(u32_from)
    }

    /// Returns true if `worker` has a claim of the batch: of a run that is not made, or of the collation.
    #[must_use]
    pub fn is_with(&self, worker: u32) -> bool {
        let made = get(&self.made);
        let is_mine = |run| code(self.claim_word(run).load(Ordering::Relaxed)) == of_worker(worker);
        is_mine(COLLATION) || (0..self.plan().runs()).any(|run| made & 1 << run == 0 && is_mine(run))
    }
}

#[cfg(all(test, not(ringloader_loom)))]
mod tests;
