//! Tells which workers have committed something since the parent last looked: a bit for each worker. A parent that
//! takes results as they come looks only at the rings of those workers, however many workers there are.
//!
//! ```text
//! worker                               parent
//! commit (the store of tail)           collect: shared bits = 0, and into its own set
//! set: shared bit = 1                  look at the rings of its own set
//! doorbell: is the parent asleep?      nothing there: out of its own set
//! ```
//!
//! INVARIANT: for each descriptor in a worker's ring, the worker's bit is shared, or in the parent's own set, or the
//! worker is between its commit and its set. So what was committed is found, by this look or by the next: the shared
//! bits change by read-modify-writes only, which have one order. The parent's swap sees a set that comes before it, and
//! the look that follows sees the commit (`ORDERING ready`); a set that comes after it stays for the next. A worker
//! that dies in between is [looked at](Ready::look_at) because it has ended.
//!
//! For the doorbell, the set is what publishes and collecting is the second look: no wake-up is lost, as its page
//! argues. A bit too many costs a look that finds nothing.

use super::{AtomicU64, Ordering, acquire_unless, release_unless};
use crate::Result;
use crate::bits::{Bits, words_for};
use crate::number::u32_from;
use crate::testing::planted;

/// The shared bits, borrowed. Zeroed memory is the bits of workers that have committed nothing.
#[derive(Debug, Clone, Copy)]
pub struct ReadyBits<'a>(&'a [AtomicU64]);

impl<'a> ReadyBits<'a> {
    /// The bits in `words`, of which there must be one for each 64 workers.
    pub fn new(words: &'a [AtomicU64]) -> Self {
        Self(words)
    }

    /// Returns the number of words that `workers` need.
    pub const fn words(workers: u32) -> usize {
        words_for(workers as usize)
    }

    /// Says that `worker` has committed something. Called **after** the commit and before the doorbell.
    ///
    /// Sets the bit in any case, and not only if it is clear: the value that a look finds may be old.
    #[inline]
    pub fn set(&self, worker: u32) {
        let (word, bit) = (&self.0[worker as usize / 64], 1 << (worker % 64));
        planted!("ready_set_if_clear" => if word.load(Ordering::Relaxed) & bit != 0 { return });
        // ORDERING ready: the commit happens before the looks of the side that collects this bit.
        word.fetch_or(bit, release_unless("ready_relaxed"));
    }
}

/// The parent's own set: workers whose rings may have something, and whose turn it is among them.
#[derive(Debug)]
pub struct Ready {
    own: Bits,
    workers: usize,
    /// The worker that is looked at first, so that none starves.
    first: usize,
}

impl Ready {
    /// The set of none of `workers` workers.
    pub fn new(workers: u32) -> Self {
        let workers = workers as usize;
        Self { own: Bits::new(workers), workers, first: 0 }
    }

    /// Lets the next [`find`](Self::find) look at `worker` whatever its bit says: it has ended.
    pub fn look_at(&mut self, worker: u32) {
        self.own.set(worker as usize, true);
    }

    /// The turn of `worker` is over; it comes again after all others'.
    pub fn pass(&mut self, worker: u32) {
        self.first = (worker as usize + 1) % self.workers;
    }

    /// The next worker in turn that `has` something. Each look that finds nothing takes away a bit, which a commit has
    /// paid for: for a batch that is one step, for any number of workers up to 64.
    ///
    /// # Errors
    /// The errors of `has`.
    pub fn find(
        &mut self,
        shared: ReadyBits<'_>,
        mut has: impl FnMut(u32) -> Result<bool>,
    ) -> Result<Option<u32>> {
        self.collect(shared);
        while let Some(worker) = self.own.first_from(self.first) {
            if has(u32_from(worker as u64))? {
                return Ok(Some(u32_from(worker as u64)));
            }
            self.own.set(worker, false);
        }
        Ok(None)
    }

