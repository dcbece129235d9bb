//! A Python batch to leaves and a skeleton.
//!
//! Exact dicts, lists, tuples, named tuples, numbers, strings, bytes and `None` become tokens; plain
//! tensors and arrays become leaves. Where anything else comes up, the whole batch is pickled
//! instead, still with tensors, arrays and storages as leaves: one pickle keeps "the same object
//! twice" over the whole batch, as torch's does.
//!
//! INVARIANT: no address outlives a moment in which foreign code may run: what pickling calls, finalisers and signal
//! handlers, other threads once the interpreter is let go. Walking over plain tensors and exact containers runs none,
//! and its addresses hold. Whatever else is done after the first address was taken sets [`Drafts::disturbed`], and
//! then [`Encoded::verify`] looks at every leaf again before a byte is copied.
//!
//! Free-threaded, other threads always run. There what is copied is held, of whatever size, and looked at once more
//! ([`Groups::hold`]), and each object that may be met again is held too, so that no other gets its address.

use std::ops::Range;

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple};
use ringloader_core::batch::MetaWriter;
use ringloader_core::number::u32_from;
use ringloader_core::sync::Lock;

use super::LONGEST_TABLE_KEPT;
use super::groups::Groups;
use super::leaves::Drafts;
use crate::identity::ByIdentity;
use crate::objects::{entries_of, items_of};
use crate::torch::names::Torch;

/// Trees that are deeper are pickled, which has a limit and an error of its own.
const MOST_DEPTH_WRITTEN: u32 = 100;

/// The number of times that an object is read if others change it meanwhile.
const MOST_LOOKS: u32 = 100;

/// Longer `bytes` are leaves, shorter ones lie in the skeleton.
const INLINE_BYTES: usize = 4096;

/// The fewest integers of a list that are written as one token.
const FEWEST_INTEGERS: usize = 4;

/// The parts of a batch that are known before the batch has memory.
#[derive(Default)]
pub(crate) struct Encoded {
    /// The batch's skeleton; storages and leaves are added when the groups are formed.
    pub(crate) meta: MetaWriter,
    pub(crate) drafts: Drafts,
    pub(crate) groups: Groups,
    /// The pickle, where it was pickled.
    pub(crate) pickled: Option<Py<PyBytes>>,
    /// Objects met before, to their memo number; `None` for a tuple whose items are being walked.
    memo: ByIdentity<Option<u32>>,
}

impl Encoded {
    /// Makes an empty one, for objects that come back exactly as they were, any number of times, in any process.
    pub(crate) fn exact() -> Self {
        Self { drafts: Drafts::new(true), ..Self::default() }
    }

    /// Encodes `batch` into an empty one.
    ///
    /// # Errors
    /// The error that pickling raises for an object that cannot be pickled.
    pub(crate) fn encode(&mut self, batch: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = batch.py();
        let torch = Torch::get(py)?;
        self.drafts.disturbed = torch.asks_through_python(py)?;
        if (Walk { torch, to: self, depth: 0 }).value(batch)? {
            return Ok(());
        }
        self.clear();
        let leaves = Bound::new(py, Leaves::new(self.drafts.exact))?;
        let dumps = if self.drafts.exact { &torch.exact_dumps } else { &torch.dumps };
        let pickled = dumps.bind(py).call1((batch, &leaves))?.cast_into::<PyBytes>()?;
        self.meta.skeleton().pickle(pickled.as_bytes());
        self.drafts = leaves.get().take();
        self.drafts.disturbed = true;
        self.pickled = Some(pickled.unbind());
        Ok(())
    }

    /// Checks that the leaves are where the groups say, once the batch has its memory. After a return with `true`,
    /// addresses hold until foreign code may run. After `false` the batch was encoded again, or leaves have moved: the
    /// caller must form the groups and lay them out again.
    ///
    /// # Errors
    /// The error that pickling raises; `RuntimeError` where a tensor is larger than its storage, or where a leaf has
    /// lost its memory and the batch cannot be read again.
    pub(crate) fn verify(&mut self, batch: &Bound<'_, PyAny>) -> PyResult<bool> {
        let py = batch.py();
        if self.groups.has_held() {
            self.groups.hold(py, &mut self.drafts)?;
        }
        self.groups.check_copied(py, &mut self.drafts)?;
        if !self.drafts.disturbed {
            return Ok(true);
        }
        let found = self.drafts.look(Torch::get(py)?, py);
        if let Ok(true) = found {
            return Ok(true);
        }
        let Some(pickled) = &self.pickled else {
            // Reading it again calls no foreign code.
            self.clear();
            self.encode(batch)?;
            return Ok(false);
        };
        found?;
        self.groups.clear();
        self.meta.clear();
        self.meta.skeleton().pickle(pickled.as_bytes(py));
        // The addresses are those of now, but the groups are not.
        Ok(false)
    }

