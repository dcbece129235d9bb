//! Leaves and a skeleton back to a Python batch.

use std::cell::RefCell;
use std::collections::HashMap;

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList, PyTuple};
use ringloader_core::batch::{
    ArrayFlags, Leaf, LeafKind, Meta, SkeletonReader, StorageRecord, Token, integers,
};
use ringloader_core::transport::received::Received;

use super::template::TemplateCache;
use super::{MOST_DEPTH_READ, SMALL};
use crate::gil::{corrupt, exception};
use crate::objects;
use crate::strings;
use crate::torch::header::cost;
use crate::torch::memory::Copies;
use crate::torch::names::Torch;
use crate::torch::source::{Bytes, Span};
use crate::torch::tensor::{TensorForm, flat};

/// The outcome of decoding a delivery.
pub(crate) struct Decoded<'py> {
    /// The Python object that the delivery carries.
    pub(crate) object: Bound<'py, PyAny>,
    /// True if the batch had to be copied because the user holds too much.
    pub(crate) copied_out: bool,
    /// Memory of a table that is done with.
    pub(crate) table: Vec<u8>,
}

/// Decodes `delivery`. Its large tensors lie where the worker wrote them, for as long as they live; if the user
/// holds too much already, or `may_lease` is not given, they are copies, for which `require` is asked first.
///
/// # Errors
/// The error of `require`; `RuntimeError` for a table that no worker writes; the error that unpickling raises.
pub(crate) fn decode<'py>(
    py: Python<'py>,
    cache: &TemplateCache,
    mut delivery: Received,
    may_lease: bool,
    require: impl FnOnce(u64) -> PyResult<()>,
) -> PyResult<Decoded<'py>> {
    let large = delivery.len() > SMALL;
    let leased = large && may_lease && delivery.lease();
    if large && !leased {
        require(delivery.len())?;
    }
    let mut last = cache.take();
    let repeated = last.is_repeated(&delivery);
    let template = if repeated { last.template(py, &delivery)? } else { None };
    let object = match template {
        Some(template) => template.make(py, &delivery, leased),
        None => {
            let meta = delivery.meta().map_err(exception)?;
            read(py, (&delivery).into(), &meta, leased)
        }
    };
    let mut table = delivery.into_table();
    if !repeated {
        table = last.replace(table);
    }
    cache.put(last);
    Ok(Decoded { object: object?, copied_out: large && may_lease && !leased, table })
}

/// The batch, or sample, by its tables and its skeleton. Its large tensors lie in `bytes` if `leased`.
///
/// # Errors
/// `RuntimeError` for tables that are none; the error that unpickling raises.
pub(crate) fn read<'py>(
    py: Python<'py>,
    bytes: Bytes<'_>,
    meta: &Meta<'_>,
    leased: bool,
) -> PyResult<Bound<'py, PyAny>> {
    let mut shared = objects::vector(py, meta.storage_count() as usize)?;
    shared.resize(meta.storage_count() as usize, 0u32);
    let mut small = 0;
    for leaf in meta.leaves() {
        let shared = &mut shared[leaf.storage() as usize];
        *shared += 1;
        let nbytes = leaf.storage_record().nbytes;
        if *shared == 1 && nbytes <= SMALL && !matches!(leaf.kind(), LeafKind::Bytes) {
            small += cost(nbytes, leaf.ndim().max(1));
        }
    }
    let leaves = LeafReader {
        torch: Torch::get(py)?,
        bytes,
        meta,
        leased,
        copies: Copies::new(small),
        shared,
        storages: RefCell::default(),
    };
    // Room for all leaves, and for names and containers around them: more is seldom needed.
    let memo = objects::vector(py, 2 * meta.leaf_count() as usize + 8)?;
    let mut tree = Tree { leaves, skeleton: meta.skeleton(), memo, depth: 0 };
    let batch = tree.value(py)?;
    match tree.skeleton.remaining() {
        0 => Ok(batch),
        rest => Err(corrupt(&format!("{rest} bytes behind the skeleton"))),
    }
}

struct LeafReader<'a, 'py> {
    torch: &'static Torch,
    bytes: Bytes<'a>,
    meta: &'a Meta<'a>,
    leased: bool,
    copies: RefCell<Copies>,
    /// The number of leaves in each storage.
    shared: Vec<u32>,
    /// Storages that were made, for those with several leaves.
    storages: RefCell<HashMap<u32, Bound<'py, PyAny>>>,
}