    fn collect(&mut self, ReadyBits(shared): ReadyBits<'_>) {
        for (at, (own, shared)) in self.own.words().iter_mut().zip(shared).enumerate() {
            // The load spares the exclusive access to the line while there is nothing new.
            if shared.load(Ordering::Relaxed) == 0 {
                continue;
            }
            // ORDERING ready: the commits for which these bits were set happen before the looks at their rings.
            let fresh = shared.swap(0, acquire_unless("ready_load_relaxed"));
            // Bits of no worker are ignored: whatever another process wrote, only rings that exist are looked at.
            let bits = self.workers - at * 64;
            *own |= fresh & if bits < 64 { (1 << bits) - 1 } else { u64::MAX };
        }
    }
}

#[cfg(all(test, not(ringloader_loom)))]
mod tests {
    use super::*;

    fn shared(workers: u32) -> Vec<AtomicU64> {
        (0..ReadyBits::words(workers)).map(|_| AtomicU64::new(0)).collect()
    }

    /// Workers that are looked at, each of which has something, until there are none.
    fn found(ready: &mut Ready, words: &[AtomicU64], mut left: Vec<u32>) -> Vec<u32> {
        let mut found = Vec::new();
        let mut has = left.clone();
        while let Some(worker) =
            ready.find(ReadyBits::new(words), |worker| Ok(has.contains(&worker))).unwrap()
        {
            left.remove(left.iter().position(|&one| one == worker).expect("has something"));
            has.clone_from(&left);
            ready.pass(worker);
            found.push(worker);
        }
        found
    }

    #[test]
    fn workers_take_turns() {
        for workers in [1, 3, 64, 65, 130] {
            let (words, mut ready) = (shared(workers), Ready::new(workers));
            (0..workers).for_each(|worker| ReadyBits::new(&words).set(worker));
            let twice: Vec<_> = (0..workers).chain(0..workers).collect();
            assert_eq!(found(&mut ready, &words, twice.clone()), twice);
            assert_eq!(found(&mut ready, &words, vec![]), []);
        }
    }

    #[test]
    fn only_those_with_a_bit_are_looked_at_and_once() {
        let (words, mut ready) = (shared(130), Ready::new(130));
        let looks = |ready: &mut Ready| {
            let mut looks = Vec::new();
            let none = ready.find(ReadyBits::new(&words), |worker| {
                looks.push(worker);
                Ok(false)
            });
            assert_eq!(none, Ok(None));
            looks
        };
        assert_eq!(looks(&mut ready), []);
        [129, 64, 3].iter().for_each(|&worker| ReadyBits::new(&words).set(worker));
        ready.look_at(63);
        ready.pass(63);
        assert_eq!(looks(&mut ready), [64, 129, 3, 63]);
        assert_eq!(looks(&mut ready), []);
    }

    #[test]
    fn who_was_ready_before_stays_so() {
        let (words, mut ready) = (shared(2), Ready::new(2));
        let shared = ReadyBits::new(&words);
        let find = |ready: &mut Ready| ready.find(shared, |_| Ok(true));
        [0, 1].iter().for_each(|&worker| shared.set(worker));
        assert_eq!(find(&mut ready), Ok(Some(0)));
        ready.pass(0);
        shared.set(0);
        assert_eq!(find(&mut ready), Ok(Some(1)));
    }

    #[test]
    fn bits_of_no_worker_are_ignored() {
        let (words, mut ready) = (shared(65), Ready::new(65));
        words.iter().for_each(|word| word.store(u64::MAX, Ordering::Relaxed));
        let all: Vec<_> = (0..65).collect();
        assert_eq!(found(&mut ready, &words, all.clone()), all);
    }

    #[test]
    fn a_worker_stays_until_a_look_has_found_nothing() {
        let (words, mut ready) = (shared(1), Ready::new(1));
        ReadyBits::new(&words).set(0);
        assert!(ready.find(ReadyBits::new(&words), |_| Err(crate::Error::Config("a ring".into()))).is_err());
        for _ in 0..3 {
            assert_eq!(ready.find(ReadyBits::new(&words), |_| Ok(true)), Ok(Some(0)));
        }
        assert_eq!(ready.find(ReadyBits::new(&words), |_| Ok(false)), Ok(None));
        assert_eq!(ready.find(ReadyBits::new(&words), |_| Ok(true)), Ok(None));
    }
}
