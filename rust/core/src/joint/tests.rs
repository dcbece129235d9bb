use super::*;

fn words() -> Vec<AtomicU64> {
    (0..WORDS).map(|_| AtomicU64::new(0)).collect()
}

fn plan(seq: u64, samples: u64, per_run: u64) -> JointPlan {
    JointPlan { seq, samples, per_run, kind: 3, len: 10, window: 5 }
}

fn claim(batch: &Batch, worker: u32) -> Option<Claim> {
    batch.claim(worker, |_| true)
}

fn run(claim: Option<Claim>) -> Option<u32> {
    claim.expect("something is free").run
}

const PART: Part = Part::Bytes { offset: 64, len: 5 };

#[test]
fn nothing_is_claimed_of_zeroed_memory() {
    let words = words();
    let batch = Batch::over(&words);
    assert!(!batch.is_open());
    assert_eq!(claim(batch, 0), None);
}

#[test]
fn the_last_worker_collates() {
    let words = words();
    let batch = Batch::over(&words);
    batch.lay_out(&plan(7, 5, 2), 1000);
    assert_eq!(batch.plan(), plan(7, 5, 2));
    let claims: Vec<_> = (0..3).map(|worker| claim(batch, worker).unwrap()).collect();
    assert_eq!(claims.iter().map(|claim| claim.run).collect::<Vec<_>>(), [Some(0), Some(1), Some(2)]);
    assert_eq!((claim(batch, 3), batch.is_open()), (None, false));
    assert!(!batch.begin_last(claims[1]));
    assert!(!batch.finish(claims[1], PART));
    assert!(!batch.finish(claims[0], Part::Unsent));
    assert!(batch.begin_last(claims[2]));
    assert_eq!([0, 1, 2].map(|run| batch.part(run)), [Some(Part::Unsent), Some(PART), None]);
    batch.close();
    assert!(!batch.is_open());
    batch.lay_out(&plan(8, 1, 1), 1000);
    let found = claim(batch, 1).unwrap();
    assert!(batch.finish(found, PART));
}

#[test]
fn a_batch_without_samples_has_one_run_and_many_samples_fit_the_bits() {
    assert_eq!(plan(0, 0, 0).runs(), 1);
    assert_eq!(plan(0, 64, 1).runs(), 64);
    assert_eq!(plan(0, 65, 2).runs(), 33);
    let words = words();
    let batch = Batch::over(&words);
    batch.lay_out(&plan(0, 64, 1), 1000);
    let claims: Vec<_> = (0..64).map(|_| claim(batch, 0).unwrap()).collect();
    assert_eq!(claims.iter().filter(|&&claim| batch.finish(claim, PART)).count(), 1);
}

#[test]
fn what_a_dead_worker_had_is_made_again() {
    let words = words();
    let batch = Batch::over(&words);
    batch.lay_out(&plan(0, 3, 1), 1000);
    let [first, second, _third] = [0, 1, 0].map(|worker| claim(batch, worker).unwrap());
    assert!(!batch.finish(first, PART));
    assert!(batch.is_with(0) && batch.is_with(1) && !batch.is_with(2));
    batch.lose(0);
    assert!(!batch.is_with(0));
    let again = claim(batch, 2);
    assert_eq!((run(again), claim(batch, 2)), (Some(2), None));
    assert!(!batch.finish(again.unwrap(), PART));
    assert!(batch.finish(second, PART));
}

#[test]
fn a_collation_that_was_lost_is_done_again() {
    let words = words();
    let batch = Batch::over(&words);
    // The part of the last run was written, and then its worker died, before or after it had the collation.
    for has_it in [true, false] {
        batch.lay_out(&plan(0, 1, 1), 1000);
        let found = claim(batch, 0).unwrap();
        if has_it {
            assert!(batch.finish(found, PART));
        } else {
            batch.made.fetch_or(1, Ordering::Relaxed);
        }
        batch.lose(0);
        let again = claim(batch, 1);
        assert_eq!((run(again), batch.part(0)), (None, Some(PART)));
        assert!(batch.begin_last(again.unwrap()));
        assert!(batch.finish(again.unwrap(), PART));
        batch.close();
    }
    // It was not written.
    batch.lay_out(&plan(0, 2, 1), 1000);
    let [first, last] = [0, 1].map(|worker| claim(batch, worker).unwrap());
    assert!(!batch.finish(first, PART));
    assert!(batch.begin_last(last));
    batch.lose(1);
    let again = claim(batch, 2).unwrap();
    assert_eq!(again.run, Some(1));
    assert!(batch.begin_last(again));
}

#[test]
fn a_worker_that_was_stopped_takes_no_collation_of_another_batch() {
    let words = words();
    let batch = Batch::over(&words);
    batch.lay_out(&plan(0, 1, 1), 1000);
    let slow = claim(batch, 0).unwrap();
    // It sets the last bit and stops there. Another one dies, so the collation is free for any.
    batch.made.fetch_or(1, Ordering::Relaxed);
    batch.lose(1);
    assert_eq!(run(claim(batch, 2)), None);
    assert!(!batch.take_collation(slow));
    batch.close();
    batch.lay_out(&plan(1, 1, 1), 1000);
    assert!(!batch.take_collation(slow));
    assert_eq!(run(claim(batch, 2)), Some(0));
}

