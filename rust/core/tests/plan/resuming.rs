//! Epochs that stop and go on, again and again, against a plain list of their samples.

use proptest::prelude::*;
use ringloader_core::plan::{BatchRule, Ledger, OrdinalSet, Position, Step, Stream, fingerprint_of};

use crate::generators::{Batches, Draws, Outcome, Passed, Sampler, sampler};

/// What becomes of an incomplete last batch.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Last {
    Kept,
    Dropped,
    RollsOver,
    /// There are no batches.
    Single,
}

/// What becomes of a batch that was got.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Event {
    Returned,
    Raised,
    LeftOut,
}

/// A loader that reads a part of an epoch.
#[derive(Clone, Debug)]
struct Leg {
    size: u64,
    /// Tasks that are under way at once: 1 without workers.
    tasks: usize,
    /// Choices among the tasks under way; none with `in_order=True`.
    picks: Vec<u8>,
    /// Events in turn, and then again from the first; the batches of none are all returned.
    events: Vec<Event>,
    /// Calls of `next` before it stops.
    calls: usize,
}

impl Leg {
    fn rule(&self, last: Last) -> Option<BatchRule> {
        let drop_last = matches!(last, Last::Dropped | Last::RollsOver);
        (last != Last::Single).then_some(BatchRule { size: self.size, drop_last })
    }

    /// Every batch is returned, in its turn.
    fn is_plain(&self) -> bool {
        self.picks.is_empty() && self.events.is_empty()
    }

    /// The same leg, up to the end of the epoch.
    fn to_end(&self) -> Self {
        Self { calls: usize::MAX, ..self.clone() }
    }
}

fn leg() -> impl Strategy<Value = Leg> {
    let event = prop_oneof![8 => Just(Event::Returned), 1 => Just(Event::Raised), 1 => Just(Event::LeftOut)];
    (
        prop_oneof![4 => 1..9_u64, 1 => 1..40_u64],
        prop_oneof![1 => Just(1), 4 => 1..9_usize],
        prop_oneof![Just(vec![]), prop::collection::vec(any::<u8>(), 1..9)],
        prop_oneof![Just(vec![]), prop::collection::vec(event, 1..9)],
        prop_oneof![4 => 0..9_usize, 1 => 0..60_usize],
    )
        .prop_map(|(size, tasks, picks, events, calls)| Leg { size, tasks, picks, events, calls })
}

/// The samples of an epoch on one rank, and what became of them.
struct Model {
    whole: Vec<i64>,
    place: u64,
    step: u64,
    /// By ordinal: passed, and whether it was returned.
    passed: Vec<Option<bool>>,
    batches: u64,
    /// The batches that were returned, in turn.
    returned: Vec<Vec<i64>>,
}

impl Model {
    fn new(whole: Vec<i64>, place: u64, step: u64) -> Self {
        let passed = vec![None; whole.len()];
        Self { whole, place, step, passed, batches: 0, returned: Vec::new() }
    }

    fn settle(&mut self, ordinals: &[usize], is_returned: bool) {
        for &ordinal in ordinals {
            assert_eq!(self.passed[ordinal].replace(is_returned), None, "sample {ordinal} a second time");
        }
        self.batches += 1;
        if is_returned {
            self.returned.push(ordinals.iter().map(|&ordinal| self.whole[ordinal]).collect());
        }
    }

    fn hash(&self, ordinal: usize) -> u64 {
        fingerprint_of(self.place + ordinal as u64 * self.step, 1, [self.whole[ordinal]])
    }

    fn remaining(&self) -> Vec<usize> {
        (0..self.whole.len()).filter(|&ordinal| self.passed[ordinal].is_none()).collect()
    }

