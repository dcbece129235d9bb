//! The content that a task's batch must have: a function of the task alone, known to both processes.

use std::sync::LazyLock;

use ringloader_core::transport::message::{Task, TaskKind};

/// A small generator of random numbers (splitmix64).
#[derive(Debug, Clone)]
pub(crate) struct Random(pub(crate) u64);

impl Random {
    /// The next number.
    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number below `bound`.
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    /// A number from 1 to `most`, of which each order of magnitude is as likely as the next.
    pub(crate) fn magnitude(&mut self, most: u64) -> u64 {
        let bits = self.below(u64::from(most.ilog2()) + 1);
        (1 + self.below(2 << bits)).min(most)
    }

    /// True once in `times`.
    pub(crate) fn once_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }
}

/// The kind of batches that the tasks of a run ask for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Profile {
    /// Another seed gives other batches.
    pub(crate) seed: u64,
    /// Leaves of a batch, at most.
    pub(crate) leaves: u64,
    /// Bytes of a leaf, at most.
    pub(crate) leaf: u64,
}

impl Profile {
    /// The task with this number: the profile, and bytes that only fill the arena.
    pub(crate) fn task(&self, seq: u64) -> Task {
        let mut random = Random(self.seed ^ seq.rotate_left(17));
        let mut bytes: Vec<u8> =
            [self.seed, self.leaves, self.leaf].into_iter().flat_map(u64::to_le_bytes).collect();
        bytes.extend_from_slice(pattern(random.next(), 8 * random.below(100)).0);
        Task { seq, kind: TaskKind::Indices, bytes }
    }

    /// The profile that a task carries, which must be whole.
    pub(crate) fn of(task: &Task) -> Self {
        let mut words = task.bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap()));
        let mut next = || words.next().expect("a task of this test has three words");
        let profile = Self { seed: next(), leaves: next(), leaf: next() };
        assert!(*task == profile.task(task.seq), "task {} arrived with other bytes than were sent", task.seq);
        profile
    }

    /// The leaves of the batch for task `seq`.
    pub(crate) fn batch(&self, seq: u64) -> Vec<LeafSpec> {
        let mut random = Random(self.seed.wrapping_mul(31) ^ seq.wrapping_mul(0x1_0000_01b3));
        let leaves = 1 + random.below(self.leaves);
        (0..leaves).map(|_| LeafSpec { phase: random.next(), len: random.magnitude(self.leaf) }).collect()
    }
}

/// One leaf: a periodic pattern.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct LeafSpec {
    /// The leaf's start in the period of the pattern.
    pub(crate) phase: u64,
    /// Length in bytes.
    pub(crate) len: u64,
}

impl LeafSpec {
    /// Returns the leaf's content, in pieces.
    pub(crate) fn pieces(self) -> impl Iterator<Item = &'static [u8]> {
        let mut rest = self.len;
        std::iter::from_fn(move || {
            let (piece, len) = pattern(self.phase, rest);
            rest -= len;
            (len > 0).then_some(piece)
        })
    }

    /// Returns true if `bytes` are the leaf's content.
    pub(crate) fn is_in(self, bytes: &[u8]) -> bool {
        let mut rest = bytes;
        let same = self.pieces().all(|piece| {
            let Some((head, tail)) = rest.split_at_checked(piece.len()) else { return false };
            rest = tail;
            head == piece
        });
        same && rest.is_empty()
    }
}

/// A prime: no two leaves of a batch begin at the same phase by the alignment of their addresses.
const PERIOD: usize = 65_521;

static PATTERN: LazyLock<Vec<u8>> = LazyLock::new(|| {
    let mut random = Random(1);
    let mut once: Vec<u8> = (0..PERIOD.div_ceil(8)).flat_map(|_| random.next().to_le_bytes()).collect();
    once.truncate(PERIOD);
    once.repeat(2)
});

/// At most one period of at most `len` bytes from `phase` on.
fn pattern(phase: u64, len: u64) -> (&'static [u8], u64) {
    let start = (phase % PERIOD as u64) as usize;
    let len = len.min(PERIOD as u64);
    (&PATTERN[start..start + len as usize], len)
}
