use super::*;
use crate::plan::fingerprint_of;

fn read(ledger: &mut Ledger, indices: &[i64]) -> u64 {
    ledger.read(indices.len() as u64, Some(indices.iter().copied()))
}

fn fresh() -> Ledger {
    Ledger::new(OrdinalSet::new(), 0, 1, Some(0), Some(0), 0)
}

fn hashes(samples: &[(u64, i64)]) -> Option<u64> {
    Some(samples.iter().fold(0, |sum, &(place, index)| sum.wrapping_add(fingerprint_of(place, 1, [index]))))
}

#[test]
fn only_what_was_returned_counts() {
    let mut ledger = fresh();
    let beginning = ledger.position(u64::MAX);
    assert_eq!((beginning.sum, beginning.ranges), (Some(0), vec![]));
    for indices in [[7, 8], [9, 5], [1, 2]] {
        read(&mut ledger, &indices);
    }
    ledger.begin_call();
    ledger.record_got(0);
    let sum = hashes(&[(0, 7), (1, 8)]);
    let first = Position { ranges: vec![(0, 2)], batches: 1, passed_sum: sum, sum, tasks: 1 };
    assert_eq!(ledger.position(u64::MAX), first);
    ledger.begin_call();
    assert_eq!(ledger.position(u64::MAX), first);
    // This batch comes before its turn.
    ledger.record_got(2);
    let found = ledger.position(u64::MAX);
    assert_eq!((found.ranges, found.batches), (vec![(0, 2), (4, 6)], 2));
    assert_eq!((found.sum, found.passed_sum), (hashes(&[(0, 7), (1, 8), (4, 1), (5, 2)]), found.sum));
    assert_eq!(found.tasks, 1);
    ledger.begin_call();
    ledger.record_got(1);
    let found = ledger.position(u64::MAX);
    assert_eq!((found.ranges, found.tasks), (vec![(0, 6)], 3));
}

#[test]
fn a_batch_counts_once_its_call_has_returned() {
    let mut ledger = fresh();
    [[3], [4], [5]].iter().for_each(|indices| assert!(read(&mut ledger, indices) < 3));
    ledger.begin_call();
    ledger.record_got(0);
    assert_eq!((ledger.position(0).ranges, ledger.position(0).tasks), (vec![], 0));
    assert_eq!((ledger.position(1).ranges, ledger.position(1).tasks), (vec![(0, 1)], 1));
    // A call that raises before it begins takes back nothing of the call before it.
    ledger.record_raised(1);
    assert_eq!(ledger.position(1).ranges, [(0, 1)]);
    ledger.begin_call();
    ledger.record_got(1);
    assert_eq!((ledger.position(1).batches, ledger.position(1).sum), (1, hashes(&[(0, 3)])));
    ledger.record_raised(1);
    ledger.begin_call();
    assert_eq!((ledger.position(1).batches, ledger.position(1).sum), (2, hashes(&[(0, 3)])));
    ledger.record_got(2);
    assert_eq!((ledger.position(1).batches, ledger.position(2).batches), (2, 3));
}

#[test]
fn a_batch_that_raised_is_passed_by_the_next_call() {
    let mut ledger = fresh();
    [[3], [4], [5]].iter().for_each(|indices| assert!(read(&mut ledger, indices) < 3));
    ledger.begin_call();
    ledger.record_raised(0);
    ledger.begin_call();
    ledger.record_got(0);
    ledger.record_raised(0);
    assert_eq!((ledger.position(u64::MAX).ranges, ledger.position(u64::MAX).batches), (vec![], 0));
    ledger.begin_call();
    let passed = ledger.position(u64::MAX);
    assert_eq!((passed.ranges, passed.batches, passed.tasks), (vec![(0, 1)], 1, 1));
    assert_eq!((passed.passed_sum, passed.sum), (hashes(&[(0, 3)]), Some(0)));
    ledger.record_got(1);
    ledger.record_got(2);
    // The first of two in a call was left out.
    let passed = ledger.position(u64::MAX);
    assert_eq!((passed.passed_sum, passed.sum), (hashes(&[(0, 3), (1, 4), (2, 5)]), hashes(&[(2, 5)])));
    assert_eq!((passed.ranges, passed.batches, passed.tasks), (vec![(0, 3)], 3, 3));
    let last = read(&mut ledger, &[6]);
    ledger.begin_call();
    ledger.record_got(last);
    ledger.record_left_out();
    // The call that finds the end raises too.
    ledger.record_raised(0);
    let passed = ledger.position(u64::MAX);
    assert_eq!((passed.sum, passed.ranges), (hashes(&[(2, 5)]), vec![(0, 4)]));
}

