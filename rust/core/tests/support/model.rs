//! Running a loom model, with a count of what it explored for `ci/loom.sh`.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

/// Explores the executions of `body` and prints how many there were.
///
/// # Panics
/// As `body` does in any execution, or if there was but one: then nothing ran at once.
pub(crate) fn explore(name: &str, body: impl Fn() + Send + Sync + 'static) {
    let executions = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&executions);
    loom::model(move || {
        count.fetch_add(1, Ordering::Relaxed);
        body();
    });
    let executions = executions.load(Ordering::Relaxed);
    assert!(executions > 1, "the model {name} has one execution: its threads do not meet");
    println!("model {name}: {executions} executions");
}
