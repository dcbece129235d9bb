//! torch's samplers, read natively, as a Python class.

use std::sync::OnceLock;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyList;
use pyo3::{PyTraverseError, PyVisit};
use ringloader_core::plan::{BatchRule as CoreRule, Draw, Source, Step, Supply, fingerprint_of};
use ringloader_core::sync::Lock;
use ringloader_core::transport::message::{TaskIndex, TaskKind};

use super::codec::{decode_index, encode_index_or_pickle};
use super::fingerprint::{Passing, Values, values_of};
use crate::gil::exception;
use crate::lock::DetachedLock;
use crate::objects;
use crate::python::Draws;
use crate::strings;
use crate::torch::elements::TensorIndices;

/// The rule that makes batches of indices.
#[pyclass(frozen, module = "ringloader._native")]
pub(crate) struct BatchRule {
    size: u64,
    drop_last: bool,
    /// The batch sampler, where torch looks at its size before each batch.
    resizable: Option<Py<PyAny>>,
}

#[pymethods]
impl BatchRule {
    #[new]
    #[pyo3(signature = (size, drop_last, resizable=None))]
    fn new(size: u64, drop_last: bool, resizable: Option<Py<PyAny>>) -> Self {
        Self { size, drop_last, resizable }
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.resizable)
    }
}

/// An index that a stream has given.
pub(crate) struct Read {
    /// The index as a task's bytes.
    pub(crate) index: TaskIndex,
    /// The number of its samples.
    pub(crate) samples: u64,
    /// The values of an index that was found as an object, where they are wanted.
    pub(crate) object: Option<Values>,
}

/// The indices of one of torch's samplers, over numbers that torch draws.
#[pyclass(frozen, weakref, module = "ringloader._native")]
pub(crate) struct Stream {
    core: Lock<ringloader_core::plan::Stream>,
    /// Held by a thread of the caller's for a whole request, draws included: threads may share an iterator.
    request: DetachedLock<()>,
    /// The batch sampler, where torch looks at its size before each batch.
    resizable: Option<Py<PyAny>>,
    /// The sampler in whose `indices` the numbers are positions.
    through: Option<Py<PyAny>>,
    /// With `through`, what it begins with: it has no positions, and [`placeholder`]s stand for it.
    carried: OnceLock<Py<PyList>>,
    /// Compares the indices that are passed over.
    passing: OnceLock<Py<Passing>>,
}

#[pymethods]
impl Stream {
    /// The most elements of a permutation that may be made of words.
    #[classattr]
    const MOST_WORD_BY_WORD: u64 = Supply::MOST_WORD_BY_WORD;

    /// `SequentialSampler` over `len` samples.
    #[staticmethod]
    fn sequential(len: u64, batch: Option<&BatchRule>) -> PyResult<Self> {
        Self::new(Source::Sequential { len }, batch)
    }

    /// `RandomSampler` over `n` samples.
    #[staticmethod]
    fn random(
        n: u64,
        replacement: bool,
        private_generator: bool,
        batch: Option<&BatchRule>,
    ) -> PyResult<Self> {
        Self::new(Source::Random { n, replacement, private_generator }, batch)
    }

    /// `SubsetRandomSampler`, which has `len` indices.
    #[staticmethod]
    fn subset(sampler: Py<PyAny>, len: u64, batch: Option<&BatchRule>) -> PyResult<Self> {
        Ok(Self { through: Some(sampler), ..Self::new(Source::Subset { len }, batch)? })
    }

    /// `WeightedRandomSampler`.
    #[staticmethod]
    fn weighted(categories: u64, num_samples: u64, batch: Option<&BatchRule>) -> PyResult<Self> {
        Self::new(Source::Weighted { categories, num_samples }, batch)
    }

    /// `DistributedSampler`, after the first `start` samples of all ranks.
    #[staticmethod]
    #[pyo3(signature = (len, num_samples, num_replicas, rank, shuffle, drop_last, batch, start=0))]
    #[expect(clippy::too_many_arguments, reason = "the sampler's attributes")]
    fn distributed(
        len: u64,
        num_samples: u64,
        num_replicas: u64,
        rank: u64,
        shuffle: bool,
        drop_last: bool,
        batch: Option<&BatchRule>,
        start: u64,
    ) -> PyResult<Self> {
        Self::new(
            Source::Distributed { len, num_samples, num_replicas, rank, shuffle, drop_last, start },
            batch,
        )
    }

    /// `_InfiniteConstantSampler`.
    #[staticmethod]
    fn nones(batch: Option<&BatchRule>) -> PyResult<Self> {
        Self::new(Source::InfiniteNone, batch)
    }

