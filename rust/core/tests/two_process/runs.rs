//! The runs: what each does, how long it takes, and what it prints.

use std::time::{Duration, Instant};

use super::forks;
use super::joint;
use super::parent::Seen;
use super::registered;
use super::samples;
use super::scheduling;
use super::storms::{self, Effort};
use super::worker;

type Run = fn(Effort) -> Seen;

const RUNS: &[(&str, Run)] = &[
    ("plain", storms::plain),
    ("oversize", storms::oversize),
    ("no_room", storms::no_room),
    ("hoard", storms::hoard),
    ("kept_over_the_end", storms::kept_over_the_end),
    ("epochs", storms::epochs),
    ("kills", storms::kills),
    ("scheduling", scheduling::kills),
    ("registered", registered::registered),
    ("forks", forks::forks),
    ("samples", samples::kills),
    ("joint", joint::kills),
    #[cfg(ringloader_failpoints)]
    ("slow_forks", forks::slow_forks),
    #[cfg(ringloader_failpoints)]
    ("samples_deaths", samples::deaths),
    #[cfg(ringloader_failpoints)]
    ("joint_deaths", joint::deaths),
    #[cfg(ringloader_failpoints)]
    ("scheduling_deaths", scheduling::deaths),
    #[cfg(ringloader_failpoints)]
    ("deaths", super::points::deaths),
    #[cfg(ringloader_failpoints)]
    ("slow_release", super::points::slow_release),
    #[cfg(ringloader_failpoints)]
    ("slow_release_over_a_death", super::points::slow_release_over_a_death),
    #[cfg(ringloader_failpoints)]
    ("slow_release_of_a_lost_bit", super::points::slow_release_of_a_lost_bit),
    #[cfg(ringloader_failpoints)]
    ("close_during_drain", super::points::close_during_drain),
    #[cfg(ringloader_failpoints)]
    ("close_during_drain_in_order", super::points::close_during_drain_in_order),
];

fn number(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable}={text}: a whole number is expected")))
}

pub(crate) fn main() {
    if let Ok(orders) = std::env::var(worker::ORDERS) {
        return match orders.split(' ').next() {
            Some(samples::NAME) => samples::work(&orders),
            Some(joint::NAME) => joint::work(&orders),
            _ => worker::run(&orders),
        };
    }
    let wanted: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    let seed = number("RINGLOADER_TEST_SEED").unwrap_or_else(|| u64::from(std::process::id()));
    let seconds = number("RINGLOADER_TEST_SECONDS");
    println!("seed {seed}");
    let mut total = Seen::default();
    for (name, run) in
        RUNS.iter().filter(|(name, _)| wanted.is_empty() || wanted.iter().any(|part| part == name))
    {
        let longest = match *name {
            "kills" => seconds.unwrap_or(4),
            "scheduling" => seconds.map_or(2, |all| all.div_ceil(2)),
            _ => seconds.map_or(1, |all| (all / 20).max(1)),
        };
        let start = Instant::now();
        let seen = run(Effort { time: Duration::from_secs(longest), seed });
        println!("run {name}: {:.1} s, {seen:?}", start.elapsed().as_secs_f64());
        total += seen;
    }
    assert!(total.batches > 0, "nothing ran: {wanted:?} is none of the runs");
    println!("two_process: {} batches, {} kills", total.batches, total.kills);
}
