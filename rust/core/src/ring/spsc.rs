//! A ring of 64-byte descriptors between one producer and one consumer in two processes.
//!
//! State and storage are apart. [`RingHeader`] and the [`Descriptor`]s are borrowed, from the
//! mapping in production and from the heap under test; [`Producer`] and [`Consumer`] own only
//! positions, and take the [`Ring`] at each call. All storage is atomic, so nothing here is unsafe,
//! whatever the other process writes: a position that no correct peer publishes is an
//! [`Error::Corrupt`](crate::Error::Corrupt), and words are only as good as their reader's checks.
//!
//! **One commit point.** The words of a descriptor are stored relaxed; the release store of `tail`
//! publishes them and everything that the producer wrote before it: either the descriptor is there
//! and whole, or it is not there. The release store of `head` hands the slot, and whatever went
//! with it, back to the producer.
//!
//! Every call is wait-free: a fixed number of steps, whatever the peer does, and no allocation but
//! for an error's text.

use super::cursor;
use crate::Result;
use crate::sync::{AtomicU64, CachePadded, Ordering, acquire_unless, release_unless};
use crate::testing::failpoint::failpoint;
use crate::testing::planted;

/// The number of words of a descriptor.
pub const WORDS: usize = 8;

/// The content of a descriptor. What the words mean is its users' matter.
pub type Words = [u64; WORDS];

/// The two positions of a ring. Zeroed memory is the header of an empty ring.
#[repr(C)]
#[derive(Debug, Default)]
pub struct RingHeader {
    /// The number of descriptors that were ever pushed. Stored by the producer only.
    tail: CachePadded<AtomicU64>,
    /// The number of descriptors that were ever popped, `tail - slots ..= tail`. Stored by the consumer only.
    head: CachePadded<AtomicU64>,
}

/// One slot of a ring: a cache line of words.
#[repr(C, align(64))]
#[derive(Debug, Default)]
pub struct Descriptor {
    words: [AtomicU64; WORDS],
}

#[cfg(not(ringloader_loom))]
const _: () = {
    assert!(size_of::<Descriptor>() == 64 && align_of::<Descriptor>() == 64);
    assert!(size_of::<RingHeader>() == 256 && align_of::<RingHeader>() == 128);
};

impl Descriptor {
    #[inline]
    fn store(&self, words: &Words) {
        for (to, from) in self.words.iter().zip(words) {
            to.store(*from, Ordering::Relaxed);
        }
    }

    #[inline]
    fn load(&self) -> Words {
        std::array::from_fn(|at| self.words[at].load(Ordering::Relaxed))
    }
}

/// The borrowed storage of a ring.
#[derive(Debug, Clone, Copy)]
pub struct Ring<'a> {
    header: &'a RingHeader,
    /// INVARIANT: the length is a power of two.
    slots: &'a [Descriptor],
}

impl<'a> Ring<'a> {
    /// A ring over `header` and `slots`, whose number is a power of two.
    pub fn new(header: &'a RingHeader, slots: &'a [Descriptor]) -> Self {
        debug_assert!(slots.len().is_power_of_two());
        Self { header, slots }
    }

    /// The number of slots.
    #[inline]
    pub fn capacity(&self) -> u64 {
        self.slots.len() as u64
    }

    /// Returns the number of descriptors in the ring. Only one of the two ends may ask, as its own position stands
    /// still. A third thread could see two positions of different times, and take a busy ring for a corrupt one.
    ///
    /// # Errors
    /// [`Error::Corrupt`](crate::Error::Corrupt) if the two positions cannot belong together.
    pub fn len(&self) -> Result<u64> {
        let (tail, head) = self.positions();
        cursor::occupied(tail, head, self.capacity())
    }

    /// Returns true if the ring has no descriptors. The rules of [`len`](Self::len) apply.
    ///
    /// # Errors
    /// [`Error::Corrupt`](crate::Error::Corrupt) if the two positions cannot belong together.
    pub fn is_empty(&self) -> Result<bool> {
        Ok(self.len()? == 0)
    }

    fn positions(&self) -> (u64, u64) {
        (self.header.tail.0.load(Ordering::Acquire), self.header.head.0.load(Ordering::Acquire))
    }

    #[inline]
    fn slot(&self, position: u64) -> &'a Descriptor {
        &self.slots[cursor::index(position, self.slots.len())]
    }
}

/// The pushing end: its positions, without the storage. There is one at a time for a ring, which
/// must be the same ring at each call.
#[derive(Debug)]
pub struct Producer {
    /// The next position to push at; `header.tail` has this value after each call.
    tail: u64,
    /// The last `header.head` that was seen: stale, never ahead. INVARIANT: `tail - capacity <=
    /// seen_head <= tail`.
    seen_head: u64,
}

impl Producer {
    /// The end that continues at the ring's positions: at the beginning of a new ring, or
    /// where a producer that has died committed last. What it stored without committing is
    /// overwritten.
    ///
    /// # Errors
    /// [`Error::Corrupt`](crate::Error::Corrupt) if the two positions cannot belong together.
    pub fn attach(ring: Ring<'_>) -> Result<Self> {
        let (tail, head) = ring.positions();
        cursor::occupied(tail, head, ring.capacity())?;
        Ok(Self { tail, seen_head: head })
    }

