//! Torch's samplers as Python writes them, in lazy iterators, over a generator that keeps a record.

use std::cell::RefCell;
use std::iter;
use std::rc::Rc;

use ringloader_core::plan::Draw;

/// Why a generator's body raised.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Raised {
    /// `ZeroDivisionError`
    Division,
    /// A draw failed.
    Draw,
}

pub(crate) type Item = Result<i64, Raised>;
pub(crate) type Items = Box<dyn Iterator<Item = Item>>;

/// Random numbers that depend on everything that was drawn before, and what was asked for.
#[derive(Clone, Debug)]
pub(crate) struct Rng {
    state: u64,
    pub(crate) draws: Vec<Draw>,
    /// The draw of this number raises.
    pub(crate) fails_at: usize,
    /// The values of `num_samples` at the readings in turn; the last one for good.
    pub(crate) num_samples: Vec<u64>,
    pub(crate) readings: usize,
    /// The state at which the last permutation began. [`words`](Self::words) moves it on.
    twin: u64,
}

impl Rng {
    pub(crate) fn new(seed: u64, fails_at: usize, num_samples: Vec<u64>) -> Self {
        Self { state: seed, draws: Vec::new(), fails_at, num_samples, readings: 0, twin: 0 }
    }

    fn next(&mut self) -> u64 {
        u64::from(word(&mut self.state))
    }

    /// Returns what torch would return for the words of the last permutation that was drawn.
    pub(crate) fn words(&mut self, count: u64) -> Vec<i64> {
        let words: Vec<u32> = (0..count).map(|_| word(&mut self.twin)).collect();
        words
            .chunks(2)
            .map(|pair| match *pair {
                [first, second] => (u64::from(first) << 32 | u64::from(second)) as i64,
                [last] => i64::from(last & (u32::MAX >> 1)) << 32,
                _ => unreachable!("chunks of two"),
            })
            .collect()
    }

    /// Returns what torch would return, or nothing if torch raises.
    pub(crate) fn draw(&mut self, draw: Draw) -> Option<Vec<i64>> {
        self.draws.push(draw);
        if self.draws.len() > self.fails_at {
            return None;
        }
        let below = |rng: &mut Self, bound: u64| (rng.next() % bound) as i64;
        match draw {
            Draw::Seed => {
                self.next();
                Some(Vec::new())
            }
            Draw::Permutation { n } => {
                self.twin = self.state;
                let mut indices: Vec<i64> = (0..n as i64).collect();
                for i in 0..indices.len().saturating_sub(1) {
                    let ahead = below(self, n - i as u64) as usize;
                    indices.swap(i, i + ahead);
                }
                Some(indices)
            }
            Draw::Integers { high: 0, .. } => None,
            Draw::Integers { high: bound, count } | Draw::Multinomial { categories: bound, count } => {
                Some((0..count).map(|_| below(self, bound)).collect())
            }
            Draw::NumSamples | Draw::Words { .. } => unreachable!("nothing that torch's samplers draw"),
        }
    }

    pub(crate) fn read_num_samples(&mut self) -> u64 {
        self.readings += 1;
        self.num_samples[(self.readings - 1).min(self.num_samples.len() - 1)]
    }
}

fn word(state: &mut u64) -> u32 {
    *state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
    (*state >> 32) as u32
}

pub(crate) type Shared = Rc<RefCell<Rng>>;

/// `yield from draw(...)`, drawn when its first item is asked for.
fn yield_from(rng: &Shared, draw: impl FnOnce(&mut Rng) -> Draw + 'static, keep: Keep) -> Items {
    let rng = rng.clone();
    Box::new(iter::once(()).flat_map({
        let mut draw = Some(draw);
        move |()| {
            let mut rng = rng.borrow_mut();
            let draw = draw.take().expect("once")(&mut rng);
            let items: Vec<Item> = match rng.draw(draw) {
                Some(indices) => {
                    let count = match keep {
                        Keep::All => indices.len() as u64,
                        Keep::Rest { n } => rng.read_num_samples() % n,
                    };
                    indices.into_iter().take(count as usize).map(Ok).collect()
                }
                None => vec![Err(Raised::Draw)],
            };
            items
        }
    }))
}

#[derive(Clone, Copy)]
enum Keep {
    All,
    /// `[: self.num_samples % n]`
    Rest {
        n: u64,
    },
}

pub(crate) fn sequential(len: u64) -> Items {
    Box::new((0..len as i64).map(Ok))
}