    /// Forms the groups of leaves. `filled`: memory in which leaves may lie where they are to be.
    ///
    /// # Errors
    /// As [`Groups::form`].
    pub(crate) fn form(&mut self, py: Python<'_>, filled: Range<usize>) -> PyResult<()> {
        self.groups.form(py, &mut self.drafts, filled, &mut self.meta)
    }

    /// As [`Groups::lay_out`].
    pub(crate) fn lay_out(&mut self, bump: Option<u64>) -> u64 {
        self.groups.lay_out(&mut self.meta, bump)
    }

    /// Lets `place` form the groups and find memory for them, and looks at `object` after that, until nobody has changed
    /// it meanwhile. `None` once `place` gives none. `what`: the object and its verb, for the error.
    ///
    /// # Errors
    /// Those of `place` and of [`verify`](Self::verify); `RuntimeError` when it is changed each time.
    pub(crate) fn settle<T>(
        &mut self,
        object: &Bound<'_, PyAny>,
        what: &str,
        mut place: impl FnMut(&mut Self) -> PyResult<Option<T>>,
    ) -> PyResult<Option<T>> {
        for _ in 0..MOST_LOOKS {
            let Some(placed) = place(self)? else { return Ok(None) };
            if self.verify(object)? {
                return Ok(Some(placed));
            }
        }
        let text =
            format!("the {what} changed by another thread each time that it was read, {MOST_LOOKS} times");
        Err(PyRuntimeError::new_err(text))
    }

    /// Lets go of the batch and keeps the memory, so that a steady stream of similar batches allocates nothing. Returns
    /// true if the memory is worth keeping: the memory of one huge batch would otherwise never be freed.
    pub(crate) fn clear(&mut self) -> bool {
        let bytes = self.meta.encoded_len();
        self.meta.clear();
        self.drafts.clear();
        self.groups.clear();
        self.memo.clear();
        self.pickled = None;
        bytes <= LONGEST_TABLE_KEPT
    }
}

/// The memory in which the last object was encoded, empty. A thread that encodes has it meanwhile.
#[derive(Default)]
pub(crate) struct Spare(Lock<Option<Box<Encoded>>>);

impl Spare {
    /// Encodes with this memory, or with a `new` one. A fork may have come while another thread had the lock, so nobody
    /// waits for it.
    pub(crate) fn with<T>(&self, new: fn() -> Encoded, encode: impl FnOnce(&mut Encoded) -> T) -> T {
        let spare = self.0.try_lock().and_then(|mut spare| spare.take());
        let mut encoded = spare.unwrap_or_else(|| Box::new(new()));
        let made = encode(&mut encoded);
        if encoded.clear()
            && let Some(mut spare) = self.0.try_lock()
        {
            *spare = Some(encoded);
        }
        made
    }

    /// Frees the memory.
    pub(crate) fn free(&self) {
        drop(self.0.lock().take());
    }
}

struct Walk<'a> {
    torch: &'a Torch,
    to: &'a mut Encoded,
    depth: u32,
}

