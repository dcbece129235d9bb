//! Our ring and rtrb's, used in the same way: each end has its ring, eight words go in and come out.

use ringloader_core::ring::{Consumer, Descriptor, Producer, Ring, RingHeader, WORDS, Words};

/// Slots of either ring.
pub(crate) const SLOTS: usize = 256;

/// One end that takes descriptors and one that gives them, over the same ring.
pub(crate) trait Push: Send {
    fn push(&mut self, words: &Words) -> bool;
}

pub(crate) trait Pop {
    fn pop(&mut self) -> Option<Words>;
}

/// An end with its ring, as rtrb's ends have theirs.
pub(crate) struct Ours<'a, End> {
    pub(crate) ring: Ring<'a>,
    pub(crate) end: End,
}

impl Push for Ours<'_, Producer> {
    #[inline(always)]
    fn push(&mut self, words: &Words) -> bool {
        self.end.push(self.ring, words).expect("sound")
    }
}

impl Pop for Ours<'_, Consumer> {
    #[inline(always)]
    fn pop(&mut self) -> Option<Words> {
        self.end.pop(self.ring).expect("sound")
    }
}

/// New ends of a ring that is empty.
pub(crate) fn ours(ring: Ring<'_>) -> (Ours<'_, Producer>, Ours<'_, Consumer>) {
    let producer = Producer::attach(ring).expect("sound");
    let consumer = Consumer::attach(ring).expect("sound");
    (Ours { ring, end: producer }, Ours { ring, end: consumer })
}

impl Push for rtrb::Producer<Words> {
    #[inline(always)]
    fn push(&mut self, words: &Words) -> bool {
        rtrb::Producer::push(self, *words).is_ok()
    }
}

impl Pop for rtrb::Consumer<Words> {
    #[inline(always)]
    fn pop(&mut self) -> Option<Words> {
        rtrb::Consumer::pop(self).ok()
    }
}

pub(crate) fn yardstick() -> (rtrb::Producer<Words>, rtrb::Consumer<Words>) {
    rtrb::RingBuffer::new(SLOTS)
}

/// Our ring on the heap instead of in the mapping.
pub(crate) struct Storage {
    header: RingHeader,
    slots: Vec<Descriptor>,
}

impl Storage {
    pub(crate) fn new() -> Self {
        Self { header: RingHeader::default(), slots: (0..SLOTS).map(|_| Descriptor::default()).collect() }
    }

    pub(crate) fn ring(&self) -> Ring<'_> {
        Ring::new(&self.header, &self.slots)
    }
}

pub(crate) fn words(number: u64) -> Words {
    [number; WORDS]
}
