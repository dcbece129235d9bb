//! Batches of torch's samplers, as a Python class; and a permutation that is made while it is read.

use std::sync::OnceLock;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyRange, PyRangeMethods};
use pyo3::{PyTraverseError, PyVisit};
use ringloader_core::number::usize_from;
use ringloader_core::plan::{
    BatchRule as CoreRule, Chunk, Indices, Shuffle as CoreShuffle, Step, Stream as CoreStream, fingerprint_of,
};
use ringloader_core::sync::Lock;
use ringloader_core::transport::message::{TaskIndex, TaskKind};

use super::codec::{decode_index, encode_index_or_pickle, ints};
use super::fingerprint::{Passing, Values, values_of};
use crate::gil::exception;
use crate::lock::DetachedLock;
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

/// The indices of one of torch's samplers, in batches, over numbers that torch draws.
#[pyclass(frozen, weakref, module = "ringloader._native")]
pub(crate) struct Stream {
    core: Lock<CoreStream>,
    /// Torch's draws, each at its moment: a generator. `None` for the sampler that gives `None`.
    chunks: Option<Py<PyAny>>,
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
    /// A stream over `chunks`, an iterator of a sampler's indices: int64 vectors, bytes of int64, or ranges. None: a
    /// sampler that gives None, without end. `through`: the sampler in whose `indices` they are positions.
    #[new]
    #[pyo3(signature = (chunks, batch=None, through=None))]
    fn new(
        chunks: Option<Py<PyAny>>,
        batch: Option<&BatchRule>,
        through: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        let rule = batch.map(|&BatchRule { size, drop_last, .. }| CoreRule { size, drop_last });
        let make = if chunks.is_some() { CoreStream::new } else { CoreStream::nones };
        let resizable = batch.and_then(|rule| rule.resizable.as_ref());
        Ok(Self {
            core: Lock::new(make(rule).map_err(exception)?),
            chunks,
            request: DetachedLock::new(()),
            resizable: resizable.map(|sampler| Python::attach(|py| sampler.clone_ref(py))),
            through,
            carried: OnceLock::new(),
            passing: OnceLock::new(),
        })
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

    /// The next index or batch of indices. Other threads wait.
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
        visit.call(&self.chunks)?;
        visit.call(&self.resizable)?;
        visit.call(&self.through)?;
        visit.call(self.carried.get())
    }
}

impl Stream {
    /// Returns what torch draws next; `None` at the sampler's end.
    fn next_chunk(&self, py: Python<'_>) -> PyResult<Option<Chunk>> {
        let Some(chunks) = &self.chunks else { return Ok(None) };
        let Some(found) = chunks.bind(py).try_iter()?.next() else { return Ok(None) };
        let found = found?;
        Ok(Some(if let Ok(bytes) = found.cast_exact::<PyBytes>() {
            Chunk::Drawn(Box::new(ints(bytes.as_bytes()).collect::<Vec<_>>()))
        } else if let Ok(range) = found.cast_exact::<PyRange>() {
            let (start, step) = (range.start()? as i64, range.step()? as i64);
            Chunk::Range { start, step, len: range.len()? as u64 }
        } else {
            Chunk::Drawn(Box::new(TensorIndices::new(&found)?))
        }))
    }

    /// Compares the indices that are passed over. An error, for other indices than expected, ends the stream.
    fn compare(&self, compare: impl FnOnce(&Passing) -> PyResult<()>) -> PyResult<()> {
        let compared = self.passing.get().map_or(Ok(()), |passing| compare(passing.get()));
        compared.inspect_err(|_| self.core.lock().close())
    }

