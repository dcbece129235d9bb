//! The bytes of a batch that nobody has reserved.

/// The room is counted in units of this many bytes.
const UNIT: u64 = 64;
/// The bit from which on a room says where the form of the rows lies.
const ROWS: u32 = 32;

/// The bytes of a batch that are not reserved: those below `top`, from the end of the index on, or from the end of the
/// rows on if these are laid out. One word, so that rows and parts never overlap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room(pub(super) u64);

impl Room {
    /// All `bytes` of a window; of a very large one, as many as can be counted.
    pub(super) fn of(bytes: u64) -> Self {
        Self((bytes / UNIT).min((1 << ROWS) - 1))
    }

    /// Returns the start of the reserved bytes, which reach to the end.
    #[must_use]
    pub fn top(self) -> u64 {
        (self.0 & ((1 << ROWS) - 1)) * UNIT
    }

    /// Returns the place of the rows' form, if a worker has laid them out.
    #[must_use]
    pub fn form(self) -> Option<u64> {
        let at = self.0 >> ROWS;
        (at != 0).then_some(at * UNIT)
    }

    /// Returns the start of `len` bytes that end at the top. `None`: there is no room.
    #[must_use]
    pub fn before_top(self, len: u64) -> Option<u64> {
        self.top().checked_sub(len.checked_next_multiple_of(UNIT)?)
    }

    /// With all bytes from `start` on reserved.
    pub(super) fn up_to(self, start: u64) -> Self {
        Self((self.0 >> ROWS << ROWS) | (start / UNIT))
    }

    /// With rows that are laid out, whose form lies at `form`.
    pub(super) fn with_form(self, form: u64) -> Self {
        Self(self.0 | ((form / UNIT) << ROWS))
    }
}
