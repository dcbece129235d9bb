//! Tasks that all workers of an engine share, in two memfds of their own: the words of [`joint`](crate::joint), and the
//! bytes of each batch. Composition only.
//!
//! A batch that is under way has the words of a **place**, and a **window**: a range of addresses that stays where it is,
//! and is used again while its pages are warm. Its index lies at the start, then come its rows, and the table
//! with which it is sent. An index that would take more than half of the window lies in the file of the words. Parts come from the end, and so does the form of the rows: what the samples are like.
//!
//! A batch of rows is sent in its window. The main process holds the window until the caller's last view of it has gone
//! ([`windows`]), and lays the next batch out in another one meanwhile. A window has no owner among the workers, so no
//! worker's death loses one.

mod claims;
mod interface;
mod joint_tasks;
mod rows;
mod tasks;
pub mod windows;

use std::mem::MaybeUninit;
use std::ops::Range;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::ptr::NonNull;

pub use self::claims::Claims;
pub use self::interface::Joint;
pub use self::joint_tasks::JointTasks;
pub use self::rows::Rows;
pub(crate) use self::tasks::{LaidOut, Tasks};

use self::windows::JointWindows;
use crate::error::{Error, Result};
use crate::joint::{Claim, JointPlan};
use crate::number::usize_from;
use crate::os::Segment;
use crate::os::memory::MemoryProbe;
use crate::os::page::page_size;
use crate::os::word_file::WordFile;
use crate::sync::{Arc, AtomicU64, Ordering};
use crate::timing::Stamps;
use crate::transport::message::{TaskIndex, TaskKind};
use crate::transport::run_times;

/// Words of a window, after those of the claims: how many of its bytes were written, from each of its [`End`]s.
const OF_WINDOW: usize = 2;

/// The two ends from which a window is filled.
#[derive(Debug, Clone, Copy)]
enum End {
    /// Index, rows, and the table.
    Front,
    /// Parts, and the form of the rows.
    Back,
}

/// The most bytes of an index. One of a place may lie this far from the one of the next, in the file of the words.
const MOST_INDEX: u64 = 1 << 28;

/// The memory of shared tasks, in any process.
#[derive(Debug)]
pub struct JointMemory {
    words: WordFile,
    bytes: Arc<Segment>,
    places: u32,
    /// Bytes of a window.
    window: u64,
}

impl JointMemory {
    /// Makes the memory for `places` batches at a time, each of `window` bytes at most, and the windows, of which the
    /// user may keep as many. Runs have times if they are `timed`. The descriptor is for workers that shall map the
    /// bytes.
    ///
    /// # Errors
    /// [`Error::Os`] when the system refuses.
    pub fn create(places: u32, window: u64, timed: bool) -> Result<(Self, JointWindows, OwnedFd)> {
        let words = WordFile::in_memory("ringloader-claims", words_for(places, timed), false)?;
        let (bytes, fd) = Segment::create("ringloader-parts", bytes_for(places, window)?)?;
        let bytes = Arc::new(bytes);
        let windows = JointWindows::new(bytes.clone(), windows_for(places), places, window);
        Ok((Self { words, bytes, places, window }, windows, fd))
    }

    /// Maps the memory that the main process has made with the same numbers.
    ///
    /// # Errors
    /// [`Error::Corrupt`] when it is smaller, [`Error::Os`] when it cannot be mapped.
    pub fn attach(
        words: OwnedFd,
        bytes: BorrowedFd<'_>,
        places: u32,
        window: u64,
        timed: bool,
    ) -> Result<Self> {
        let words = WordFile::map(words, words_for(places, timed), false)?;
        let bytes = Segment::attach(bytes)?;
        if bytes_for(places, window)? != bytes.len() {
            return Err(too_many(places, window));
        }
        Ok(Self { words, bytes: Arc::new(bytes), places, window })
    }

    /// The windows' memory.
    #[must_use]
    pub fn bytes(&self) -> &Arc<Segment> {
        &self.bytes
    }