    /// The next index, whose bytes may be unpickled more than once if `again`, with the values of objects if
    /// `compares`.
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
            {
                let mut core = self.core.lock();
                let word = |index: i64| index.to_le_bytes().to_vec();
                match (core.next(), &self.through) {
                    (Step::Batch(positions), Some(sampler)) => {
                        let positions = positions.to_vec();
                        drop(core);
                        let found =
                            self.look_up(sampler, draws, |indices| self.items(indices, &positions))?;
                        return found_as(&found, positions.len() as u64);
                    }
                    (Step::Index(position), Some(sampler)) => {
                        drop(core);
                        let found = self.look_up(sampler, draws, |indices| item(indices, position))?;
                        return found_as(&found, 1);
                    }
                    (Step::Batch(indices), None) => {
                        let bytes = indices.iter().flat_map(|index| index.to_le_bytes()).collect();
                        return given((TaskKind::Indices, bytes), indices.len() as u64);
                    }
                    (Step::Index(index), None) => return given((TaskKind::Index, word(index)), 1),
                    (Step::Nones(count), _) => {
                        return given((TaskKind::Nones, word(count as i64)), count);
                    }
                    (Step::None, _) => return given((TaskKind::None, Vec::new()), 1),
                    (Step::Passed { place, indices: positions, .. }, Some(sampler)) => {
                        let positions = positions.to_vec();
                        drop(core);
                        let found =
                            self.look_up(sampler, draws, |indices| self.items(indices, &positions))?;
                        self.compare(|passing| passing.note(&found, place, positions.len() as u64))?;
                        continue;
                    }
                    (Step::Passed { place, step, indices }, None) => {
                        let ordinals = indices.len() as u64;
                        let sum = fingerprint_of(place, step, indices.iter().copied());
                        drop(core);
                        self.compare(|passing| passing.add(ordinals, Some(sum)))?;
                        continue;
                    }
                    (Step::End, through) => {
                        let rest = core.take_rest();
                        drop(core);
                        self.compare(Passing::finish)?;
                        if rest.is_empty() {
                            return Ok(None);
                        }
                        let left = match through {
                            None => PyList::new(draws.py(), rest)?.into_any(),
                            Some(sampler) => {
                                self.look_up(sampler, draws, |indices| self.items(indices, &rest))?
                            }
                        };
                        return draws.leave(left).map(|()| None);
                    }
                    (Step::Need, _) => {}
                }
            }
            // After the lock is released, because torch's functions and the user's `len` run here.
            let chunk = self.next_chunk(draws.py())?;
            self.core.lock().supply(chunk);
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
            Some(carried) if at < 0 => carried.bind(py).get_item(usize_from((!at).cast_unsigned())),
            _ => item(indices, at),
        });
        let found = found.collect::<PyResult<Vec<_>>>()?;
        Ok(PyList::new(py, found)?.into_any())
    }
}

/// Stands where a position does, for the object of that number among those carried over: it is negative.
fn placeholder(number: usize) -> i64 {
    !(number as i64)
}

/// `indices[at]`
fn item<'py>(indices: &Bound<'py, PyAny>, at: i64) -> PyResult<Bound<'py, PyAny>> {
    match indices.cast_exact::<PyList>() {
        Ok(list) => list.get_item(usize_from(at.cast_unsigned())),
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

/// A permutation of `n` elements, made while it is read: what torch's `randperm` makes of the same words.
#[pyclass(frozen, module = "ringloader._native")]
pub(crate) struct Shuffle(Lock<CoreShuffle>);

#[pymethods]
impl Shuffle {
    /// The most elements that torch permutes in this way.
    #[classattr]
    const MOST: u64 = CoreShuffle::MOST;

    #[new]
    fn new(n: u64) -> PyResult<Self> {
        CoreShuffle::new(n).map(|core| Self(Lock::new(core))).map_err(exception)
    }

    /// Returns the number of words to supply before the first `count` elements are known.
    fn missing(&self, count: u64) -> u64 {
        self.0.lock().missing(count)
    }

    /// Takes `count` words: two to an int64, the first one in the upper half.
    fn supply(&self, words: &Bound<'_, PyAny>, count: u64) -> PyResult<()> {
        let words = TensorIndices::new(words)?;
        self.0.lock().supply(words.as_slice(), count).map_err(exception)
    }

    /// Returns `count` elements as bytes of int64, the first at `start`, and `step` positions between them.
    fn read<'py>(&self, py: Python<'py>, start: u64, step: u64, count: u64) -> PyResult<Bound<'py, PyBytes>> {
        let core = self.0.lock();
        let element = |number| core.get(start.saturating_add(step.saturating_mul(number)));
        let elements: Option<Vec<_>> = (0..count).map(element).collect();
        let elements = elements.ok_or_else(|| PyValueError::new_err("elements that are not known"))?;
        Ok(PyBytes::new(py, &elements.into_iter().flat_map(i64::to_le_bytes).collect::<Vec<_>>()))
    }
}
