//! The clock of another machine, compared with this one's: by questions and answers, as NTP does it.

use crate::timing::Stamps;

/// A worker's clock.
#[derive(Debug, Default)]
pub(super) struct PeerClock {
    /// The worker's time less ours, and how long question and answer took; `None` before the first answer.
    known: Option<(i64, u64)>,
}

impl PeerClock {
    /// Takes an answer. `asked` and `now` are moments of this clock, `heard` and `answered` of the other; all but `now`
    /// have come over the connection, and may be anything.
    pub(super) fn take(&mut self, asked: u64, heard: u64, answered: u64, now: u64) {
        let took = now.saturating_sub(asked).saturating_sub(answered.saturating_sub(heard));
        // The shortest way is known best.
        if self.known.is_none_or(|(_, before)| took <= before) {
            let there = heard as i64 / 2 + answered as i64 / 2;
            let here = asked as i64 / 2 + now as i64 / 2;
            self.known = Some((there.saturating_sub(here), took));
        }
    }

    /// Turns the other clock's moments of a batch into ours. Lengths stay. None is after `now`.
    pub(super) fn translate(&self, stamps: Stamps, now: u64) -> Stamps {
        let Some((ahead, _)) = self.known else { return stamps };
        let moment = |there: u64| match there {
            0 => 0,
            there => there.saturating_add_signed(ahead.saturating_neg()).min(now),
        };
        let Stamps { asked, got, collating, made, sent, .. } = stamps;
        let [asked, got, collating, made, sent] = [asked, got, collating, made, sent].map(moment);
        Stamps { asked, got, collating, made, sent, ..stamps }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn moments_are_translated_by_the_quickest_answer() {
        let mut clock = PeerClock::default();
        let there = Stamps {
            asked: 1_000_100,
            got: 1_000_200,
            made: 1_000_300,
            sent: 1_000_400,
            ..Stamps::default()
        };
        assert_eq!(clock.translate(there, 5000), there);
        // Their clock is a million ahead.
        clock.take(100, 1_000_110, 1_000_120, 130);
        clock.take(200, 1_000_900, 1_000_901, 1000);
        let here = Stamps { asked: 100, got: 200, made: 300, sent: 400, ..Stamps::default() };
        assert_eq!(clock.translate(there, 5000), here);
        assert_eq!(clock.translate(there, 350).sent, 350, "nothing was sent after it came");
    }

    #[test]
    fn any_moments_may_come() {
        let moments = [0, 1, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 63) + 1, u64::MAX];
        for asked in moments {
            for heard in moments {
                for answered in moments {
                    let mut clock = PeerClock::default();
                    clock.take(asked, heard, answered, 5000);
                    let there = Stamps { asked, got: heard, sent: answered, ..Stamps::default() };
                    assert!(clock.translate(there, 5000).sent <= 5000);
                }
            }
        }
    }
}
