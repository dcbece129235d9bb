//! Positions in a ring: how many descriptors were ever pushed or popped.
//!
//! A position only grows. At a thousand million pushes a second a `u64` lasts for centuries, so no
//! position wraps in practice; the arithmetic is right if it does.

use crate::number::usize_from;
use crate::{Error, Result};

/// The slot that `position` lies in. `slots` is a power of two.
#[inline]
pub fn index(position: u64, slots: usize) -> usize {
    debug_assert!(slots.is_power_of_two());
    usize_from(position & (slots as u64 - 1))
}

/// Returns the number of slots that are taken between `head` and `tail`.
///
/// # Errors
/// [`Error::Corrupt`] if they lie further apart than `capacity`: `head` has passed `tail`, or
/// `tail` has lapped `head`.
#[inline]
pub fn occupied(tail: u64, head: u64, capacity: u64) -> Result<u64> {
    let distance = tail.wrapping_sub(head);
    if distance <= capacity { Ok(distance) } else { Err(too_far_apart(tail, head, capacity)) }
}

/// Checks a position that a peer has published: it may only have moved on from what was `seen` of
/// it before, and not beyond `limit`, which is `seen` or later.
///
/// # Errors
/// [`Error::Corrupt`] if it went back or beyond the limit. `name` is the position's name in the
/// message.
#[inline]
pub fn advanced(name: &str, seen: u64, fresh: u64, limit: u64) -> Result<()> {
    if fresh.wrapping_sub(seen) <= limit.wrapping_sub(seen) {
        Ok(())
    } else {
        Err(astray(name, seen, fresh, limit))
    }
}

/// Returns true if `position` lies before `other`. They must be less than half the range of `u64` apart, as all
/// positions of one ring are.
#[inline]
pub fn precedes(position: u64, other: u64) -> bool {
    (position.wrapping_sub(other) as i64) < 0
}

#[cold]
fn too_far_apart(tail: u64, head: u64, capacity: u64) -> Error {
    Error::Corrupt(format!(
        "a ring of {capacity} slots has its tail at {tail} and its head at {head}; 0 to {capacity} between them are \
         possible; stop the worker and start a new one"
    ))
}

#[cold]
fn astray(name: &str, seen: u64, fresh: u64, limit: u64) -> Error {
    Error::Corrupt(format!(
        "the {name} of a ring went from {seen} to {fresh}; it only grows, and can be {limit} at most; stop the worker \
         and start a new one"
    ))
}

#[cfg(all(test, not(ringloader_loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn names_the_values_of_a_corrupt_ring() {
        let text = occupied(5, 6, 4).expect_err("the head has passed the tail").to_string();
        for value in ["tail at 5", "head at 6", "4 slots"] {
            assert!(text.contains(value), "{text}");
        }
        let text = advanced("head", 3, 2, 7).expect_err("the head went back").to_string();
        for value in ["the head of", "from 3 to 2", "7 at most"] {
            assert!(text.contains(value), "{text}");
        }
    }

    #[test]
    fn is_right_across_the_wrap() {
        assert_eq!(occupied(1, u64::MAX, 4), Ok(2));
        assert_eq!(index(u64::MAX, 8), 7);
        assert_eq!(index(u64::MAX.wrapping_add(1), 8), 0);
        assert!(precedes(u64::MAX, 0) && !precedes(0, u64::MAX) && !precedes(7, 7));
        assert_eq!(advanced("tail", u64::MAX, 1, 3), Ok(()));
        assert!(advanced("tail", u64::MAX, 4, 3).is_err());
    }

    fn position() -> impl Strategy<Value = u64> {
        prop_oneof![any::<u64>(), 0..8_u64, (u64::MAX - 8)..=u64::MAX]
    }

    proptest! {
        #[test]
        fn index_counts_up_and_comes_round(position in position(), bits in 0..12_u32) {
            let slots = 1_usize << bits;
            let here = index(position, slots);
            prop_assert!(here < slots);
            prop_assert_eq!(index(position.wrapping_add(1), slots), (here + 1) % slots);
            prop_assert_eq!(index(position.wrapping_add(slots as u64), slots), here);
        }

        #[test]
        fn occupied_accepts_exactly_the_possible_distances(
            head in position(), distance in position(), capacity in 0..=(1_u64 << 40),
        ) {
            let result = occupied(head.wrapping_add(distance), head, capacity);
            if distance <= capacity {
                prop_assert_eq!(result, Ok(distance));
            } else {
                prop_assert!(matches!(result, Err(Error::Corrupt(_))));
            }
        }

        #[test]
        fn advanced_accepts_exactly_the_range(
            seen in position(), step in position(), room in 0..=(1_u64 << 40),
        ) {
            let result = advanced("tail", seen, seen.wrapping_add(step), seen.wrapping_add(room));
            prop_assert_eq!(result.is_ok(), step <= room);
        }

        #[test]
        fn precedes_orders_close_positions(position in position(), step in 1..=(i64::MAX as u64)) {
            prop_assert!(precedes(position, position.wrapping_add(step)));
            prop_assert!(!precedes(position.wrapping_add(step), position));
        }
    }
}