    /// Begins with `first`, which an earlier stream left, and gives `draws` what it leaves itself. For a stream that
    /// was not asked yet, and drops its last batch. `first` has exact ints, and with `subset` any objects.
    fn roll_over(&self, first: &Bound<'_, PyList>) -> PyResult<()> {
        let numbers = match self.through {
            None => first.extract()?,
            Some(_) => (0..first.len()).map(placeholder).collect(),
        };
        self.core.lock().roll_over(numbers).map_err(exception)?;
        if self.through.is_some() {
            let _ = self.carried.set(first.clone().unbind());
        }
        Ok(())
    }

    /// The next index or batch of indices, with `draws` asked for what torch draws. Other threads wait.
    ///
    /// Raises torch's `ValueError` where this thread is in the middle of a request: inside a sampler's `len`, for
    /// example.
    fn next(&self, draws: &Bound<'_, PyAny>) -> PyResult<Option<Py<PyAny>>> {
        let py = draws.py();
        let request = self.request.lock_unless_held(py)?;
        let _request = request.ok_or_else(|| PyValueError::new_err("generator already executing"))?;
        let read = self.read(&Draws(draws), false, false)?;
        let index = read.map(|Read { index: (kind, bytes), .. }| decode_index(py, kind, &bytes));
        index.map(|index| index.map(Bound::unbind)).transpose()
    }

    /// Passes over what `passing` has, and has it compare these indices: ordinal `k` is at `place + k * step`. For a
    /// stream that was not asked yet.
    #[pyo3(signature = (passing, place=0, step=1))]
    fn skip(&self, passing: Py<Passing>, place: u64, step: u64) -> PyResult<()> {
        self.core.lock().skip(passing.get().ranges().clone(), place, step).map_err(exception)?;
        let _ = self.passing.set(passing);
        Ok(())
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.resizable)?;
        visit.call(&self.through)?;
        visit.call(self.carried.get())
    }
}

impl Stream {
    fn new(source: Source, batch: Option<&BatchRule>) -> PyResult<Self> {
        let rule = batch.map(|&BatchRule { size, drop_last, .. }| CoreRule { size, drop_last });
        let core = ringloader_core::plan::Stream::new(source, rule).map_err(exception)?;
        let resizable = batch.and_then(|rule| rule.resizable.as_ref());
        let resizable = resizable.map(|sampler| Python::attach(|py| sampler.clone_ref(py)));
        Ok(Self {
            core: Lock::new(core),
            request: DetachedLock::new(()),
            resizable,
            through: None,
            carried: OnceLock::new(),
            passing: OnceLock::new(),
        })
    }

    /// Compares the indices that are passed over. An error, for other indices than expected, ends the stream.
    fn compare(&self, compare: impl FnOnce(&Passing) -> PyResult<()>) -> PyResult<()> {
        let compared = self.passing.get().map_or(Ok(()), |passing| compare(passing.get()));
        compared.inspect_err(|_| self.core.lock().close())
    }