    /// The descriptor of the words.
    ///
    /// # Errors
    /// [`Error::Os`] where other code has closed it.
    pub fn words_fd(&self) -> Result<BorrowedFd<'_>> {
        self.words.fd()
    }

    /// The claims.
    #[must_use]
    pub fn claims(&self) -> Claims<'_> {
        Claims::over(self.words.words(), self.places)
    }

    /// Bytes of a window that an index of `len` bytes takes.
    fn len_in_window(&self, len: u64) -> u64 {
        if len <= self.window / 2 { len } else { 0 }
    }

    /// The start of a place's index in the file of the words.
    fn index_at(&self, place: usize) -> u64 {
        let words = words_for(self.places, true) * size_of::<AtomicU64>();
        (words as u64).next_multiple_of(MOST_INDEX) + place as u64 * MOST_INDEX
    }

    /// Writes an index, in the main process.
    fn write_index(&self, place: usize, window: u32, bytes: &[u8]) -> Result<()> {
        if self.len_in_window(bytes.len() as u64) == 0 {
            return self.words.file().write_at(bytes, self.index_at(place));
        }
        self.bytes.copy_in(self.start(window), bytes)
    }

    /// Gives the memory of an index back that has no window.
    fn forget_index(&self, place: usize, len: u64) {
        if self.len_in_window(len) == 0 {
            self.words.file().punch(self.index_at(place), len);
        }
    }

    /// Asks for the pages that are still cold among the first `len` bytes of a window, from one of its ends. The caller
    /// writes them next.
    fn warm(&self, window: u32, end: End, len: u64, probe: &MemoryProbe) -> Result<()> {
        let at = Claims::words(self.places) + window as usize * OF_WINDOW;
        let touched = &self.words.words()[at + end as usize];
        let len = len.checked_next_multiple_of(page_size()).unwrap_or(len);
        // Relaxed: it publishes nothing. A worker that dies before it writes has counted too much.
        let cold = len.saturating_sub(touched.load(Ordering::Relaxed));
        if cold > 0 {
            probe.require(cold)?;
            touched.fetch_max(len, Ordering::Relaxed);
        }
        Ok(())
    }

    /// The times of a batch's runs; `None` where they are not timed.
    fn times(&self, place: usize) -> Option<&[AtomicU64]> {
        self.words.words()[words_for(self.places, false)..].chunks_exact(run_times::WORDS).nth(place)
    }

    /// Notes when a worker has made a run, before it finishes it or sends its batch.
    pub fn note_times(&self, claimed: &Claimed, worker: u32, stamps: &Stamps) {
        if let (Some(times), Some(run)) = (self.times(claimed.place), claimed.claim.run) {
            run_times::note(times, run, worker, stamps);
        }
    }

    fn start(&self, window: u32) -> u64 {
        u64::from(window) * self.window
    }

    /// The index of a task, as it was sent.
    ///
    /// # Errors
    /// [`Error::Corrupt`] for what the main process does not write.
    pub fn index(&self, claimed: &Claimed) -> Result<TaskIndex> {
        let JointPlan { kind, len, .. } = claimed.plan;
        let kind = TaskKind::read(kind)?;
        if len > MOST_INDEX {
            return Err(Error::Corrupt(format!("a task of {len} bytes")));
        }
        if self.len_in_window(len) == 0 {
            let mut room = vec![MaybeUninit::uninit(); usize_from(len)];
            let bytes = self.words.file().read_at(&mut room, self.index_at(claimed.place))?.to_vec();
            return Ok((kind, bytes));
        }
        let mut bytes = Vec::new();
        self.bytes.copy_out(self.location(claimed, 0, len)?, len, &mut bytes)?;
        Ok((kind, bytes))
    }

    /// Returns the start of the batch's window in [`bytes`](Self::bytes).
    #[must_use]
    pub fn window_of(&self, claimed: &Claimed) -> u64 {
        self.start(claimed.plan.window)
    }

    /// Reserves bytes for a part, and returns where they begin in the batch; `None`: there is no room.
    ///
    /// # Errors
    /// [`Error::Memory`] when the machine or the control group has not enough left; [`Error::Corrupt`].
    pub fn reserve(&self, claimed: &Claimed, len: u64, probe: &MemoryProbe) -> Result<Option<u64>> {
        let batch = self.claims().of(claimed);
        let mut room = batch.room();
        loop {
            let rows = room.form().map(|at| self.rows_at(claimed, at)).transpose()?;
            // Not 0, where no form can lie.
            let floor = rows.map_or_else(|| self.len_in_window(claimed.plan.len), |rows| rows.end).max(1);
            let Some(start) = room.before_top(len).filter(|&start| start >= floor) else { return Ok(None) };
            self.warm(claimed.plan.window, End::Back, self.window.saturating_sub(start), probe)?;
            match batch.reserve(room, start) {
                Ok(()) => return Ok(Some(start)),
                Err(now) => room = now,
            }
        }
    }

    /// The address of bytes of a batch, which this process may use as [`joint`](crate::joint) says.
    ///
    /// # Errors
    /// [`Error::Corrupt`] when they do not lie in it.
    pub fn pointer(&self, claimed: &Claimed, offset: u64, len: u64) -> Result<NonNull<u8>> {
        self.bytes.pointer(self.location(claimed, offset, len)?, len)
    }

    /// Replaces `into` by a copy of bytes of a batch.
    ///
    /// # Errors
    /// As [`pointer`](Self::pointer).
    pub fn copy_out(&self, claimed: &Claimed, offset: u64, len: u64, into: &mut Vec<u8>) -> Result<()> {
        self.bytes.copy_out(self.location(claimed, offset, len)?, len, into)
    }

    /// Copies bytes of a batch to memory of the caller's.
    ///
    /// # Errors
    /// As [`pointer`](Self::pointer).
    pub fn fill(&self, claimed: &Claimed, offset: u64, into: &mut [MaybeUninit<u8>]) -> Result<()> {
        self.bytes.fill(self.location(claimed, offset, into.len() as u64)?, into)
    }

    fn location(&self, claimed: &Claimed, offset: u64, len: u64) -> Result<u64> {
        if offset.checked_add(len).is_none_or(|end| end > self.window) {
            return Err(Error::Corrupt(format!("{len} bytes at {offset} of a batch of {}", self.window)));
        }
        let window = claimed.plan.window;
        if window >= windows_for(self.places) {
            return Err(Error::Corrupt(format!("window {window} of {}", windows_for(self.places))));
        }
        Ok(self.start(window) + offset)
    }
}

