//! Atomics, and what is built of nothing else.
//!
//! | module | about |
//! |---|---|
//! | `atomics` | which atomics these are |
//! | `cache_padded` | words on cache lines of their own |
//! | [`Lock`] | a mutex that a panic does not poison |
//! | [`awaited`] | the threads that an end waits for |
//! | [`doorbell`] | sleep and wake between two processes, the only `fence(SeqCst)` |
//! | [`adaptive_spin`] | looking again for a moment before a sleep |
//! | [`ready`] | which of many workers have committed something |

pub mod adaptive_spin;
mod atomics;
pub mod awaited;
mod cache_padded;
pub mod doorbell;
mod lock;
pub mod ready;

pub use atomics::*;
pub use awaited::Awaited;
pub use cache_padded::CachePadded;
pub use doorbell::WaitFlag;
pub use lock::Lock;
