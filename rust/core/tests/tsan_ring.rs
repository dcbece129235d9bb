//! The ring between two real threads, with a plain payload beside it. `ci/tsan.sh` runs it under
//! ThreadSanitizer, without and with faults planted; elsewhere it is a small stress test.
//!
//! The test has no harness, and uses only spawn, join and the crate's atomics: the standard library is not
//! instrumented, and ThreadSanitizer would report its locks and channels (also those of the usual harness).

#[cfg(not(ringloader_loom))]
mod support;

#[cfg(not(ringloader_loom))]
fn main() {
    stress::main();
}

/// Loom's atomics need a model around them.
#[cfg(ringloader_loom)]
fn main() {}

#[cfg(not(ringloader_loom))]
mod stress {
    use ringloader_core::{
        ring::{ByteFifo, Consumer, Descriptor, Producer, Ring, RingHeader, WORDS, Words},
        sync::{Arc, doorbell::WaitFlag, thread},
    };

    use super::support::payload::Payload;

    const ITEMS: u64 = 100_000;
    /// Rounds with few slots and few bytes, so that each side waits for the other often.
    const SHAPES: [(usize, usize); 4] = [(1, 1), (2, 8), (8, 2), (64, 16)];

    struct Shared {
        header: RingHeader,
        slots: Vec<Descriptor>,
        /// The region of the bytes of the tasks: a cell for each 8 bytes.
        payload: Vec<Payload>,
        flag: WaitFlag,
    }

    impl Shared {
        fn ring(&self) -> Ring<'_> {
            Ring::new(&self.header, &self.slots)
        }
    }

    /// Words that tell `item` and where its bytes are, all of them of one item.
    fn words(item: u64, offset: u64) -> Words {
        let mut words = [item; WORDS];
        words[WORDS - 1] = offset;
        words
    }

    fn produce(shared: &Shared) -> u64 {
        let ring = shared.ring();
        let mut producer = Producer::attach(ring).expect("sound");
        let mut bytes = ByteFifo::new(8 * shared.payload.len() as u64);
        let mut notifications = 0;
        for item in 0..ITEMS {
            let offset = loop {
                match bytes.reserve(8) {
                    Some(offset) => break offset,
                    None => {
                        thread::yield_now();
                        bytes.reclaim(producer.head(ring).expect("sound"));
                    }
                }
            };
            shared.payload[offset as usize / 8].write(item);
            let position = producer.tail();
            while !producer.push(ring, &words(item, offset)).expect("sound") {
                thread::yield_now();
            }
            bytes.commit(position);
            notifications += u64::from(shared.flag.take());
        }
        notifications
    }

    fn consume(shared: &Shared) -> u64 {
        let ring = shared.ring();
        let mut consumer = Consumer::attach(ring).expect("sound");
        let mut sleeps = 0;
        for item in 0..ITEMS {
            let found = loop {
                if let Some(found) = consumer.peek(ring).expect("sound") {
                    break found;
                }
                shared.flag.announce();
                sleeps += 1;
                if consumer.peek(ring).expect("sound").is_none() {
                    thread::yield_now();
                }
                shared.flag.withdraw();
            };
            let offset = found[WORDS - 1];
            assert_eq!(found, words(item, offset), "torn or out of order");
            assert_eq!(shared.payload[offset as usize / 8].read(), item, "bytes of another task");
            consumer.advance(ring);
        }
        sleeps
    }

    pub(crate) fn main() {
        let mut operations = 0;
        for (slots, cells) in SHAPES {
            let shared = Arc::new(Shared {
                header: RingHeader::default(),
                slots: (0..slots).map(|_| Descriptor::default()).collect(),
                payload: Payload::cells(cells),
                flag: WaitFlag::default(),
            });
            let peer = Arc::clone(&shared);
            let producer = thread::spawn(move || produce(&peer));
            let sleeps = consume(&shared);
            let notifications = producer.join().expect("the producer found no fault");
            assert!(notifications <= sleeps, "{notifications} notifications for {sleeps} sleeps");
            operations += 2 * ITEMS;
        }
        println!("tsan_ring: {operations} operations");
    }
}