impl<'py> LeafReader<'_, 'py> {
    fn leaf(&self, py: Python<'py>, number: u32) -> PyResult<Bound<'py, PyAny>> {
        let leaf = self.meta.leaf(number).ok_or_else(|| corrupt(&format!("no leaf {number}")))?;
        let record = leaf.storage_record();
        let copy = (!self.leased || record.nbytes <= SMALL).then_some(&self.copies);
        let is_shared = self.shared[leaf.storage() as usize] > 1;
        if record.nbytes > 0
            && !is_shared
            && let Some(form) = TensorForm::of(&leaf)
        {
            return form.tensor(py, self.bytes, copy);
        }
        match leaf.kind() {
            LeafKind::Tensor(dtype) => {
                let (shape, strides) = (leaf.shape().iter().collect(), leaf.strides().iter().collect());
                if record.nbytes == 0 {
                    return self.torch.new_on_cpu(py, dtype, shape, strides);
                }
                let storage = self.storage(py, &leaf, record, copy)?;
                let first = leaf.byte_offset() / dtype.itemsize() as u64;
                self.torch.tensor_in(&storage, dtype, first, shape, strides)
            }
            LeafKind::Array(flags) => self.array(py, &leaf, record, flags, copy),
            LeafKind::Storage => self.storage(py, &leaf, record, copy),
            LeafKind::Bytes => {
                Span::new(self.bytes, record.offset, record.nbytes)?.bytes(py).map(Bound::into_any)
            }
        }
    }

    /// The storage of a leaf, one for all leaves in it.
    fn storage(
        &self,
        py: Python<'py>,
        leaf: &Leaf<'_>,
        record: StorageRecord,
        copy: Option<&RefCell<Copies>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        if let Some(made) = self.storages.borrow().get(&leaf.storage()) {
            return Ok(made.clone());
        }
        let flat = flat(py, &Span::new(self.bytes, record.offset, record.nbytes)?, copy)?;
        let storage = flat.call_method0(strings::untyped_storage(py))?;
        self.storages.borrow_mut().insert(leaf.storage(), storage.clone());
        Ok(storage)
    }

    fn array(
        &self,
        py: Python<'py>,
        leaf: &Leaf<'_>,
        record: StorageRecord,
        flags: ArrayFlags,
        copy: Option<&RefCell<Copies>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let dtype = self.torch.array_dtype.bind(py).call1((PyBytes::new(py, leaf.dtype_tag()),))?;
        let shape = PyTuple::new(py, leaf.shape().iter())?;
        let order = if flags.fortran { strings::fortran(py) } else { strings::c_order(py) };
        if record.nbytes == 0 {
            return self.torch.empty_array.bind(py).call1((shape, dtype, order));
        }
        let len = record.nbytes - leaf.byte_offset();
        let span = Span::new(self.bytes, record.offset + leaf.byte_offset(), len)?;
        let flat = flat(py, &span, copy)?;
        let bytes = flat.call_method0(strings::numpy(py))?;
        if flags.read_only {
            // A read-only array must not become writable, just as one that is unpickled from `bytes` cannot.
            bytes.call_method1(strings::setflags(py), (false,))?;
        }
        self.torch.ndarray.bind(py).call1((shape, dtype, bytes, 0, py.None(), order))
    }
}

struct Tree<'a, 'py> {
    leaves: LeafReader<'a, 'py>,
    skeleton: SkeletonReader<'a>,
    /// `None` for a tuple that is not made yet.
    memo: Vec<Option<Bound<'py, PyAny>>>,
    depth: u32,
}

impl<'py> Tree<'_, 'py> {
    fn value(&mut self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        self.depth += 1;
        if self.depth > MOST_DEPTH_READ {
            return Err(corrupt("the skeleton is deeper than any that is written"));
        }
        let token = self.skeleton.next_token().map_err(exception)?;
        let value = match token {
            Token::Str(value) => {
                let text = objects::decoded(py, value)?.into_any();
                self.remember(text)?
            }
            Token::Leaf(number) => {
                let leaf = self.leaves.leaf(py, number)?;
                self.remember(leaf)?
            }
            Token::Memo(number) => {
                let known = self.memo.get(number as usize).cloned().flatten();
                known.ok_or_else(|| corrupt(&format!("memo {number} before its object")))?
            }
            Token::List(len) => {
                let list = PyList::empty(py);
                self.remember(list.clone().into_any())?;
                for _ in 0..len {
                    list.append(self.value(py)?)?;
                }
                list.into_any()
            }
            Token::Ints { width, bytes } => {
                let list = PyList::new(py, integers(width, bytes))?.into_any();
                self.remember(list)?
            }
            Token::Dict(len) => {
                let dict = PyDict::new(py);
                self.remember(dict.clone().into_any())?;
                for _ in 0..len {
                    let name = self.value(py)?;
                    dict.set_item(name, self.value(py)?)?;
                }
                dict.into_any()
            }
            Token::Tuple(len) => {
                let at = self.reserve(py)?;
                let tuple = self.items(py, len)?.into_any();
                self.memo[at] = Some(tuple.clone());
                tuple
            }
            Token::NamedTuple(len) => {
                let at = self.reserve(py)?;
                let name = self.items(py, 2)?;
                let items =
                    self.items(py, len.checked_sub(2).ok_or_else(|| corrupt("a class without a name"))?)?;
                let tuple = self.leaves.torch.named_tuple(&name, items)?;
                self.memo[at] = Some(tuple.clone());
                tuple
            }
            Token::Pickle(bytes) => self.unpickle(py, bytes)?,
            plain => objects::plain(py, plain).ok_or_else(|| corrupt("a token that is not known here"))?,
        };
        self.depth -= 1;
        Ok(value)
    }

    fn items(&mut self, py: Python<'py>, len: u32) -> PyResult<Bound<'py, PyTuple>> {
        let mut items = Vec::new();
        for _ in 0..len {
            let item = self.value(py)?;
            objects::push(py, &mut items, item)?;
        }
        PyTuple::new(py, items)
    }

    fn remember(&mut self, value: Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let at = self.reserve(value.py())?;
        self.memo[at] = Some(value.clone());
        Ok(value)
    }

    fn reserve(&mut self, py: Python<'py>) -> PyResult<usize> {
        objects::push(py, &mut self.memo, None)?;
        Ok(self.memo.len() - 1)
    }

    /// All leaves are made first: the pickle names them by number.
    fn unpickle(&self, py: Python<'py>, bytes: &[u8]) -> PyResult<Bound<'py, PyAny>> {
        let count = self.leaves.meta.leaf_count();
        let mut leaves = objects::vector(py, count as usize)?;
        for number in 0..count {
            leaves.push(self.leaves.leaf(py, number)?);
        }
        // A large pickle may find no memory, which must be an error and no panic.
        let pickle = PyBytes::new_with(py, bytes.len(), |into| {
            into.copy_from_slice(bytes);
            Ok(())
        })?;
        self.leaves.torch.loads.bind(py).call1((pickle, PyList::new(py, leaves)?))
    }
}
