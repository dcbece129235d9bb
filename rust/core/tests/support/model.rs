//! Running a loom model, with a count of what it explored for `ci/loom.sh`.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
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

/// Counts how often each situation has occurred, over all executions of a model.
#[derive(Clone, Default)]
pub(crate) struct Seen(Arc<Mutex<BTreeMap<&'static str, usize>>>);

impl Seen {
    pub(crate) fn note(&self, situation: &'static str) {
        *self.0.lock().unwrap().entry(situation).or_default() += 1;
    }
}

/// Explores the model, and then asks that each of these situations has occurred: an assertion in a
/// branch that is never entered proves nothing.
pub(crate) fn explore_all(
    name: &str,
    situations: &[&'static str],
    model: impl Fn(&Seen) + Sync + Send + 'static,
) {
    let seen = Seen::default();
    let within = seen.clone();
    explore(name, move || model(&within));
    let seen = seen.0.lock().unwrap();
    for situation in situations {
        assert!(seen.contains_key(situation), "{name} never got to: {situation}");
    }
}
