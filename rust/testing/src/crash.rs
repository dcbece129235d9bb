//! Loom's atomics with death: a thread can be killed before any of its stores, as SIGKILL ends a
//! process.
//!
//! A dead process leaves to others what its last stores wrote, so a death is defined by the stores that were
//! still made. A test that runs the code under [`killed_after`] for every number of stores has therefore seen every
//! death. A killed thread unwinds; what its destructors store no longer happens.

use std::{
    cell::Cell,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
};

use loom::sync::atomic::Ordering;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Life {
    Immortal,
    StoresLeft(usize),
    Over,
}

loom::thread_local! {
    static LIFE: Cell<Life> = Cell::new(Life::Immortal);
}

/// The payload with which a killed thread unwinds.
struct Killed;

/// Runs `body` until its thread is about to make one more than `stores` atomic stores; `None` if it
/// was killed there. Read-modify-writes count as stores, whether or not they change the value.
pub fn killed_after<T>(stores: usize, body: impl FnOnce() -> T) -> Option<T> {
    LIFE.with(|life| life.set(Life::StoresLeft(stores)));
    let result = catch_unwind(AssertUnwindSafe(body));
    LIFE.with(|life| life.set(Life::Immortal));
    match result {
        Ok(value) => Some(value),
        Err(cause) if cause.is::<Killed>() => None,
        Err(cause) => resume_unwind(cause),
    }
}

/// Returns true if the store that follows happens. Does not return where the thread is killed.
fn lives() -> bool {
    let life = LIFE.with(Cell::get);
    match life {
        Life::Immortal => true,
        Life::Over => false,
        Life::StoresLeft(0) => {
            LIFE.with(|life| life.set(Life::Over));
            resume_unwind(Box::new(Killed))
        }
        Life::StoresLeft(left) => {
            LIFE.with(|life| life.set(Life::StoresLeft(left - 1)));
            true
        }
    }
}

macro_rules! crashable {
    ($name:ident, $value:ty, [$($update:ident),*]) => {
        /// The atomic of loom with the methods of std's that this crate uses.
        #[derive(Debug, Default)]
        pub struct $name(loom::sync::atomic::$name);

        #[allow(missing_docs, reason = "the methods of std's type")]
        impl $name {
            #[track_caller]
            pub fn new(value: $value) -> Self {
                Self(loom::sync::atomic::$name::new(value))
            }

            #[track_caller]
            pub fn load(&self, ordering: Ordering) -> $value {
                self.0.load(ordering)
            }

            #[track_caller]
            pub fn store(&self, value: $value, ordering: Ordering) {
                if lives() {
                    self.0.store(value, ordering);
                }
            }

            $(
                #[track_caller]
                pub fn $update(&self, value: $value, ordering: Ordering) -> $value {
                    if lives() { self.0.$update(value, ordering) } else { self.0.load(Ordering::Relaxed) }
                }
            )*

            #[track_caller]
            pub fn compare_exchange(
                &self,
                current: $value,
                new: $value,
                success: Ordering,
                failure: Ordering,
            ) -> Result<$value, $value> {
                if lives() {
                    self.0.compare_exchange(current, new, success, failure)
                } else {
                    Err(self.0.load(Ordering::Relaxed))
                }
            }

            #[track_caller]
            pub fn compare_exchange_weak(
                &self,
                current: $value,
                new: $value,
                success: Ordering,
                failure: Ordering,
            ) -> Result<$value, $value> {
                self.compare_exchange(current, new, success, failure)
            }

            #[track_caller]
            pub fn fetch_update(
                &self,
                success: Ordering,
                failure: Ordering,
                update: impl FnMut($value) -> Option<$value>,
            ) -> Result<$value, $value> {
                if lives() {
                    self.0.fetch_update(success, failure, update)
                } else {
                    Err(self.0.load(Ordering::Relaxed))
                }
            }
        }
    };
}

crashable!(AtomicBool, bool, [swap, fetch_and, fetch_or]);
crashable!(AtomicU32, u32, [swap, fetch_add, fetch_sub, fetch_and, fetch_or, fetch_max]);
crashable!(AtomicU64, u64, [swap, fetch_add, fetch_sub, fetch_and, fetch_or, fetch_max]);
crashable!(AtomicUsize, usize, [swap, fetch_add, fetch_sub, fetch_and, fetch_or, fetch_max]);
