//! A batch as it is laid out.

use super::MOST_RUNS;
use crate::number::u32_from;

/// A batch as it is laid out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JointPlan {
    /// The number of its task.
    pub seq: u64,
    /// The number of its samples.
    pub samples: u64,
    /// The samples of a run; the last one may have fewer.
    pub per_run: u64,
    /// The kind of its index.
    pub kind: u64,
    /// Bytes of its index, which lie at the start of the batch's bytes.
    pub len: u64,
    /// The number of the window that has the batch's bytes.
    pub window: u32,
}

impl JointPlan {
    /// Returns the number of runs. A batch without samples has one.
    #[must_use]
    pub fn runs(&self) -> u32 {
        let runs = self.samples.div_ceil(self.per_run.max(1)).clamp(1, u64::from(MOST_RUNS));
        u32_from(runs)
    }
}
