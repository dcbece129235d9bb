//! torch's samplers, read natively, as a Python class.

use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::exceptions::PyZeroDivisionError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyList;
use ringloader_core::Error;
use ringloader_core::plan::{BatchRule, Draw, Source, Step, Supply};
use ringloader_core::transport::message::TaskKind;

use crate::gil::exception;
use crate::index::codec::{decode_index, encode_index_or_pickle};
use crate::index::tensor::TensorIndices;

/// The indices of one of torch's samplers, over numbers that torch draws.
#[pyclass(frozen, module = "ringloader._native")]
pub(crate) struct Stream {
    core: Mutex<ringloader_core::plan::Stream>,
    /// What it yields are positions in the sampler's `indices`.
    through_indices: bool,
}

#[pymethods]
impl Stream {
    /// The most elements of a permutation that may be made of words.
    #[classattr]
    const MOST_WORD_BY_WORD: u64 = Supply::MOST_WORD_BY_WORD;

    /// `SequentialSampler` over `len` samples.
    #[staticmethod]
    fn sequential(len: u64, batch: Option<(u64, bool)>) -> PyResult<Self> {
        Self::new(Source::Sequential { len }, batch)
    }

    /// `RandomSampler` over `n` samples.
    #[staticmethod]
    fn random(
        n: u64,
        replacement: bool,
        private_generator: bool,
        batch: Option<(u64, bool)>,
    ) -> PyResult<Self> {
        Self::new(Source::Random { n, replacement, private_generator }, batch)
    }

    /// `SubsetRandomSampler` over `len` indices.
    #[staticmethod]
    fn subset(len: u64, batch: Option<(u64, bool)>) -> PyResult<Self> {
        Ok(Self { through_indices: true, ..Self::new(Source::Subset { len }, batch)? })
    }

    /// `WeightedRandomSampler`.
    #[staticmethod]
    fn weighted(categories: u64, num_samples: u64, batch: Option<(u64, bool)>) -> PyResult<Self> {
        Self::new(Source::Weighted { categories, num_samples }, batch)
    }

    /// `DistributedSampler`.
    #[staticmethod]
    fn distributed(
        len: u64,
        num_samples: u64,
        num_replicas: u64,
        rank: u64,
        shuffle: bool,
        drop_last: bool,
        batch: Option<(u64, bool)>,
    ) -> PyResult<Self> {
        Self::new(Source::Distributed { len, num_samples, num_replicas, rank, shuffle, drop_last }, batch)
    }

    /// `_InfiniteConstantSampler`.
    #[staticmethod]
    fn nones(batch: Option<(u64, bool)>) -> PyResult<Self> {
        Self::new(Source::InfiniteNone, batch)
    }

    /// The next index or batch of indices, with `draw` asked for what torch draws.
    fn next(&self, py: Python<'_>, draw: &Bound<'_, PyAny>) -> PyResult<Option<Py<PyAny>>> {
        let read = self.read(draw)?;
        read.map(|(kind, bytes)| decode_index(py, kind, &bytes).map(Bound::unbind)).transpose()
    }
}

impl Stream {
    fn new(source: Source, batch: Option<(u64, bool)>) -> PyResult<Self> {
        let rule = batch.map(|(size, drop_last)| BatchRule { size, drop_last });
        let core = ringloader_core::plan::Stream::new(source, rule).map_err(exception)?;
        Ok(Self { core: Mutex::new(core), through_indices: false })
    }

