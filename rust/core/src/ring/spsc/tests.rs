use std::collections::VecDeque;

use proptest::prelude::*;

use super::*;
use crate::Error;

fn slots(count: usize) -> Vec<Descriptor> {
    (0..count).map(|_| Descriptor::default()).collect()
}

/// Words that differ from each other and from those of every other position.
fn words(number: u64) -> Words {
    std::array::from_fn(|at| number.wrapping_mul(WORDS as u64).wrapping_add(at as u64 + 1))
}

/// The header of an empty ring whose positions begin at `position`.
fn header_at(position: u64) -> RingHeader {
    let header = RingHeader::default();
    header.tail.0.store(position, Ordering::Relaxed);
    header.head.0.store(position, Ordering::Relaxed);
    header
}

fn corrupt<T: std::fmt::Debug>(result: Result<T>) -> String {
    match result {
        Err(Error::Corrupt(text)) => text,
        other => panic!("expected a corrupt ring, got {other:?}"),
    }
}

#[test]
fn peek_leaves_the_descriptor_and_its_slot() {
    let (header, slots) = (RingHeader::default(), slots(1));
    let ring = Ring::new(&header, &slots);
    let (mut producer, mut consumer) =
        (Producer::attach(ring).expect("new"), Consumer::attach(ring).expect("new"));
    assert!(producer.push(ring, &words(0)).expect("sound"));
    assert_eq!(consumer.peek(ring), Ok(Some(words(0))));
    assert_eq!(consumer.peek(ring), Ok(Some(words(0))));
    assert_eq!(producer.push(ring, &words(1)), Ok(false), "the slot is not handed back before advance()");
    consumer.advance(ring);
    assert_eq!(producer.push(ring, &words(1)), Ok(true));
    assert_eq!(consumer.pop(ring), Ok(Some(words(1))));
    assert_eq!(consumer.pop(ring), Ok(None));
    assert_eq!(ring.is_empty(), Ok(true));
}

#[test]
#[should_panic(expected = "without a descriptor")]
fn advance_needs_a_descriptor() {
    let (header, slots) = (RingHeader::default(), slots(2));
    let ring = Ring::new(&header, &slots);
    Consumer::attach(ring).expect("new").advance(ring);
}

#[test]
fn a_head_that_passed_the_tail_is_corrupt() {
    let (header, slots) = (RingHeader::default(), slots(2));
    let ring = Ring::new(&header, &slots);
    let mut producer = Producer::attach(ring).expect("new");
    header.head.0.store(1, Ordering::Relaxed);
    assert!(corrupt(producer.head(ring)).contains("went from 0 to 1; it only grows, and can be 0 at most"));
    corrupt(ring.len());
    corrupt(Producer::attach(ring));
    corrupt(Consumer::attach(ring));
    header.head.0.store(0, Ordering::Relaxed);
    assert_eq!(producer.push(ring, &words(0)), Ok(true));
    assert_eq!(producer.push(ring, &words(1)), Ok(true));
    header.head.0.store(u64::MAX, Ordering::Relaxed);
    corrupt(producer.push(ring, &words(2)));
    assert_eq!(producer.tail(), 2, "a failed push moves nothing");
}

#[test]
fn a_head_that_went_back_is_corrupt() {
    let (header, slots) = (RingHeader::default(), slots(2));
    let ring = Ring::new(&header, &slots);
    let (mut producer, mut consumer) =
        (Producer::attach(ring).expect("new"), Consumer::attach(ring).expect("new"));
    producer.push(ring, &words(0)).expect("sound");
    consumer.pop(ring).expect("sound");
    assert_eq!(producer.head(ring), Ok(1));
    header.head.0.store(0, Ordering::Relaxed);
    corrupt(producer.head(ring));
}

#[test]
fn a_tail_beyond_the_slots_or_gone_back_is_corrupt() {
    let (header, slots) = (header_at(10), slots(4));
    let ring = Ring::new(&header, &slots);
    let mut consumer = Consumer::attach(ring).expect("new");
    for tail in [15, 9, u64::MAX] {
        header.tail.0.store(tail, Ordering::Relaxed);
        corrupt(consumer.peek(ring));
    }
    header.tail.0.store(14, Ordering::Relaxed);
    assert!(consumer.peek(ring).expect("all slots taken").is_some());
}

#[test]
fn new_ends_go_on_where_the_dead_ones_stopped() {
    let (header, slots) = (RingHeader::default(), slots(2));
    let ring = Ring::new(&header, &slots);
    let mut producer = Producer::attach(ring).expect("new");
    producer.push(ring, &words(0)).expect("sound");
    let mut consumer = Consumer::attach(ring).expect("new");
    assert_eq!(consumer.peek(ring), Ok(Some(words(0))));
    let (mut producer, mut consumer) =
        (Producer::attach(ring).expect("sound"), Consumer::attach(ring).expect("sound"));
    assert_eq!(producer.push(ring, &words(1)), Ok(true));
    assert_eq!(producer.push(ring, &words(2)), Ok(false));
    assert_eq!(consumer.pop(ring), Ok(Some(words(0))), "taken, not handed back: still there");
    assert_eq!(consumer.pop(ring), Ok(Some(words(1))));
}

#[derive(Debug, Clone, Copy)]
enum Step {
    Push,
    Pop,
    Peek,
    Head,
    AttachProducer,
    AttachConsumer,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        6 => Just(Step::Push),
        5 => Just(Step::Pop),
        2 => Just(Step::Peek),
        1 => Just(Step::Head),
        1 => Just(Step::AttachProducer),
        1 => Just(Step::AttachConsumer),
    ]
}

proptest! {
    #[test]
    fn agrees_with_a_queue(
        bits in 0..5_u32, first in prop_oneof![Just(0), Just(u64::MAX - 7), any::<u64>()],
        steps in prop::collection::vec(step(), 0..200),
    ) {
        let (header, slots) = (header_at(first), slots(1 << bits));
        let ring = Ring::new(&header, &slots);
        let (mut producer, mut consumer) = (Producer::attach(ring)?, Consumer::attach(ring)?);
        let (mut model, mut pushed, mut popped) = (VecDeque::new(), 0_u64, 0_u64);
        for step in steps {
            match step {
                Step::Push => {
                    let room = model.len() < slots.len();
                    prop_assert_eq!(producer.push(ring, &words(pushed))?, room);
                    if room {
                        model.push_back(words(pushed));
                        pushed += 1;
                    }
                }
                Step::Pop => {
                    let expected = model.pop_front();
                    popped += u64::from(expected.is_some());
                    prop_assert_eq!(consumer.pop(ring)?, expected);
                }
                Step::Peek => prop_assert_eq!(consumer.peek(ring)?, model.front().copied()),
                Step::Head => prop_assert_eq!(producer.head(ring)?, first.wrapping_add(popped)),
                Step::AttachProducer => producer = Producer::attach(ring)?,
                Step::AttachConsumer => consumer = Consumer::attach(ring)?,
            }
            prop_assert_eq!(ring.len()?, model.len() as u64);
            prop_assert_eq!(producer.tail(), first.wrapping_add(pushed));
            prop_assert_eq!(consumer.head, first.wrapping_add(popped));
        }
    }
}
