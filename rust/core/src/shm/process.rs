#![forbid(unsafe_code)]
//! Which process this is, without asking the system each time.

use std::sync::OnceLock;

use super::layout::word_wiped_at_fork;
use crate::sync::{AtomicU32, Ordering};

/// The id of the process that this is, where it was asked for; zero otherwise, and so after a fork.
static KNOWN: OnceLock<Option<&'static AtomicU32>> = OnceLock::new();

/// Lets [`id`] be quick from now on.
pub(crate) fn prepare() {
    KNOWN.get_or_init(word_wiped_at_fork);
}

/// The id of this process. From any thread, and in forked children: it takes no lock.
pub(crate) fn id() -> u32 {
    let Some(Some(known)) = KNOWN.get() else { return std::process::id() };
    match known.load(Ordering::Relaxed) {
        0 => {
            let id = std::process::id();
            known.store(id, Ordering::Relaxed);
            id
        }
        id => id,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_id_is_remembered() {
        prepare();
        assert_eq!(id(), std::process::id());
        let known = KNOWN.get().unwrap().unwrap();
        assert_eq!(known.load(Ordering::Relaxed), std::process::id());
    }
}