    /// The next index, as a task's bytes. `draw` is called, at torch's moment, for each thing that torch draws.
    pub(crate) fn read(&self, draw: &Bound<'_, PyAny>) -> PyResult<Option<(TaskKind, Vec<u8>)>> {
        let has_ended = self.core().has_ended();
        if !has_ended && let Some(size) = batch_size(draw).inspect_err(|_| self.core().close())? {
            self.core().resize(size);
        }
        loop {
            let need = {
                let mut core = self.core();
                let word = |index: i64| index.to_le_bytes().to_vec();
                match core.next() {
                    Ok(Step::Batch(positions)) if self.through_indices => {
                        let positions = positions.to_vec();
                        drop(core);
                        return self.look_up(draw, |indices| {
                            let found: PyResult<Vec<_>> =
                                positions.iter().map(|&at| item(indices, at)).collect();
                            Ok(PyList::new(draw.py(), found?)?.into_any())
                        });
                    }
                    Ok(Step::Index(position)) if self.through_indices => {
                        drop(core);
                        return self.look_up(draw, |indices| item(indices, position));
                    }
                    Ok(Step::Batch(indices)) => {
                        let bytes = indices.iter().flat_map(|index| index.to_le_bytes()).collect();
                        return Ok(Some((TaskKind::Indices, bytes)));
                    }
                    Ok(Step::Index(index)) => return Ok(Some((TaskKind::Index, word(index)))),
                    Ok(Step::Nones(count)) => return Ok(Some((TaskKind::Nones, word(count as i64)))),
                    Ok(Step::None) => return Ok(Some((TaskKind::None, Vec::new()))),
                    Ok(Step::End) => return Ok(None),
                    Ok(Step::Need(need)) => need,
                    Err(Error::EmptySource) => {
                        return Err(PyZeroDivisionError::new_err("integer division or modulo by zero"));
                    }
                    Err(other) => return Err(exception(other)),
                }
            };
            // Not under the lock: torch's functions, and the user's `len`, run here.
            let supply = fetch(draw, need)?;
            self.core().supply(supply).map_err(exception)?;
        }
    }

    fn core(&self) -> MutexGuard<'_, ringloader_core::plan::Stream> {
        self.core.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What `read` finds in the sampler's `indices` as they are now. What it raises ends the stream.
    fn look_up<'py>(
        &self,
        draw: &Bound<'py, PyAny>,
        read: impl FnOnce(&Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>>,
    ) -> PyResult<Option<(TaskKind, Vec<u8>)>> {
        let py = draw.py();
        let indices = draw.getattr(intern!(py, "sampler"))?.getattr(intern!(py, "indices"));
        let index = indices.and_then(|indices| read(&indices)).inspect_err(|_| self.core().close())?;
        encode_index_or_pickle(&index).map(Some)
    }
}

/// `indices[at]`
fn item<'py>(indices: &Bound<'py, PyAny>, at: i64) -> PyResult<Bound<'py, PyAny>> {
    match indices.cast_exact::<PyList>() {
        Ok(list) => list.get_item(at as usize),
        Err(_) => indices.get_item(at),
    }
}

/// The batch sampler's size, where torch looks at it before each batch.
fn batch_size(draw: &Bound<'_, PyAny>) -> PyResult<Option<u64>> {
    let py = draw.py();
    let batches = draw.getattr(intern!(py, "resizable"))?;
    if batches.is_none() {
        return Ok(None);
    }
    let size = batches.getattr(intern!(py, "batch_size"))?;
    match size.extract::<i64>() {
        Ok(plain @ 0..) => Ok(Some(plain as u64)),
        _ => draw.call_method1(intern!(py, "odd_size"), (size,))?.extract().map(Some),
    }
}

fn fetch(draw: &Bound<'_, PyAny>, need: Draw) -> PyResult<Supply> {
    let indices = |found: Bound<'_, PyAny>| Ok(Supply::Indices(Box::new(TensorIndices::new(&found)?)));
    match need {
        Draw::Seed => draw.call_method0("seed").map(|_| Supply::Seeded),
        Draw::NumSamples => Ok(Supply::NumSamples(draw.call_method0("num_samples")?.extract()?)),
        Draw::Permutation { n } => {
            let found = draw.call_method1("permutation", (n,))?;
            if found.is_none() { Ok(Supply::WordByWord) } else { indices(found) }
        }
        Draw::Words { count } => indices(draw.call_method1("words", (count,))?),
        Draw::Integers { high, count } => indices(draw.call_method1("integers", (high, count))?),
        Draw::Multinomial { .. } => indices(draw.call_method0("multinomial")?),
    }
}
