//! The rows of a batch: which form they have, and where they lie.

use super::{Claimed, End, JointMemory};
use crate::batch::SkeletonWriter;
use crate::batch::rows::{Place, SampleForm};
use crate::error::{Error, Result};
use crate::os::memory::MemoryProbe;

/// Bytes before the form of a batch's rows, which are their number.
const FORM_HEADER: u64 = 8;
/// Bytes after the rows begin at a multiple of this.
const ALIGNMENT: u64 = 64;

/// The rows of a batch.
#[derive(Debug)]
pub struct Rows {
    /// The form of the samples.
    pub form: SampleForm,
    /// The places of its columns.
    pub columns: Vec<Place>,
    /// The end of the last one.
    pub end: u64,
}

impl JointMemory {
    /// The places of the batch's columns, if its rows are those of samples of this form. The first worker that asks says
    /// of which form they are. `None`: of another, or there is no room.
    ///
    /// # Errors
    /// [`Error::Memory`] when the machine or the control group has not enough left; [`Error::Corrupt`].
    pub fn columns_of(
        &self,
        claimed: &Claimed,
        form: &SampleForm,
        probe: &MemoryProbe,
    ) -> Result<Option<Vec<Place>>> {
        let mut skeleton = SkeletonWriter::new();
        form.write(&mut skeleton);
        let mut header = (skeleton.as_bytes().len() as u64).to_le_bytes().to_vec();
        header.extend(skeleton.as_bytes());
        let len = header.len() as u64;
        let Some((places, end)) = form.places(self.len_in_window(claimed.plan.len), claimed.plan.samples)
        else {
            return Ok(None);
        };
        let batch = self.claims().of(claimed);
        let mut written = None;
        let mut room = batch.room();
        let at = loop {
            if let Some(at) = room.form() {
                break at;
            }
            if end > room.top() {
                return Ok(None);
            }
            let Some(at) = written else {
                self.warm(claimed.plan.window, End::Front, end, probe)?;
                let Some(at) = self.reserve(claimed, len, probe)? else { return Ok(None) };
                self.bytes.copy_in(self.location(claimed, at, len)?, &header)?;
                written = Some(at);
                room = batch.room();
                continue;
            };
            match batch.lay_out_rows(room, at) {
                Ok(()) => return Ok(Some(places)),
                Err(now) => room = now,
            }
        };
        let mut found = Vec::new();
        if self.copy_out(claimed, at, len, &mut found).is_err() {
            // A shorter one, at the end of the window.
            return Ok(None);
        }
        Ok((found == header).then_some(places))
    }

    /// The rows of the batch; `None` if no worker has laid them out.
    ///
    /// # Errors
    /// [`Error::Corrupt`] for what no worker writes.
    pub fn rows(&self, claimed: &Claimed) -> Result<Option<Rows>> {
        self.claims().of(claimed).room().form().map(|at| self.rows_at(claimed, at)).transpose()
    }

    pub(super) fn rows_at(&self, claimed: &Claimed, at: u64) -> Result<Rows> {
        let mut bytes = Vec::new();
        self.copy_out(claimed, at, FORM_HEADER, &mut bytes)?;
        let len = bytes.first_chunk().map_or(0, |first| u64::from_le_bytes(*first));
        self.copy_out(claimed, at.saturating_add(FORM_HEADER), len, &mut bytes)?;
        let form = SampleForm::read(&bytes)?;
        let places = form.places(self.len_in_window(claimed.plan.len), claimed.plan.samples);
        let (columns, end) = places
            .filter(|(_, end)| *end <= self.window)
            .ok_or_else(|| Error::Corrupt("rows beyond their window".into()))?;
        Ok(Rows { form, columns, end })
    }

    /// Returns where `len` bytes begin that come after the rows, which end at `end`; `None`: there is no room. For the
    /// worker that collates: nobody reserves anything any more.
    ///
    /// # Errors
    /// [`Error::Memory`] when the machine or the control group has not enough left.
    pub fn after_rows(
        &self,
        claimed: &Claimed,
        end: u64,
        len: u64,
        probe: &MemoryProbe,
    ) -> Result<Option<u64>> {
        let start = end.next_multiple_of(ALIGNMENT);
        let top = self.claims().of(claimed).room().top();
        let Some(end) = start.checked_add(len).filter(|&end| end <= top) else { return Ok(None) };
        self.warm(claimed.plan.window, End::Front, end, probe)?;
        Ok(Some(start))
    }
}
