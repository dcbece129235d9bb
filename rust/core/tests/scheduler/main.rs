//! The scheduler over the engine with ports in the same process, over a double without memory or processes, and over
//! the queues between threads.
#![cfg(all(target_os = "linux", not(ringloader_portable), not(ringloader_loom), not(ringloader_tsan)))]

/// Runs each test over both transports.
macro_rules! over_both {
    ($($test:ident),* $(,)?) => {
        mod over_rings {
            $(#[test]
            fn $test() {
                super::$test::<crate::rings::Rings>();
            })*
        }

        mod over_double {
            $(#[test]
            fn $test() {
                super::$test::<crate::double::Double>();
            })*
        }
    };
}

/// Runs tests over the queues between threads, where nothing can be corrupt.
macro_rules! over_queues {
    ($($test:ident),* $(,)?) => {
        mod over_queues {
            $(#[test]
            fn $test() {
                super::$test::<crate::queues::ThreadQueues>();
            })*
        }
    };
}

mod arrivals;
mod balance;
#[path = "../plan/cases.rs"]
mod cases;
mod deaths;
mod double;
mod fleet;
mod following;
mod queues;
mod rings;
mod torch;
#[path = "../plan/torch_iterator.rs"]
mod torch_iterator;
mod used;