#[test]
fn nothing_is_claimed_of_a_task_that_is_not_wanted() {
    let words = words();
    let batch = Batch::over(&words);
    batch.lay_out(&plan(7, 1, 1), 1000);
    assert_eq!(batch.claim(0, |seq| seq < 7), None);
    assert_eq!(run(batch.claim(1, |seq| seq == 7)), Some(0));
}

#[test]
fn a_batch_is_left_until_it_is_sent_or_its_result_is_taken() {
    let words = words();
    let batch = Batch::over(&words);
    assert!(!batch.is_left());
    for is_noted in [true, false] {
        batch.lay_out(&plan(0, 2, 1), 1000);
        let [first, last] = [0, 1].map(|worker| claim(batch, worker).unwrap());
        assert!(!batch.finish(first, PART) && batch.is_left());
        assert!(batch.finish(last, PART) && batch.is_left());
        if is_noted {
            batch.note_sent(last);
            assert!(!batch.is_left() && !batch.is_with(1));
            // The worker has died since.
            batch.lose(1);
            assert!(!batch.is_open() && !batch.is_left());
        }
        batch.close();
        assert!(!batch.is_left());
        batch.lay_out(&plan(1, 2, 1), 1000);
        // Late, of the batch before.
        batch.note_sent(last);
        assert!(batch.is_left());
        batch.close();
    }
}

#[test]
fn a_lost_collation_is_left() {
    let words = words();
    let batch = Batch::over(&words);
    batch.lay_out(&plan(0, 1, 1), 1000);
    let lost = claim(batch, 0).unwrap();
    assert!(batch.finish(lost, PART));
    batch.lose(0);
    assert!(batch.is_left());
    let again = claim(batch, 1).unwrap();
    batch.note_sent(lost);
    assert!(batch.is_left());
    batch.note_sent(again);
    assert!(!batch.is_left());
}

#[test]
fn parts_and_rows_have_bytes_of_their_own() {
    let words = words();
    let batch = Batch::over(&words);
    batch.lay_out(&plan(0, 1, 1), 1000);
    let empty = batch.room();
    assert_eq!((empty.top(), empty.form(), empty.before_top(65)), (960, None, Some(832)));
    assert_eq!(
        (empty.before_top(960), empty.before_top(961), empty.before_top(u64::MAX)),
        (Some(0), None, None)
    );
    assert_eq!(batch.reserve(empty, 832), Ok(()));
    let room = batch.reserve(empty, 768).unwrap_err();
    assert_eq!((room.top(), room.form()), (832, None));
    assert_eq!(batch.lay_out_rows(empty, 832), Err(room));
    assert_eq!(batch.lay_out_rows(room, 832), Ok(()));
    let room = batch.lay_out_rows(room, 64).unwrap_err();
    assert_eq!((room.top(), room.form()), (832, Some(832)));
    assert_eq!(batch.reserve(room, 64), Ok(()));
    assert_eq!((batch.room().top(), batch.room().form()), (64, Some(832)));
    batch.close();
    batch.lay_out(&plan(0, 1, 1), u64::MAX);
    assert_eq!((batch.room().top(), batch.room().form()), (64 * (u64::from(u32::MAX)), None));
}

#[test]
fn a_run_takes_about_a_millisecond_and_shares_evenly() {
    let per_run = |samples, workers, making| per_run(samples, workers, Cost { making, sending: 0 });
    assert_eq!(per_run(64, 2, 0), 32);
    assert_eq!(per_run(64, 16, 1_000), 64);
    assert_eq!(per_run(64, 16, 100_000), 4);
    assert_eq!(per_run(64, 2, 20_000), 32);
    assert_eq!(per_run(64, 16, 5_000_000), 1);
    assert_eq!(per_run(1000, 4, 5_000_000), 16);
    assert_eq!(per_run(0, 4, 0), 0);
}

#[test]
fn samples_that_cost_much_to_send_stay_with_their_worker() {
    let cost = |sending| Cost { making: 1_000_000, sending };
    assert_eq!(per_run(64, 2, cost(100_000)), 1);
    assert_eq!(per_run(64, 2, cost(300_000)), 64);
}

#[test]
fn a_run_is_in_rows_or_in_a_part() {
    let words = words();
    let batch = Batch::over(&words);
    batch.lay_out(&plan(0, 2, 1), 1000);
    let [first, last] = [0, 1].map(|worker| claim(batch, worker).unwrap());
    assert!(!batch.finish(first, Part::Rows));
    assert!(batch.finish(last, PART));
    assert_eq!([0, 1].map(|run| batch.part(run)), [Some(Part::Rows), Some(PART)]);
}