    /// The position, with these tasks settled, and this one returned unless it is none.
    fn position(&self, settled: &[bool], current: Option<(usize, &[usize])>) -> Position {
        let mut passed = self.passed.clone();
        let mut tasks = settled.to_vec();
        if let Some((task, ordinals)) = current {
            ordinals.iter().for_each(|&ordinal| passed[ordinal] = Some(true));
            tasks[task] = true;
        }
        let (mut passed_sum, mut sum, mut ranges) = (0_u64, 0_u64, Vec::<(u64, u64)>::new());
        for (ordinal, is_returned) in passed.iter().enumerate() {
            let Some(is_returned) = is_returned else { continue };
            let hash = self.hash(ordinal);
            passed_sum = passed_sum.wrapping_add(hash);
            sum = sum.wrapping_add(if *is_returned { hash } else { 0 });
            match ranges.last_mut() {
                Some((_, stop)) if *stop == ordinal as u64 => *stop += 1,
                _ => ranges.push((ordinal as u64, ordinal as u64 + 1)),
            }
        }
        let in_turn = tasks.iter().take_while(|&&is_settled| is_settled).count();
        Position {
            ranges,
            batches: self.batches + u64::from(current.is_some()),
            passed_sum: Some(passed_sum),
            sum: Some(sum),
            tasks: in_turn as u64,
        }
    }
}

/// What every leg of an epoch has in common.
struct Epoch<'a> {
    sampler: &'a Sampler,
    first: &'a [i64],
    last: Last,
}

/// Where a leg has stopped.
struct Stop {
    position: Position,
    /// The draws that it has made.
    drawn: usize,
    /// What the epoch has left, if this is its end.
    rest: Option<Vec<i64>>,
}

fn beginning() -> Position {
    Position { ranges: vec![], batches: 0, passed_sum: Some(0), sum: Some(0), tasks: 0 }
}

