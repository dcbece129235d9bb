//! The seam between the core and its atomics: the only file that names those of std or of loom.
//!
//! | module | about |
//! |---|---|
//! | [`bell`] | bells and watches: the system calls of sleeping and waking |
//! | [`doorbell`] | sleep and wake between two processes, the only `fence(SeqCst)` |
//! | `linger` | looking again for a moment before a sleep |
//! | [`ready`] | which of many workers have committed something |
//! | [`planted`] | wrong orderings on purpose, for the gates that must catch them |
//! | [`mod@pause`] | moments at which a test stops or kills the process |
//! | `mortal` | under loom: atomics whose thread can be killed before any store |

#[cfg(all(target_os = "linux", not(ringloader_portable), not(ringloader_loom)))]
pub mod bell;
pub mod doorbell;
#[cfg(all(target_os = "linux", not(ringloader_portable), not(ringloader_loom)))]
pub mod linger;
#[cfg(ringloader_loom)]
pub mod mortal;
pub mod pause;
pub mod planted;
pub mod ready;

#[cfg(any(ringloader_loom, ringloader_planted))]
mod raw {
    #[cfg(ringloader_loom)]
    pub(super) use loom::{
        sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize},
        thread_local,
    };
    #[cfg(ringloader_planted)]
    pub(super) use std::sync::atomic::AtomicU64 as Global;
}
#[cfg(ringloader_loom)]
pub use loom::{
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{Ordering, fence},
    },
    thread,
};
#[cfg(ringloader_loom)]
pub use mortal::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize};
#[cfg(not(ringloader_loom))]
pub use std::{
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence},
    },
    thread,
};

#[cfg(all(target_os = "linux", not(ringloader_portable), not(ringloader_loom)))]
pub use bell::{Bell, Watch, process_handle, sleep};
pub use doorbell::WaitFlag;
#[cfg(not(ringloader_loom))]
pub use std::sync::Weak;
