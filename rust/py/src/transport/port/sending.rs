//! A batch on its way from a worker: encoded, laid out, copied and committed.

use std::ffi::CString;
use std::ops::Range;
use std::time::{Duration, Instant};

use pyo3::exceptions::PyRuntimeWarning;
use pyo3::prelude::*;
use ringloader_core::number::usize_from;
use ringloader_core::os::clock::monotonic;
use ringloader_core::os::fd_passing::{SendOutcome, most_in_flight};
use ringloader_core::os::memory::MemoryProbe;
use ringloader_core::sync::{AtomicU64, Ordering};
use ringloader_core::timing::Stamps;
use ringloader_core::transport::joint::{Claimed as CoreClaimed, JointMemory};
use ringloader_core::transport::message::ResultKind;
use ringloader_core::transport::port::{Commit, Room};

use super::Port;
use crate::batch::encode::Encoded;
use crate::batch::groups::Groups;
use crate::batch::write::Target;
use crate::gil::{detached, exception};
use crate::sampling::codec::pair;
use crate::timing::WorkerClock;
use crate::torch::names::Torch;

/// The time for which a worker waits in silence for a limit that other processes may have filled.
const SILENT: Duration = Duration::from_secs(5);

impl Port {
    /// Commits a message, unless it is wanted no more. The rows of a batch that all workers have made stay in their
    /// window.
    pub(in super::super) fn send(
        &self,
        message: &Bound<'_, PyAny>,
        joint: Option<&JointBatch<'_>>,
    ) -> PyResult<()> {
        if !self.core.is_current() {
            // The rings are the worker's, which answers for itself.
            self.parent_ended.store(true, Ordering::Relaxed);
            return Ok(());
        }
        let (kind, seq, object) = match pair(message)? {
            Some((seq, data)) => (ResultKind::Batch, seq, data),
            None => (ResultKind::Object, 0, message.clone()),
        };
        // Only batches have stamps.
        let clock = self.clock().filter(|_| kind == ResultKind::Batch);
        if let Some(clock) = clock {
            clock.note_made();
        }
        self.spare.with(Encoded::default, |encoded| {
            encoded.encode(&object)?;
            self.commit(&object, (kind, seq as u64), encoded, clock, joint)
        })
    }

