//! The reorder buffer alone, also with results that no worker may send.

use std::collections::BTreeMap;

use proptest::prelude::*;
use proptest::sample::Index;
use ringloader_core::Error;
use ringloader_core::plan::{Next, ReorderBuffer};

#[derive(Clone, Debug)]
enum Step {
    Send,
    Arrive(Index),
    Take(Index),
    Ended(Index),
    /// A number that may be unknown, past or to come.
    Strange(u64),
    Next,
    Retire(u32),
    Reset,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        40 => Just(Step::Send),
        20 => any::<Index>().prop_map(Step::Arrive),
        20 => any::<Index>().prop_map(Step::Take),
        2 => any::<Index>().prop_map(Step::Ended),
        5 => prop_oneof![0..400_u64, any::<u64>()].prop_map(Step::Strange),
        10 => Just(Step::Next),
        1 => (0..4_u32).prop_map(Step::Retire),
        1 => Just(Step::Reset),
    ]
}

#[derive(Clone, Copy, PartialEq, Debug)]
enum Held {
    Nothing,
    Result,
    End,
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn is_a_map_of_tasks(steps in prop::collection::vec(step(), 1..400)) {
        let mut buffer = ReorderBuffer::new();
        let mut tasks: BTreeMap<u64, (u32, Held)> = BTreeMap::new();
        let (mut send_idx, mut rcvd_idx, mut outstanding) = (0, 0, 0);
        let mut active = [true; 4];
        for (number, step) in steps.into_iter().enumerate() {
            let pick = |index: Index| {
                let open: Vec<u64> =
                    tasks.iter().filter(|(_, task)| task.1 == Held::Nothing).map(|(&seq, _)| seq).collect();
                (!open.is_empty()).then(|| *index.get(&open))
            };
            match step {
                Step::Send => {
                    let worker = number as u32 % 4;
                    prop_assert_eq!(buffer.send(worker), send_idx);
                    tasks.insert(send_idx, (worker, Held::Nothing));
                    send_idx += 1;
                    outstanding += 1;
                }
                Step::Arrive(index) => if let Some(seq) = pick(index) {
                    prop_assert_eq!(buffer.arrive(seq, seq), Ok(()));
                    tasks.get_mut(&seq).expect("open").1 = Held::Result;
                    outstanding -= 1;
                },
                Step::Take(index) => if let Some(seq) = pick(index) {
                    let (worker, _) = tasks.remove(&seq).expect("open");
                    prop_assert_eq!(buffer.take(seq), Ok(worker));
                    rcvd_idx += u64::from(seq == rcvd_idx);
                    outstanding -= 1;
                },
                Step::Ended(index) => if let Some(seq) = pick(index) {
                    let task = tasks.get_mut(&seq).expect("open");
                    task.1 = Held::End;
                    prop_assert_eq!(buffer.record_end(seq), Ok(task.0));
                    active[task.0 as usize] = false;
                    outstanding -= 1;
                },
                Step::Strange(seq) => if tasks.get(&seq).is_none_or(|task| task.1 != Held::Nothing) {
                    for error in [buffer.arrive(seq, seq).err(), buffer.take(seq).err(), buffer.record_end(seq).err()] {
                        let Some(Error::Corrupt(text)) = error else { panic!("{error:?}") };
                        prop_assert!(text.contains(&format!("task {seq},")), "{}", text);
                    }
                },
                Step::Next => {
                    while rcvd_idx < send_idx && tasks.get(&rcvd_idx).is_none_or(
                        |&(worker, held)| held == Held::End || held == Held::Nothing && !active[worker as usize],
                    ) {
                        tasks.remove(&rcvd_idx);
                        rcvd_idx += 1;
                    }
                    let expected = match tasks.get(&rcvd_idx).copied() {
                        None => Next::End,
                        Some((worker, Held::Nothing)) => Next::Wait { seq: rcvd_idx, worker },
                        Some((worker, _)) => {
                            tasks.remove(&rcvd_idx);
                            rcvd_idx += 1;
                            Next::Ready { seq: rcvd_idx - 1, worker, data: rcvd_idx - 1 }
                        }
                    };
                    prop_assert_eq!(buffer.next(|worker| active[worker as usize]), expected);
                }
                Step::Retire(worker) => active[worker as usize] = false,
                Step::Reset => {
                    buffer.reset();
                    tasks.clear();
                    (send_idx, rcvd_idx, outstanding, active) = (0, 0, 0, [true; 4]);
                }
            }
            prop_assert_eq!(
                (buffer.send_idx(), buffer.rcvd_idx(), buffer.outstanding()), (send_idx, rcvd_idx, outstanding)
            );
        }
    }
}