/// Reads on from a position. Every batch, and every position, is that of the model.
fn read(epoch: &Epoch<'_>, leg: &Leg, from: &Position, model: &mut Model) -> Stop {
    let base = OrdinalSet::from_ranges(from.ranges.iter().copied()).expect("the ranges of a position");
    assert_eq!(base.ranges().collect::<Vec<_>>(), from.ranges);
    let rule = leg.rule(epoch.last);
    let mut stream = Stream::new(rule).expect("a good rule");
    if epoch.last == Last::RollsOver {
        stream.roll_over(epoch.first.to_vec()).expect("a fresh stream");
    }
    stream.skip(base.clone(), model.place, model.step).expect("a fresh stream");
    let mut ledger =
        Ledger::new(base.clone(), model.place, model.step, from.passed_sum, from.sum, from.batches);
    let (mut draws, mut passed) = (Draws::of(epoch.sampler), Passed::default());

    let mut remaining = model.remaining();
    let (mut tasks, mut settled, mut under_way) = (Vec::<Vec<usize>>::new(), Vec::new(), Vec::new());
    let mut current: Option<(usize, bool)> = None;
    let mut calls_returned = 0;
    let (mut picks, mut events) = (leg.picks.iter().cycle(), leg.events.iter().cycle());
    let mut is_read = false;
    'calls: for call in 0..leg.calls {
        ledger.begin_call();
        if let Some((task, has_raised)) = current.take() {
            model.settle(&tasks[task], !has_raised);
            settled[task] = true;
        }
        loop {
            while !is_read && under_way.len() < leg.tasks {
                let indices = match draws.request(&mut stream, &mut passed) {
                    Outcome::Batch(batch) => batch,
                    Outcome::Index(index) => vec![index],
                    end => {
                        assert_eq!(end, Outcome::Stop);
                        is_read = true;
                        break;
                    }
                };
                let size = rule.map_or(1, |rule| rule.size as usize).min(remaining.len());
                let task: Vec<usize> = remaining.drain(..size).collect();
                let expected: Vec<i64> = task.iter().map(|&ordinal| model.whole[ordinal]).collect();
                assert_eq!(indices, expected, "task {} from {from:?}", tasks.len());
                let number = ledger.read(indices.len() as u64, Some(indices.iter().copied()));
                assert_eq!(number, tasks.len() as u64);
                under_way.push(tasks.len());
                tasks.push(task);
                settled.push(false);
            }
            if under_way.is_empty() {
                // The last that was got in this call, if any, was left out.
                ledger.record_left_out();
                break 'calls;
            }
            let pick = picks.next().map_or(0, |&pick| usize::from(pick) % under_way.len());
            let task = under_way.remove(pick);
            ledger.record_got(task as u64);
            match events.next().unwrap_or(&Event::Returned) {
                Event::Returned => {
                    // A call that still runs has returned nothing.
                    assert_eq!(ledger.position(calls_returned), model.position(&settled, None));
                    calls_returned += 1;
                    current = Some((task, false));
                }
                Event::Raised => {
                    ledger.record_raised(calls_returned);
                    current = Some((task, true));
                }
                Event::LeftOut => {
                    // Another that is got says the same.
                    if call % 2 == 0 {
                        ledger.record_left_out();
                    }
                    model.settle(&tasks[task], false);
                    settled[task] = true;
                    continue;
                }
            }
            break;
        }
        if call % 4 == 0 || leg.tasks == 1 {
            let returned = current.filter(|current| !current.1).map(|(task, _)| (task, &*tasks[task]));
            assert_eq!(ledger.position(calls_returned), model.position(&settled, returned));
        }
    }
    if let Some((task, false)) = current {
        model.settle(&tasks[task], true);
        settled[task] = true;
    }
    let position = ledger.position(u64::MAX);
    assert_eq!(position, model.position(&settled, None));
    let has_ended = is_read && under_way.is_empty() && current.is_none_or(|current| !current.1);
    if has_ended {
        // All that was to be passed over is that of the position: there is nothing to be refused.
        assert_eq!(passed, Passed { count: base.count(), sum: from.passed_sum.expect("ints") });
        let size = rule.map_or(1, |rule| rule.size as usize);
        let is_cut = rule.is_some_and(|rule| rule.drop_last);
        assert!(if is_cut { remaining.len() < size } else { remaining.is_empty() }, "{remaining:?} are left");
    }
    let left: Vec<i64> = remaining.iter().map(|&ordinal| model.whole[ordinal]).collect();
    let rest = has_ended.then(|| stream.take_rest());
    if let Some(rest) = &rest {
        assert_eq!(rest, if epoch.last == Last::RollsOver { &left } else { &[][..] });
    }
    Stop { position, drawn: draws.drawn, rest }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(10_000))]

    #[test]
    fn each_sample_comes_once(
        last in prop_oneof![Just(Last::Kept), Just(Last::Dropped), Just(Last::RollsOver), Just(Last::Single)],
        is_plain in any::<bool>(),
        epochs in prop::collection::vec((sampler(), prop::collection::vec(leg(), 1..5)), 1..4),
    ) {
        let mut first = Vec::new();
        for (sampler, mut legs) in epochs {
            if is_plain {
                // The same loader each time.
                let plain = Leg { picks: vec![], events: vec![], ..legs[0].clone() };
                legs = legs.iter().map(|leg| Leg { calls: leg.calls, ..plain.clone() }).collect();
            }
            let whole = [first.clone(), sampler.whole()].concat();
            let mut model = Model::new(whole.clone(), 0, 1);
            let epoch = Epoch { sampler: &sampler, first: &first, last };
            let mut position = beginning();
            for leg in &legs[..legs.len() - 1] {
                position = read(&epoch, leg, &position, &mut model).position;
            }
            let end = read(&epoch, &legs[legs.len() - 1].to_end(), &position, &mut model);
            prop_assert_eq!(end.drawn, sampler.draws.len());
            if let (true, Some(BatchRule { size, drop_last })) = (is_plain, legs[0].rule(last)) {
                prop_assert!(legs.iter().all(Leg::is_plain));
                let torch = Batches::new(whole.into_iter().map(Some), size, drop_last);
                let returned = model.returned.into_iter().map(Outcome::Batch);
                prop_assert_eq!(returned.collect::<Vec<_>>(), torch.collect::<Vec<_>>());
            }
            first = end.rest.expect("it was read to the end");
        }
    }

}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn each_sample_comes_once_over_ranks(
        order in prop::collection::vec(0..90_i64, 0..50),
        drop_last in any::<bool>(),
        last in prop_oneof![Just(Last::Kept), Just(Last::Dropped), Just(Last::RollsOver), Just(Last::Single)],
        parts in prop::collection::vec((1..6_u64, prop::collection::vec(leg(), 1..4)), 1..4),
    ) {
        let len = order.len() as u64;
        let mut places = Vec::new();
        let (mut start, last_part) = (0, parts.len() - 1);
        for (number, (ranks, legs)) in parts.into_iter().enumerate() {
            let mut rest: Vec<i64> = order.iter().copied().skip(start as usize).collect();
            let uneven = rest.len() as u64 % ranks;
            if drop_last {
                rest.truncate(rest.len() - uneven as usize);
            } else if uneven > 0 {
                rest.extend(order.iter().cycle().take((ranks - uneven) as usize));
            }
            let (mut samples, mut sum) = (Vec::new(), 0_u64);
            for rank in 0..ranks {
                let own: Vec<i64> = rest.iter().copied().skip(rank as usize).step_by(ranks as usize).collect();
                let sampler = Sampler::new(own.chunks(7).map(<[i64]>::to_vec).collect());
                let mut model = Model::new(own, start + rank, ranks);
                let epoch = Epoch { sampler: &sampler, first: &[], last };
                let mut position = beginning();
                for (at, leg) in legs.iter().enumerate() {
                    let mut leg = leg.clone();
                    if number < last_part {
                        // All ranks are to be at the same place.
                        leg.picks.clear();
                    } else {
                        let turns = rank as usize % leg.picks.len().max(1);
                        leg.picks.rotate_left(turns);
                        leg = if at + 1 == legs.len() { leg.to_end() } else { leg };
                    }
                    position = read(&epoch, &leg, &position, &mut model).position;
                }
                let passed = (0..).zip(&model.passed).filter(|(_, passed)| passed.is_some());
                places.extend(passed.map(|(ordinal, _): (u64, _)| start + rank + ordinal * ranks));
                sum = sum.wrapping_add(position.passed_sum.expect("ints"));
                samples.push(model.passed.iter().flatten().count() as u64);
            }
            let of_part = places.iter().filter(|&&place| place >= start);
            let hashes = of_part.map(|&place| fingerprint_of(place, 1, [order[(place % len) as usize]]));
            prop_assert_eq!(sum, hashes.fold(0, u64::wrapping_add));
            if number < last_part {
                prop_assert!(samples.windows(2).all(|pair| pair[0] == pair[1]), "{:?}", samples);
                start += samples[0] * ranks;
                continue;
            }
            // Each once, and as many as there are, but for the padding or what is cut.
            places.sort_unstable();
            prop_assert!(places.windows(2).all(|pair| pair[0] < pair[1]), "{:?}", places);
            prop_assert!(places.iter().all(|&place| place < (start + rest.len() as u64).max(start)));
            let size = legs[legs.len() - 1].size;
            let cut = if last == Last::Kept || last == Last::Single { 0 } else { (size - 1) * ranks };
            let all = start + rest.len() as u64;
            prop_assert!(places.len() as u64 + cut >= all && all + ranks > len, "{:?} of {}", places, len);
        }
    }
}

/// What an epoch that is over has drawn can be drawn once more.
#[test]
fn nothing_is_left_of_an_epoch_that_is_passed_over() {
    let sampler = Sampler::new(vec![vec![3, 1, 2], vec![], vec![5, 9, 7, 0]]);
    for rule in
        [None, Some(BatchRule { size: 3, drop_last: true }), Some(BatchRule { size: 3, drop_last: false })]
    {
        let mut stream = Stream::new(rule).expect("a good rule");
        stream.skip(OrdinalSet::from_ranges([(0, u64::MAX)]).unwrap(), 0, 1).expect("a fresh stream");
        let (mut draws, mut passed) = (Draws::of(&sampler), Passed::default());
        assert_eq!(draws.request(&mut stream, &mut passed), Outcome::Stop);
        assert_eq!((passed.count, draws.drawn), (7, 3));
        assert_eq!(stream.next(), Step::End);
    }
}