impl Walk<'_> {
    /// Writes one value; `false` if the batch must be pickled.
    fn value(&mut self, object: &Bound<'_, PyAny>) -> PyResult<bool> {
        if object.is_none() {
            self.to.meta.skeleton().none();
        } else if let Ok(value) = object.cast_exact::<PyBool>() {
            self.to.meta.skeleton().bool(value.is_true());
        } else if object.is_exact_instance_of::<PyInt>() {
            let Ok(value) = object.extract() else { return Ok(false) };
            self.to.meta.skeleton().int(value);
        } else if let Ok(value) = object.cast_exact::<PyFloat>() {
            self.to.meta.skeleton().float(value.value());
        } else {
            return self.memoised(object);
        }
        Ok(true)
    }

    /// A value that may be met again as the same object.
    fn memoised(&mut self, object: &Bound<'_, PyAny>) -> PyResult<bool> {
        let key = object.as_ptr() as usize;
        match self.to.memo.get(&key) {
            Some(&Some(number)) => {
                self.to.meta.skeleton().memo(number);
                return Ok(true);
            }
            Some(None) => return Ok(false),
            None => {}
        }
        if let Ok(text) = object.cast_exact::<PyString>() {
            // Lone surrogates are no UTF-8; pickle knows how to write them.
            let Ok(text) = text.to_str() else { return Ok(false) };
            let number = self.to.meta.skeleton().str(text);
            self.remember(object, Some(number));
            return Ok(true);
        }
        if let Ok(bytes) = object.cast_exact::<PyBytes>() {
            let bytes = bytes.as_bytes();
            if bytes.len() <= INLINE_BYTES {
                self.to.meta.skeleton().bytes(bytes);
                return Ok(true);
            }
            let leaf = self.to.drafts.bytes(object, bytes);
            self.leaf(object, leaf);
            return Ok(true);
        }
        if let Some(leaf) = self.to.drafts.add(self.torch, object)? {
            self.leaf(object, leaf);
            return Ok(true);
        }
        if self.depth == MOST_DEPTH_WRITTEN {
            return Ok(false);
        }
        self.depth += 1;
        let whole = self.container(object);
        self.depth -= 1;
        whole
    }

    fn leaf(&mut self, object: &Bound<'_, PyAny>, leaf: u32) {
        let number = self.to.meta.skeleton().leaf(leaf);
        self.remember(object, Some(number));
    }

    fn remember(&mut self, object: &Bound<'_, PyAny>, number: Option<u32>) {
        self.to.memo.insert(object.as_ptr() as usize, number);
        if cfg!(Py_GIL_DISABLED) {
            self.to.drafts.held.push(object.clone().unbind());
        }
    }

    fn container(&mut self, object: &Bound<'_, PyAny>) -> PyResult<bool> {
        if let Ok(list) = object.cast_exact::<PyList>() {
            if let Some(values) = integers(list) {
                let number = self.to.meta.skeleton().ints(&values);
                self.remember(object, Some(number));
                return Ok(true);
            }
            let items = items_of(list);
            let len = items.len();
            let number = self.to.meta.skeleton().list(u32_from(len as u64));
            self.remember(object, Some(number));
            for item in items {
                if !self.value(&item)? {
                    return Ok(false);
                }
            }
            // Code of the user's that ran meanwhile may have changed it: pickle has its own way with that.
            return Ok(list.len() == len);
        }
        if let Ok(dict) = object.cast_exact::<PyDict>() {
            let entries = entries_of(dict);
            let len = entries.len();
            let number = self.to.meta.skeleton().dict(u32_from(len as u64));
            self.remember(object, Some(number));
            for (name, item) in entries {
                // Checks the length as for a list, but after each item: the iterator panics when the number of items
                // has changed.
                if !self.value(&name)? || !self.value(&item)? || dict.len() != len {
                    return Ok(false);
                }
            }
            return Ok(true);
        }
        let Ok(tuple) = object.cast::<PyTuple>() else { return Ok(false) };
        let mut class = None;
        let number = if tuple.is_exact_instance_of::<PyTuple>() {
            self.to.meta.skeleton().tuple(u32_from(tuple.len() as u64))
        } else {
            let py = object.py();
            self.to.drafts.disturb();
            let name = self.torch.named_tuple_name.bind(py).call1((object.get_type(),))?;
            if name.is_none() {
                return Ok(false);
            }
            // The memo has the addresses of its strings.
            self.to.drafts.held.push(name.clone().unbind());
            class = Some(name.cast_into::<PyTuple>()?);
            self.to.meta.skeleton().named_tuple(u32_from(tuple.len() as u64) + 2)
        };
        // A tuple that contains itself, by way of a list, cannot be made before its items are.
        self.remember(object, None);
        for item in class.iter().flatten().chain(tuple.iter()) {
            if !self.value(&item)? {
                return Ok(false);
            }
        }
        self.remember(object, Some(number));
        Ok(true)
    }
}

/// The items of a list of integers only, if there are enough of them to be written as one token.
fn integers(list: &Bound<'_, PyList>) -> Option<Vec<i64>> {
    let len = list.len();
    let first = if len < FEWEST_INTEGERS { None } else { list.get_item(0).ok() };
    first.filter(|item| item.is_exact_instance_of::<PyInt>())?;
    let mut values = Vec::new();
    values.try_reserve_exact(len).ok()?;
    for item in list.iter() {
        if !item.is_exact_instance_of::<PyInt>() {
            return None;
        }
        values.push(item.extract().ok()?);
    }
    Some(values)
}

/// Answers the pickler's question for each object that it does not write by itself: is it a leaf? It is its
/// `reducer_override`, which numbers, strings and exact containers pass by.
#[pyclass(frozen, module = "ringloader._native")]
#[derive(Default)]
pub(crate) struct Leaves {
    drafts: Lock<Drafts>,
}

#[pymethods]
impl Leaves {
    /// Returns the reduced form of the leaf that stands for `object`; `NotImplemented` where there is none.
    fn __call__(&self, object: &Bound<'_, PyAny>) -> PyResult<Py<PyAny>> {
        let py = object.py();
        let torch = Torch::get(py)?;
        // Taken out and put back: what is asked of torch meanwhile may run any code.
        let mut drafts = self.take();
        let number = match drafts.known.get(&(object.as_ptr() as usize)) {
            Some(&number) => Ok(Some(number)),
            None => match drafts.add(torch, object) {
                Ok(Some(number)) => {
                    drafts.known.insert(object.as_ptr() as usize, number);
                    Ok(Some(number))
                }
                other => other,
            },
        };
        *self.drafts.lock() = drafts;
        match number? {
            Some(number) => Ok((&torch.leaf, (number,)).into_pyobject(py)?.into_any().unbind()),
            None => Ok(py.NotImplemented()),
        }
    }
}

impl Leaves {
    /// Leaves that come back as they are, if `exact`.
    pub(super) fn new(exact: bool) -> Self {
        Self { drafts: Lock::new(Drafts::new(exact)) }
    }

    pub(super) fn take(&self) -> Drafts {
        std::mem::take(&mut self.drafts.lock())
    }
}
