//! Switches in the code itself for the tests and gates. In a build as it ships, they compile to nothing.
//!
//! | module | about |
//! |---|---|
//! | [`failpoint`] | moments at which a test stops or kills the process |
//! | [`fault`] | wrong orderings on purpose, for the gates that must catch them |
//! | `crash` | under loom: atomics whose thread can be killed before any store |

#[cfg(ringloader_loom)]
pub mod crash;
pub mod failpoint;
pub mod fault;

/// Does what is wrong, in place of or before what is right, if the fault `$name` is planted in this run. One line of the
/// code that has the fault.
#[macro_export]
macro_rules! planted {
    ($name:literal => $wrong:expr) => {
        if $crate::fault::fault($name) {
            $wrong;
        }
    };
}
