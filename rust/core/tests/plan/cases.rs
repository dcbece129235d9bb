//! Cases that torch's iterator and its workers may meet.

use proptest::prelude::*;
use ringloader_core::plan::ResultOrder;

#[derive(Clone, Debug)]
pub(crate) enum Event {
    Next,
    /// The epoch is left for a new one with the same workers.
    Reset,
    /// A process is gone.
    Kill(u8),
}

pub(crate) fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        60 => Just(Event::Next),
        1 => Just(Event::Reset),
        1 => any::<u8>().prop_map(Event::Kill),
    ]
}

pub(crate) fn order() -> impl Strategy<Value = ResultOrder> {
    prop_oneof![
        Just(ResultOrder::InOrder),
        Just(ResultOrder::AsCompleted),
        Just(ResultOrder::AsCompletedRoundRobin)
    ]
}

pub(crate) fn lengths() -> impl Strategy<Value = Vec<Option<u32>>> {
    prop_oneof![
        (1..9_usize).prop_map(|count| vec![None; count]),
        prop::collection::vec((0..20_u32).prop_map(Some), 1..9),
        prop::collection::vec((0..3_u32).prop_map(Some), 60..70),
    ]
}

/// Mostly a sampler that does not end, so that iterable datasets do; else one that ends, and perhaps goes on.
pub(crate) fn script() -> impl Strategy<Value = Vec<bool>> {
    prop_oneof![
        Just(vec![true; 4000]),
        (0..100_usize).prop_map(|len| vec![true; len]),
        prop::collection::vec(prop::bool::weighted(0.9), 0..300),
    ]
}

/// Choices of workers: any, and some that starve one worker for long.
pub(crate) fn schedule() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        prop::collection::vec(any::<u8>(), 1..200),
        prop::collection::vec(1..=255_u8, 1..200),
        Just(vec![0])
    ]
}