#[test]
fn a_rest_goes_around_what_was_delivered_before() {
    let base = OrdinalSet::from_ranges([(0, 2), (3, 5), (9, 10)]).unwrap();
    let mut ledger = Ledger::new(base, 1, 4, Some(100), Some(10), 7);
    for (number, indices) in [[10, 11, 12].as_slice(), &[], &[13], &[14, 15, 16]].into_iter().enumerate() {
        assert_eq!(read(&mut ledger, indices), number as u64);
    }
    ledger.begin_call();
    ledger.record_got(0);
    let found = ledger.position(u64::MAX);
    let sum = hashes(&[(1 + 2 * 4, 10), (1 + 5 * 4, 11), (1 + 6 * 4, 12)]).unwrap();
    assert_eq!((found.passed_sum, found.sum, found.batches), (Some(100 + sum), Some(10 + sum), 8));
    assert_eq!(found.ranges, [(0, 7), (9, 10)]);
    ledger.begin_call();
    ledger.record_got(3);
    assert_eq!(ledger.position(u64::MAX).ranges, [(0, 7), (8, 12)]);
    ledger.begin_call();
    ledger.record_got(1);
    assert_eq!(
        (ledger.position(u64::MAX).ranges, ledger.position(u64::MAX).tasks),
        (vec![(0, 7), (8, 12)], 2)
    );
    ledger.begin_call();
    ledger.record_got(2);
    assert_eq!((ledger.position(u64::MAX).ranges, ledger.position(u64::MAX).batches), (vec![(0, 12)], 11));
}

#[test]
fn what_is_no_int_ends_the_sums_when_it_is_passed() {
    let mut ledger = fresh();
    read(&mut ledger, &[1, 2]);
    ledger.read(3, None::<std::iter::Empty<i64>>);
    ledger.begin_call();
    ledger.record_got(0);
    assert!(ledger.position(u64::MAX).sum.is_some());
    ledger.begin_call();
    ledger.record_got(1);
    ledger.record_raised(0);
    assert!(ledger.position(u64::MAX).passed_sum.is_some());
    ledger.begin_call();
    let found = ledger.position(u64::MAX);
    assert_eq!((found.ranges, found.passed_sum, found.sum.is_some()), (vec![(0, 5)], None, true));
}

#[test]
fn a_whole_batch_is_one_ordinal() {
    let mut ledger = fresh();
    assert_eq!(ledger.read_whole(Some([5, 6].into_iter())), 0);
    assert_eq!(ledger.read_whole(Some([7].into_iter())), 1);
    ledger.record_got(0);
    ledger.begin_call();
    ledger.record_got(1);
    assert_eq!(ledger.position(u64::MAX).ranges, [(0, 2)]);
    assert_eq!(ledger.position(u64::MAX).sum, hashes(&[(0, 5), (1, 6), (1 << 32, 7)]));
}

#[test]
fn behind_the_last_ordinal_of_all_nothing_hangs() {
    let mut ledger =
        Ledger::new(OrdinalSet::from_ranges([(0, u64::MAX)]).unwrap(), 0, 1, Some(0), Some(0), 0);
    read(&mut ledger, &[5, 6]);
    ledger.record_got(0);
    assert_eq!(ledger.position(u64::MAX).ranges, [(0, u64::MAX)]);
}

#[test]
fn a_task_that_is_lost_gives_its_number_to_the_next() {
    let mut ledger = fresh();
    read(&mut ledger, &[5, 6]);
    ledger.lose_last();
    assert_eq!(read(&mut ledger, &[7, 8]), 0);
    ledger.record_got(0);
    assert_eq!(ledger.position(u64::MAX).ranges, [(2, 4)]);
}

#[test]
fn memory_is_that_of_the_tasks_under_way() {
    let mut ledger = fresh();
    for number in 0..10_000 {
        assert_eq!(read(&mut ledger, &[1, 2, 3]), number);
        if number >= 4 {
            ledger.begin_call();
            ledger.record_got(number - 4);
        }
    }
    assert!(ledger.tasks.capacity() <= 16 && ledger.position(u64::MAX).ranges.len() == 1);
    // One is late, and the others continue without it.
    for number in 9_996..10_000 {
        ledger.begin_call();
        ledger.record_got(19_995 - number);
    }
    assert_eq!((ledger.tasks.len(), ledger.position(u64::MAX).tasks), (4, 10_000));
    ledger.begin_call();
    assert_eq!(ledger.tasks.len(), 0);
}

#[test]
#[should_panic(expected = "task 0 was got, but is not under way")]
fn a_task_is_got_once() {
    let mut ledger = fresh();
    read(&mut ledger, &[1]);
    ledger.record_got(0);
    ledger.record_got(0);
}
