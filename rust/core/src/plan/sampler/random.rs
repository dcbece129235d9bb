//! `RandomSampler`
#![forbid(unsafe_code)]

use super::drawn::Drawn;
use super::{Draw, Pull, Supply};
use crate::{Error, Result};

/// The number of indices that torch draws at once with replacement.
const CHUNK: u64 = 32;

/// Full draws, and then what is left over.
///
/// MIRRORS torch sampler.py::RandomSampler.__iter__
#[derive(Debug)]
pub(super) struct Random {
    n: u64,
    replacement: bool,
    private_generator: bool,
    state: RandomStage,
}

#[derive(Debug)]
enum RandomStage {
    Start,
    Seeded,
    /// `num_samples` was read for the first time.
    Counted {
        num_samples: u64,
    },
    /// `left` full draws are to come.
    Full {
        left: u64,
    },
    FullDrawn {
        drawn: Drawn,
        left: u64,
    },
    /// `num_samples` was read again.
    Recounted {
        num_samples: u64,
    },
    /// The rest is to come: `count` indices of its draw.
    Rest {
        count: u64,
    },
    RestDrawn {
        drawn: Drawn,
    },
}

impl Random {
    pub(super) fn new(n: u64, replacement: bool, private_generator: bool) -> Self {
        Self { n, replacement, private_generator, state: RandomStage::Start }
    }

    pub(super) fn pull(&mut self, limit: u64, out: &mut Vec<i64>) -> Result<Pull> {
        loop {
            match &mut self.state {
                RandomStage::Start if self.private_generator => return Ok(Pull::Need(Draw::Seed)),
                RandomStage::Start => self.state = RandomStage::Seeded,
                RandomStage::Seeded => return Ok(Pull::Need(Draw::NumSamples)),
                &mut RandomStage::Counted { num_samples } => {
                    self.state = RandomStage::Full { left: num_samples / self.draw_len()? };
                }
                RandomStage::Full { left: 0 } => return Ok(Pull::Need(Draw::NumSamples)),
                RandomStage::Full { .. } => return Ok(Pull::Need(self.draw(self.draw_len()?))),
                RandomStage::FullDrawn { drawn, left } if drawn.is_empty() => {
                    // Frees the draw before the next one is asked for, as torch does.
                    self.state = RandomStage::Full { left: *left };
                }
                RandomStage::FullDrawn { drawn, .. } => {
                    return drawn.take(limit, out);
                }
                &mut RandomStage::Recounted { num_samples } => {
                    self.state = RandomStage::Rest { count: num_samples % self.draw_len()? };
                }
                // Torch draws a permutation of which it uses nothing. It moves the user's generator, and with it the
                // next epoch; a private one is gone with this stream, and the time is saved.
                RandomStage::Rest { count: 0 } if self.private_generator && !self.replacement => {
                    return Ok(Pull::End);
                }
                &mut RandomStage::Rest { count } => return Ok(Pull::Need(self.draw(count))),
                RandomStage::RestDrawn { drawn } if drawn.is_empty() => return Ok(Pull::End),
                RandomStage::RestDrawn { drawn } => {
                    return drawn.take(limit, out);
                }
            }
        }
    }

    pub(super) fn supply(&mut self, draw: Draw, supply: Supply) -> Result<()> {
        if let (
            RandomStage::FullDrawn { drawn, .. } | RandomStage::RestDrawn { drawn },
            Draw::Words { count },
        ) = (&mut self.state, draw)
        {
            drawn.supply(supply.into_indices(), count);
            return Ok(());
        }
        self.state = match (&self.state, supply) {
            (RandomStage::Start, Supply::Seeded) => RandomStage::Seeded,
            (RandomStage::Seeded, Supply::NumSamples(num_samples)) => RandomStage::Counted { num_samples },
            (RandomStage::Full { .. }, Supply::NumSamples(num_samples)) => {
                RandomStage::Recounted { num_samples }
            }
            (&RandomStage::Full { left }, supply) => {
                let draws = supply.into_draws(draw)?;
                let count = draws.len();
                RandomStage::FullDrawn { drawn: Drawn::new(draws, count, self.n), left: left - 1 }
            }
            (&RandomStage::Rest { count }, supply) => {
                RandomStage::RestDrawn { drawn: Drawn::new(supply.into_draws(draw)?, count, self.n) }
            }
            (state, supply) => unreachable!("{supply:?} answers no need of {state:?}"),
        };
        Ok(())
    }

    /// Returns the number of indices in a full draw.
    fn draw_len(&self) -> Result<u64> {
        match (self.replacement, self.n) {
            (true, _) => Ok(CHUNK),
            (false, 0) => Err(Error::EmptySource),
            (false, n) => Ok(n),
        }
    }

    /// The draw of which `count` indices are used. A permutation is always a whole one.
    fn draw(&self, count: u64) -> Draw {
        if self.replacement {
            Draw::Integers { high: self.n, count }
        } else {
            Draw::Permutation { n: self.n }
        }
    }
}