fn words_for(places: u32, timed: bool) -> usize {
    let times = if timed { places as usize * run_times::WORDS } else { 0 };
    Claims::words(places) + windows_for(places) as usize * OF_WINDOW + times
}

/// Returns the number of windows: for the batches under way, for as many that the user keeps, and for one in between.
fn windows_for(places: u32) -> u32 {
    2 * places + 1
}

fn bytes_for(places: u32, window: u64) -> Result<u64> {
    window.checked_mul(windows_for(places).into()).ok_or_else(|| too_many(places, window))
}

fn too_many(places: u32, window: u64) -> Error {
    Error::Config(format!("{places} batches of {window} bytes are too many; use a smaller prefetch_factor"))
}

/// A worker's claim of a batch.
#[derive(Debug, Clone, Copy)]
pub struct Claimed {
    place: usize,
    /// The batch.
    pub plan: JointPlan,
    /// The claim.
    pub claim: Claim,
}

impl Claimed {
    /// The samples of the run, as a range of the batch's; all for the collation.
    #[must_use]
    pub fn samples(&self) -> Range<u64> {
        match self.claim.run {
            Some(run) => self.samples_of(run),
            None => 0..self.plan.samples,
        }
    }

    /// The samples of a run.
    #[must_use]
    pub fn samples_of(&self, run: u32) -> Range<u64> {
        samples_of(&self.plan, run)
    }

    /// Returns true if the batch is made by one worker.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.plan.runs() == 1
    }
}

