//! Streams that roll over: the incomplete last batch opens the next stream.

use ringloader_core::Error;
use ringloader_core::plan::{BatchRule, Chunk, Step, Stream};

use crate::streams::counting;

#[test]
fn the_remainder_opens_the_next_stream() {
    let rule = Some(BatchRule { size: 3, drop_last: true });
    let mut rest = Vec::new();
    let mut epochs = Vec::new();
    for len in [10, 10, 1, 0, 4] {
        let mut stream = Stream::new(rule).expect("a good rule");
        stream.roll_over(rest).expect("less than a batch");
        let mut chunks = [Chunk::Range { start: 0, step: 1, len }].into_iter();
        let mut epoch = Vec::new();
        loop {
            match stream.next() {
                Step::Batch(batch) => epoch.push(batch.to_vec()),
                Step::Need => stream.supply(chunks.next()),
                end => break assert_eq!(end, Step::End),
            }
        }
        assert_eq!(stream.next(), Step::End);
        rest = stream.take_rest();
        assert_eq!(stream.take_rest(), []);
        epochs.push((epoch, rest.clone()));
    }
    let expected = [
        (vec![vec![0, 1, 2], vec![3, 4, 5], vec![6, 7, 8]], vec![9]),
        (vec![vec![9, 0, 1], vec![2, 3, 4], vec![5, 6, 7]], vec![8, 9]),
        (vec![vec![8, 9, 0]], vec![]),
        (vec![], vec![]),
        (vec![vec![0, 1, 2]], vec![3]),
    ];
    assert_eq!(epochs, expected);
}

#[test]
fn a_remainder_of_larger_batches_becomes_smaller_ones() {
    let rule = Some(BatchRule { size: 2, drop_last: true });
    let mut stream = Stream::new(rule).expect("a good rule");
    stream.roll_over(vec![5, 6, 7]).expect("a fresh stream");
    assert_eq!(stream.next(), Step::Batch(&[5, 6]));
    assert_eq!(stream.next(), Step::Need);
    stream.supply(Some(Chunk::Drawn(Box::new(vec![0, 1]))));
    assert_eq!(stream.next(), Step::Batch(&[7, 0]));
    assert_eq!(stream.next(), Step::Need);
    stream.supply(None);
    assert_eq!(stream.next(), Step::End);
    assert_eq!(stream.take_rest(), [1]);
}

#[test]
fn an_abandoned_stream_leaves_no_remainder() {
    let rule = Some(BatchRule { size: 3, drop_last: true });
    let mut stream = Stream::new(rule).expect("a good rule");
    stream.roll_over(vec![7, 8]).expect("less than a batch");
    assert_eq!(stream.next(), Step::Need);
    assert_eq!(stream.next(), Step::End, "the need was not answered");
    assert_eq!(stream.take_rest(), []);
}

#[test]
fn only_a_fresh_stream_of_whole_batches_rolls_over() {
    let rule = |drop_last| Some(BatchRule { size: 3, drop_last });
    let stream = |drop_last| Stream::new(rule(drop_last)).expect("a good rule");
    assert!(matches!(stream(false).roll_over(vec![]), Err(Error::Config(_))));
    let mut twice = stream(true);
    assert_eq!((twice.roll_over(vec![]), twice.roll_over(vec![]).is_err()), (Ok(()), true));
    let mut begun = counting(9, rule(true));
    assert_eq!(begun.next(), Step::Batch(&[0, 1, 2]));
    begun.roll_over(vec![1]).expect_err("between two batches a remainder has no place");
}