pub(crate) fn random(rng: &Shared, n: u64, replacement: bool, private_generator: bool) -> Items {
    let rng = rng.clone();
    let body = move |()| -> Items {
        if private_generator && rng.borrow_mut().draw(Draw::Seed).is_none() {
            return Box::new(iter::once(Err(Raised::Draw)));
        }
        let num_samples = rng.borrow_mut().read_num_samples();
        let full = rng.clone();
        if replacement {
            let chunk = Draw::Integers { high: n, count: 32 };
            let rest = move |rng: &mut Rng| Draw::Integers { high: n, count: rng.read_num_samples() % 32 };
            let chunks =
                (0..num_samples / 32).flat_map(move |_| yield_from(&full, move |_| chunk, Keep::All));
            return Box::new(chunks.chain(yield_from(&rng, rest, Keep::All)));
        }
        if n == 0 {
            return Box::new(iter::once(Err(Raised::Division)));
        }
        let permutation = Draw::Permutation { n };
        let permutations =
            (0..num_samples / n).flat_map(move |_| yield_from(&full, move |_| permutation, Keep::All));
        Box::new(permutations.chain(yield_from(&rng, move |_| permutation, Keep::Rest { n })))
    };
    Box::new(iter::once(()).flat_map(body))
}

pub(crate) fn permuted(rng: &Shared, len: u64) -> Items {
    yield_from(rng, move |_| Draw::Permutation { n: len }, Keep::All)
}

pub(crate) fn weighted(rng: &Shared, categories: u64, num_samples: u64) -> Items {
    yield_from(rng, move |_| Draw::Multinomial { categories, count: num_samples }, Keep::All)
}

/// A `DistributedSampler`'s attributes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Distributed {
    pub(crate) len: u64,
    pub(crate) num_replicas: u64,
    pub(crate) rank: u64,
    pub(crate) shuffle: bool,
    pub(crate) drop_last: bool,
}

impl Distributed {
    /// `math.ceil` of what its constructor divides.
    pub(crate) fn num_samples(&self) -> u64 {
        if self.drop_last && !self.len.is_multiple_of(self.num_replicas) {
            self.len.saturating_sub(self.num_replicas).div_ceil(self.num_replicas)
        } else {
            self.len.div_ceil(self.num_replicas)
        }
    }

    pub(crate) fn items(self, rng: &Shared) -> Items {
        let rng = rng.clone();
        Box::new(iter::once(()).flat_map(move |()| -> Vec<Item> {
            let mut indices: Vec<i64> = (0..self.len as i64).collect();
            if self.shuffle {
                match rng.borrow_mut().draw(Draw::Permutation { n: self.len }) {
                    Some(permutation) => indices = permutation,
                    None => return vec![Err(Raised::Draw)],
                }
            }
            let total = (self.num_samples() * self.num_replicas) as usize;
            if self.drop_last {
                indices.truncate(total);
            } else {
                let padding = total - indices.len();
                if padding <= indices.len() {
                    indices.extend_from_within(..padding);
                } else {
                    let times = padding.div_ceil(indices.len());
                    let repeated = indices.repeat(times);
                    indices.extend_from_slice(&repeated[..padding]);
                }
            }
            assert_eq!(indices.len(), total);
            let own: Vec<Item> = indices
                .into_iter()
                .skip(self.rank as usize)
                .step_by(self.num_replicas as usize)
                .map(Ok)
                .collect();
            assert_eq!(own.len() as u64, self.num_samples());
            own
        }))
    }
}

/// `BatchSampler.__iter__`
pub(crate) struct Batches {
    items: iter::Fuse<Items>,
    size: usize,
    drop_last: bool,
    finished: bool,
}

impl Batches {
    pub(crate) fn new(items: Items, size: u64, drop_last: bool) -> Self {
        Self { items: items.fuse(), size: size as usize, drop_last, finished: false }
    }
}

impl Iterator for Batches {
    type Item = Result<Vec<i64>, Raised>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.finished {
            return None;
        }
        let batch: Result<Vec<i64>, Raised> = self.items.by_ref().take(self.size).collect();
        match batch {
            Err(raised) => {
                self.finished = true;
                Some(Err(raised))
            }
            // `zip` ends within the tuple, `islice` only if it is empty.
            Ok(batch) if batch.is_empty() || self.drop_last && batch.len() < self.size => {
                self.finished = true;
                None
            }
            Ok(batch) => Some(Ok(batch)),
        }
    }
}