    /// Pushes a descriptor; `false` if the ring is full.
    ///
    /// # Errors
    /// [`Error::Corrupt`](crate::Error::Corrupt) if the ring looked full, and its consumer has published an impossible
    /// `head`.
    #[inline]
    pub fn push(&mut self, ring: Ring<'_>, words: &Words) -> Result<bool> {
        let tail = self.tail;
        let full = |head| tail.wrapping_sub(head) >= ring.capacity();
        if full(self.seen_head) && full(self.head(ring)?) {
            return Ok(false);
        }
        let next = tail.wrapping_add(1);
        planted!("tail_before_words" => ring.header.tail.0.store(next, Ordering::Release));
        ring.slot(tail).store(words);
        failpoint("words-stored");
        // ORDERING tail: the words, and all that they stand for, happen before the consumer's load
        // of this position.
        ring.header.tail.0.store(next, release_unless("tail_relaxed"));
        self.tail = next;
        Ok(true)
    }

    /// The words of the descriptor that the consumer took last, if they are still there.
    ///
    /// # Errors
    /// As [`head`](Self::head).
    pub fn last_taken(&mut self, ring: Ring<'_>) -> Result<Option<(u64, Words)>> {
        let last = self.head(ring)?.wrapping_sub(1);
        // A ring that was never pushed to has zeros there, which are no descriptor of anything.
        let overwritten = self.tail.wrapping_sub(last) > ring.capacity();
        Ok((!overwritten).then(|| (last, ring.slot(last).load())))
    }

    /// The consumer's position, read afresh: whatever was pushed at earlier positions is the
    /// producer's again.
    ///
    /// # Errors
    /// [`Error::Corrupt`](crate::Error::Corrupt) if it went back, or beyond what was pushed.
    #[inline]
    pub fn head(&mut self, ring: Ring<'_>) -> Result<u64> {
        // ORDERING head: the consumer's last use of a slot and of its bytes happens before they are
        // written again.
        let head = ring.header.head.0.load(acquire_unless("head_load_relaxed"));
        cursor::advanced("head", self.seen_head, head, self.tail)?;
        self.seen_head = head;
        Ok(head)
    }

    /// Returns true if the consumer has taken something since this end last looked.
    ///
    /// # Errors
    /// As [`head`](Self::head).
    pub fn has_new_head(&mut self, ring: Ring<'_>) -> Result<bool> {
        let seen = self.seen_head;
        Ok(self.head(ring)? != seen)
    }

    /// The position at which the next descriptor will be pushed.
    #[inline]
    pub fn tail(&self) -> u64 {
        self.tail
    }
}

/// The popping end: its positions, without the storage. There is one at a time for a ring, which
/// must be the same ring at each call.
#[derive(Debug)]
pub struct Consumer {
    /// The next position to pop at; `header.head` has this value after each call.
    head: u64,
    /// The last `header.tail` that was seen: stale, never ahead. INVARIANT: `head <= seen_tail <=
    /// head + capacity`.
    seen_tail: u64,
}

impl Consumer {
    /// The end that continues at the ring's positions: at the beginning of a new ring, or at
    /// the first descriptor that a consumer that has died did not hand back.
    ///
    /// # Errors
    /// [`Error::Corrupt`](crate::Error::Corrupt) if the two positions cannot belong together.
    pub fn attach(ring: Ring<'_>) -> Result<Self> {
        let (tail, head) = ring.positions();
        cursor::occupied(tail, head, ring.capacity())?;
        // Does not keep the `tail` just read: the load that orders the words is that of `peek`.
        Ok(Self { head, seen_tail: head })
    }

    /// The oldest descriptor, which stays in the ring, or `None` if there is none.
    ///
    /// # Errors
    /// [`Error::Corrupt`](crate::Error::Corrupt) if the ring looked empty, and its producer has published an impossible
    /// `tail`.
    #[inline]
    pub fn peek(&mut self, ring: Ring<'_>) -> Result<Option<Words>> {
        Ok(if self.is_empty(ring)? { None } else { Some(ring.slot(self.head).load()) })
    }

    /// Returns true if the ring has no descriptor.
    ///
    /// # Errors
    /// As [`peek`](Self::peek).
    #[inline]
    pub fn is_empty(&mut self, ring: Ring<'_>) -> Result<bool> {
        if self.head == self.seen_tail {
            // ORDERING tail: all that the producer wrote before it published this position happens
            // before this load.
            let tail = ring.header.tail.0.load(acquire_unless("tail_load_relaxed"));
            cursor::advanced("tail", self.head, tail, self.head.wrapping_add(ring.capacity()))?;
            self.seen_tail = tail;
        }
        Ok(self.head == self.seen_tail)
    }

    /// Hands the oldest descriptor's slot back to the producer, with the bytes that went with it:
    /// the caller is done with both.
    ///
    /// # Panics
    /// If no [`peek`](Self::peek) has seen that descriptor: no caller can be done with what it has not
    /// seen.
    #[inline]
    pub fn advance(&mut self, ring: Ring<'_>) {
        assert!(self.head != self.seen_tail, "advance() without a descriptor that peek() has returned");
        self.head = self.head.wrapping_add(1);
        // ORDERING head: this end's reads of the slot and of its bytes happen before the producer's
        // load of this.
        ring.header.head.0.store(self.head, release_unless("head_relaxed"));
    }

    /// Takes the oldest descriptor out of the ring, or `None` if there is none. For descriptors
    /// that no bytes go with: the slot is the producer's again on return.
    ///
    /// # Errors
    /// As [`peek`](Self::peek).
    #[inline]
    pub fn pop(&mut self, ring: Ring<'_>) -> Result<Option<Words>> {
        if self.is_empty(ring)? {
            return Ok(None);
        }
        let words = ring.slot(self.head).load();
        self.advance(ring);
        Ok(Some(words))
    }
}

#[cfg(all(test, not(ringloader_loom)))]
mod tests;