    fn commit(
        &self,
        object: &Bound<'_, PyAny>,
        (kind, seq): (ResultKind, u64),
        encoded: &mut Encoded,
        clock: Option<&WorkerClock>,
        mut joint: Option<&JointBatch<'_>>,
    ) -> PyResult<()> {
        let py = object.py();
        let is_batch = encoded.pickled.is_none() || !Torch::get(py)?.is_notice(object)?;
        let extra = if clock.is_some() { Stamps::BYTES } else { 0 };
        let mut commit = self.core.begin_commit();
        let generation = commit.generation();
        let found = encoded.settle(object, "batch was", |encoded| {
            if let Some(batch) = joint {
                encoded.form(py, batch.filled()?)?;
                if let Some(reserved) = batch.reserve(encoded, extra)? {
                    return Ok(Some(reserved));
                }
                // The window has no room for the rest: all goes to a slot.
                joint = None;
                encoded.clear();
                encoded.encode(object)?;
            }
            encoded.form(py, commit.filled())?;
            self.reserve(py, &mut commit, encoded, extra)
        })?;
        let Some(Reserved { meta_at, meta_end, end }) = found else { return Ok(()) };
        let Encoded { meta, drafts, groups, pickled, .. } = encoded;
        let block = meta.finish(generation);
        let target = match (commit.own(), joint) {
            (Some(segment), _) => Target::Own(segment),
            (None, Some(batch)) => batch.target(),
            (None, None) => Target::Slot(&commit),
        };
        // Before the commit: the parent finds a batch counted that it has taken.
        match kind {
            ResultKind::Object => self.core.counters().begin_epoch(),
            _ if is_batch => self.count(groups, pickled.is_some(), commit.own().is_some()),
            _ => {}
        }
        target.write(py, groups.copies(), &drafts.held, meta_at, block)?;
        if commit.own().is_some() && !self.send_segment(py, &commit)? {
            return Ok(());
        }
        if let Some(clock) = clock {
            target.write(py, &[], &[], meta_end, &clock.note_sent().to_bytes(generation))?;
        }
        let mut finish = || match joint {
            Some(batch) => commit.finish_shared(seq, kind, meta_at..meta_end, end, batch.window()),
            None => commit.finish(seq, kind, meta_at..meta_end, end),
        };
        while !finish().map_err(exception)? {
            if self.rest(py)? {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Sends the batch's own segment. Returns false when the parent wants nothing more.
    fn send_segment(&self, py: Python<'_>, commit: &Commit<'_>) -> PyResult<bool> {
        let begun = Instant::now();
        loop {
            match commit.send().map_err(exception)? {
                SendOutcome::Yes => return Ok(true),
                SendOutcome::TooManyInFlight if begun.elapsed() > SILENT => {
                    self.warn_of_many_in_flight(py)?
                }
                SendOutcome::TooManyInFlight | SendOutcome::Full => {}
            }
            if self.rest(py)? {
                return Ok(false);
            }
        }
    }

    /// Counts a batch.
    fn count(&self, groups: &Groups, is_pickled: bool, is_oversize: bool) {
        let counts = self.core.counters().now();
        let count = |counter: &AtomicU64, by: u64| counter.fetch_add(by, Ordering::Relaxed);
        count(&counts.batches, 1);
        count(&counts.in_place, if is_oversize { 0 } else { groups.in_place() });
        count(&counts.copied, groups.copies().len() as u64);
        count(&counts.pickled, is_pickled.into());
        count(&counts.oversize, is_oversize.into());
    }

    /// Reserves memory for the batch, and for `extra` bytes after it. `None` when the parent wants nothing more.
    fn reserve(
        &self,
        py: Python<'_>,
        commit: &mut Commit<'_>,
        encoded: &mut Encoded,
        extra: u64,
    ) -> PyResult<Option<Reserved>> {
        let len = encoded.meta.encoded_len() as u64;
        loop {
            let bump = commit.bump();
            let mut lay_out = |bump| {
                let meta_at = encoded.lay_out(bump);
                let meta_end = meta_at + len;
                Reserved { meta_at, meta_end, end: meta_end + extra }
            };
            let reserved = lay_out(Some(bump));
            match commit.reserve(reserved.end).map_err(exception)? {
                Room::Ready => return Ok(Some(reserved)),
                Room::Later => {}
                Room::Oversize => {
                    let reserved = lay_out(None);
                    if commit.own_segment(reserved.end).map_err(exception)? {
                        return Ok(Some(reserved));
                    }
                }
            }
            encoded.drafts.disturb();
            if self.rest(py)? {
                return Ok(None);
            }
        }
    }

    /// Says once that another program, or a loader that nobody reads, keeps this worker from sending.
    fn warn_of_many_in_flight(&self, py: Python<'_>) -> PyResult<()> {
        if self.warned.swap(true, Ordering::Relaxed) {
            return Ok(());
        }
        let text = format!(
            "ringloader: worker {} cannot send a large batch yet, and waits: this user's processes have \
             sent as many descriptors that were not received yet as RLIMIT_NOFILE allows ({}). Take batches from \
             the loaders that have some ready, or raise the limit: ulimit -n",
            self.core.worker(),
            most_in_flight().map_or_else(|| "no limit".to_owned(), |most| most.to_string()),
        );
        PyErr::warn(py, &py.get_type::<PyRuntimeWarning>(), &CString::new(text)?, 1)
    }

    /// Waits a moment for room. Returns whether the parent wants nothing more.
    fn rest(&self, py: Python<'_>) -> PyResult<bool> {
        let begun = self.clock().map(|clock| (clock, monotonic()));
        self.note(detached(py, || self.core.wait_for_room())?);
        if let Some((clock, begun)) = begun {
            clock.note_room(monotonic().saturating_sub(begun));
        }
        Ok(self.is_done())
    }
}

/// The window of a batch whose rows are all written.
pub(in super::super) struct JointBatch<'a> {
    pub(in super::super) tasks: &'a JointMemory,
    pub(in super::super) claimed: &'a CoreClaimed,
    /// Where the rows end, from the start of the window.
    pub(in super::super) end: u64,
    pub(in super::super) probe: &'a MemoryProbe,
}

impl<'a> JointBatch<'a> {
    pub(in super::super) fn window(&self) -> u32 {
        self.claimed.plan.window
    }

    /// The addresses of the window, up to the end of the rows.
    ///
    /// # Errors
    /// `RuntimeError` for a window that there is not.
    pub(in super::super) fn filled(&self) -> PyResult<Range<usize>> {
        let start = self.tasks.pointer(self.claimed, 0, self.end).map_err(exception)?.as_ptr() as usize;
        Ok(start..start + usize_from(self.end))
    }

    /// Finds room for what is no row, for the table, and for `extra` bytes after it; `None`: there is none.
    ///
    /// # Errors
    /// `MemoryError` when the machine or the control group has not enough left.
    pub(in super::super) fn reserve(&self, encoded: &mut Encoded, extra: u64) -> PyResult<Option<Reserved>> {
        let table = encoded.meta.encoded_len() as u64;
        let len = encoded.lay_out(Some(0)) + table + extra;
        let start = self.tasks.after_rows(self.claimed, self.end, len, self.probe).map_err(exception)?;
        let Some(start) = start else { return Ok(None) };
        // INVARIANT: as long as at 0, since `start` is a multiple of every alignment.
        let meta_at = encoded.lay_out(Some(start));
        let meta_end = meta_at + table;
        Ok(Some(Reserved { meta_at, meta_end, end: meta_end + extra }))
    }

    pub(in super::super) fn target(&self) -> Target<'a, 'a> {
        Target::Part { tasks: self.tasks, claimed: self.claimed, start: 0 }
    }
}

/// The memory that is reserved for a batch: in the slot, in a window, or in a segment of its own.
pub(in super::super) struct Reserved {
    /// The start of the batch's table.
    pub(in super::super) meta_at: u64,
    pub(in super::super) meta_end: u64,
    /// The end of all that travels.
    pub(in super::super) end: u64,
}