    /// The next index, whose bytes may be unpickled more than once if `again`, with the values of objects if
    /// `compares`. `draws` is called, at torch's moment, for each thing that torch draws.
    pub(crate) fn read(&self, draws: &Draws<'_, '_>, again: bool, compares: bool) -> PyResult<Option<Read>> {
        let given = |index, samples| Ok(Some(Read { index, samples, object: None }));
        let found_as = |object: &Bound<'_, PyAny>, samples| {
            let index = encode_index_or_pickle(object, again)?;
            Ok(Some(Read { index, samples, object: compares.then(|| values_of(object)) }))
        };
        let has_ended = self.core.lock().has_ended();
        if !has_ended && let Some(batches) = &self.resizable {
            let size =
                batch_size(batches.bind(draws.py()), draws).inspect_err(|_| self.core.lock().close())?;
            self.core.lock().resize(size);
        }
        loop {
            let need = {
                let mut core = self.core.lock();
                let word = |index: i64| index.to_le_bytes().to_vec();
                match (core.next(), &self.through) {
                    (Ok(Step::Batch(positions)), Some(sampler)) => {
                        let positions = positions.to_vec();
                        drop(core);
                        let found =
                            self.look_up(sampler, draws, |indices| self.items(indices, &positions))?;
                        return found_as(&found, positions.len() as u64);
                    }
                    (Ok(Step::Index(position)), Some(sampler)) => {
                        drop(core);
                        let found = self.look_up(sampler, draws, |indices| item(indices, position))?;
                        return found_as(&found, 1);
                    }
                    (Ok(Step::Batch(indices)), None) => {
                        let bytes = indices.iter().flat_map(|index| index.to_le_bytes()).collect();
                        return given((TaskKind::Indices, bytes), indices.len() as u64);
                    }
                    (Ok(Step::Index(index)), None) => return given((TaskKind::Index, word(index)), 1),
                    (Ok(Step::Nones(count)), _) => {
                        return given((TaskKind::Nones, word(count as i64)), count);
                    }
                    (Ok(Step::None), _) => return given((TaskKind::None, Vec::new()), 1),
                    (Ok(Step::Passed { place, indices: positions, .. }), Some(sampler)) => {
                        let positions = positions.to_vec();
                        drop(core);
                        let found =
                            self.look_up(sampler, draws, |indices| self.items(indices, &positions))?;
                        self.compare(|passing| passing.note(&found, place, positions.len() as u64))?;
                        continue;
                    }
                    (Ok(Step::Passed { place, step, indices }), None) => {
                        let ordinals = indices.len() as u64;
                        let sum = fingerprint_of(place, step, indices.iter().copied());
                        drop(core);
                        self.compare(|passing| passing.add(ordinals, Some(sum)))?;
                        continue;
                    }
                    (Ok(Step::End), through) => {
                        let rest = core.take_rest();
                        drop(core);
                        self.compare(Passing::finish)?;
                        if rest.is_empty() {
                            return Ok(None);
                        }
                        let left = match through {
                            None => {
                                let ints = rest
                                    .into_iter()
                                    .map(|index| objects::int(draws.py(), index).map(Bound::into_any));
                                objects::list(draws.py(), ints)?.into_any()
                            }
                            Some(sampler) => {
                                self.look_up(sampler, draws, |indices| self.items(indices, &rest))?
                            }
                        };
                        return draws.leave(left).map(|()| None);
                    }
                    (Ok(Step::Need(need)), _) => need,
                    (Err(other), _) => return Err(exception(other)),
                }
            };
            // After the lock is released, because torch's functions and the user's `len` run here.
            let supply = fetch(draws, need)?;
            self.core.lock().supply(supply).map_err(exception)?;
        }
    }

    /// Returns what `read` finds in the sampler's `indices` as they are now. An error ends the stream.
    fn look_up<'py>(
        &self,
        sampler: &Py<PyAny>,
        draws: &Draws<'_, 'py>,
        read: impl FnOnce(&Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = draws.py();
        let indices = sampler.bind(py).getattr(strings::indices(py));
        indices.and_then(|indices| read(&indices)).inspect_err(|_| self.core.lock().close())
    }

    /// `[indices[at] for at in positions]`, with what was carried over where a placeholder stands.
    fn items<'py>(&self, indices: &Bound<'py, PyAny>, positions: &[i64]) -> PyResult<Bound<'py, PyAny>> {
        let py = indices.py();
        let found = positions.iter().map(|&at| match self.carried.get() {
            Some(carried) if at < 0 => carried.bind(py).get_item(!at as usize),
            _ => item(indices, at),
        });
        let found = found.collect::<PyResult<Vec<_>>>()?;
        Ok(objects::list(py, found.into_iter().map(Ok::<_, PyErr>))?.into_any())
    }
}

/// Stands where a position does, for the object of that number among those carried over: it is negative.
fn placeholder(number: usize) -> i64 {
    !(number as i64)
}

/// `indices[at]`
fn item<'py>(indices: &Bound<'py, PyAny>, at: i64) -> PyResult<Bound<'py, PyAny>> {
    match indices.cast_exact::<PyList>() {
        Ok(list) => list.get_item(at as usize),
        Err(_) => indices.get_item(at),
    }
}

/// The batch sampler's size.
fn batch_size<'py>(batches: &Bound<'py, PyAny>, draws: &Draws<'_, 'py>) -> PyResult<u64> {
    let size = batches.getattr(strings::batch_size(batches.py()))?;
    match size.extract::<i64>() {
        Ok(plain @ 0..) => Ok(plain as u64),
        _ => draws.odd_size(&size),
    }
}

fn fetch(draws: &Draws<'_, '_>, need: Draw) -> PyResult<Supply> {
    let indices = |found: Bound<'_, PyAny>| Ok(Supply::Indices(Box::new(TensorIndices::new(&found)?)));
    match need {
        Draw::Seed => draws.seed().map(|()| Supply::Seeded),
        Draw::NumSamples => Ok(Supply::NumSamples(draws.num_samples()?)),
        Draw::Permutation { n } => draws.permutation(n)?.map_or(Ok(Supply::WordByWord), indices),
        Draw::Words { count } => indices(draws.words(count)?),
        Draw::Integers { high, count } => indices(draws.integers(high, count)?),
        Draw::Multinomial { .. } => indices(draws.multinomial()?),
    }
}
