//! Failpoints: named moments between two stores, at which a test lets the process sleep or die.
//!
//! Others repair what a dying process has left undone. That only shows where it dies at the few instructions that
//! matter, which a random SIGKILL practically never hits. Outside a build with `--cfg ringloader_failpoints` a
//! failpoint is nothing at all. In such a build the variable `RINGLOADER_FAILPOINT` selects one, as `NAME:kill` or
//! `NAME:MICROSECONDS`, each followed by `:N` if only the Nth time counts; a test selects one for its own process with
//! `select`. Models need none of this: under loom a thread dies before any store (`testing/crash.rs`).

#[cfg(ringloader_failpoints)]
pub use chosen::{failpoint, select};

/// The failpoint `name`: nothing happens in this build.
#[cfg(not(ringloader_failpoints))]
#[inline(always)]
pub const fn failpoint(name: &str) {
    let _ = name;
}

#[cfg(ringloader_failpoints)]
mod chosen {
    use std::sync::{LazyLock, Mutex, PoisonError};
    use std::time::Duration;

    use rustix::process::{Signal, getpid, kill_process};

    #[derive(Debug)]
    struct Choice {
        name: String,
        /// `None`: die.
        sleep: Option<Duration>,
        /// The number of times that the failpoint still passes without effect; `None`: it always has an effect.
        before: Option<u64>,
    }

    static CHOICE: LazyLock<Mutex<Option<Choice>>> =
        LazyLock::new(|| Mutex::new(std::env::var("RINGLOADER_FAILPOINT").ok().map(|text| parse(&text))));

    fn parse(text: &str) -> Choice {
        let mut fields = text.split(':');
        let name = fields.next().unwrap_or_default().to_owned();
        let number = |field: &str| -> u64 {
            field.parse().unwrap_or_else(|_| panic!("RINGLOADER_FAILPOINT={text}: {field} is no number"))
        };
        let sleep = match fields.next() {
            Some("kill") => None,
            Some(micros) => Some(Duration::from_micros(number(micros))),
            None => panic!("RINGLOADER_FAILPOINT={text}: NAME:kill or NAME:MICROSECONDS is expected"),
        };
        Choice { name, sleep, before: fields.next().map(|nth| number(nth).saturating_sub(1)) }
    }

    /// Selects a failpoint of this process, as the variable does; the empty text selects none.
    pub fn select(text: &str) {
        let choice = (!text.is_empty()).then(|| parse(text));
        *CHOICE.lock().unwrap_or_else(PoisonError::into_inner) = choice;
    }

    /// The failpoint `name`.
    pub fn failpoint(name: &str) {
        let sleep = {
            let mut choice = CHOICE.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(chosen) = choice.as_mut().filter(|chosen| chosen.name == name) else { return };
            let sleep = chosen.sleep;
            match &mut chosen.before {
                Some(0) => *choice = None,
                Some(before) => {
                    *before -= 1;
                    return;
                }
                None => {}
            }
            sleep
        };
        match sleep {
            Some(time) => std::thread::sleep(time),
            None => {
                let _ = kill_process(getpid(), Signal::KILL);
                unreachable!("SIGKILL ends every process");
            }
        }
    }
}