fn samples_of(plan: &JointPlan, run: u32) -> Range<u64> {
    let start = (u64::from(run) * plan.per_run).min(plan.samples);
    start..(start + plan.per_run).min(plan.samples)
}

#[cfg(all(test, not(ringloader_loom)))]
mod tests {
    use super::*;
    use crate::batch::Dtype;
    use crate::batch::rows::{Column, ColumnKind, SampleForm};
    use crate::joint::Part;

    const WINDOW: u64 = 1 << 22;

    struct Machine(std::path::PathBuf);

    impl Machine {
        fn with_free(kib: u64) -> (Self, MemoryProbe) {
            let path = std::env::temp_dir().join(format!("ringloader-joint-{kib}-{}", std::process::id()));
            std::fs::write(&path, format!("MemAvailable: {kib} kB\n")).unwrap();
            (Self(path.clone()), MemoryProbe::reading(path))
        }
    }

    impl Drop for Machine {
        fn drop(&mut self) {
            let _ = std::fs::remove_file(&self.0);
        }
    }

    /// A row of a quarter of a megabyte.
    fn form(rows: i64) -> SampleForm {
        SampleForm::Column(Column { kind: ColumnKind::Tensor, dtype: Dtype::F32, shape: vec![rows << 16] })
    }

    #[test]
    fn only_cold_pages_of_a_window_are_asked_for() {
        let (_large, plenty) = Machine::with_free(8192);
        let (_small, little) = Machine::with_free(256);
        let (memory, windows, _fd) = JointMemory::create(1, WINDOW, false).unwrap();
        let tasks = JointTasks::new(memory, Arc::new(windows), 1, true);
        let memory = tasks.memory();
        let made = |seq, form: &SampleForm, probe: &MemoryProbe| {
            tasks.put(seq, (TaskKind::Indices, vec![0; 16]), 2).unwrap();
            let claimed = memory.claims().claim(0, |_| true).unwrap();
            let found = memory.columns_of(&claimed, form, probe).map(|places| places.is_some());
            let after =
                memory.rows(&claimed).unwrap().map(|rows| memory.after_rows(&claimed, rows.end, 512, probe));
            memory.claims().of(&claimed).finish(claimed.claim, Part::Rows);
            tasks.answered(seq, false).unwrap();
            (found, after.is_some_and(|start| matches!(start, Ok(Some(_)))))
        };
        let refused = |found| matches!(found, (Err(Error::Memory(_)), false));
        assert!(refused(made(0, &form(1), &little)), "cold");
        assert_eq!(made(1, &form(1), &plenty), (Ok(true), true));
        assert_eq!(made(2, &form(1), &little), (Ok(true), true), "the same window, warm");
        assert!(refused(made(3, &SampleForm::List(vec![form(1), form(2)]), &little)), "more of it");
    }

    #[test]
    fn only_cold_pages_of_a_windows_end_are_asked_for() {
        let (_large, plenty) = Machine::with_free(8192);
        let (_small, little) = Machine::with_free(256);
        let (memory, windows, _fd) = JointMemory::create(1, WINDOW, false).unwrap();
        let tasks = JointTasks::new(memory, Arc::new(windows), 1, true);
        let memory = tasks.memory();
        let reserved = |seq, len, probe: &MemoryProbe| {
            tasks.put(seq, (TaskKind::Indices, vec![0; 16]), 2).unwrap();
            let claimed = memory.claims().claim(0, |_| true).unwrap();
            let found = memory.reserve(&claimed, len, probe);
            memory.claims().of(&claimed).finish(claimed.claim, Part::Unsent);
            tasks.answered(seq, false).unwrap();
            found
        };
        assert!(matches!(reserved(0, WINDOW / 2, &little), Err(Error::Memory(_))));
        assert_eq!(reserved(1, WINDOW / 2, &plenty), Ok(Some(WINDOW / 2)));
        assert_eq!(reserved(2, WINDOW / 2, &little), Ok(Some(WINDOW / 2)));
        assert!(matches!(reserved(3, WINDOW - 64, &little), Err(Error::Memory(_))));
    }
}
