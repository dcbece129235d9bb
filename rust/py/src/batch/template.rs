//! Batches that look like the one before: their tree and tables are read only once.
//!
//! From one batch of an epoch to the next, usually only the tensors' elements change. If the table repeats, byte for
//! byte, all that was checked and looked up for the earlier batch is valid for this one too. Then only tensors and
//! containers are new objects; batches share what cannot change, such as the keys of dicts.

use std::sync::OnceLock;

use pyo3::prelude::*;
use pyo3::types::{PyDict, PyInt, PyList, PyTuple};
use ringloader_core::batch::{Meta, SkeletonReader, Token, integers};
use ringloader_core::sync::{Arc, Lock};
use ringloader_core::transport::received::Received;

use super::{LONGEST_TABLE_KEPT, MOST_DEPTH_READ, SMALL};
use crate::gil::exception;
use crate::objects;
use crate::torch::header::cost;
use crate::torch::memory::Copies;
use crate::torch::names::Torch;
use crate::torch::tensor::TensorForm;

/// The last batch of one engine, kept to compare the next one with it.
#[derive(Default)]
pub(crate) struct TemplateCache(Lock<LastBatch>);

/// The last batch's table, and what came of it. A thread that decodes a batch has it meanwhile.
#[derive(Default)]
pub(crate) struct LastBatch {
    table: Vec<u8>,
    seen: Seen,
}

#[derive(Default)]
enum Seen {
    /// Once: it may never come again.
    #[default]
    Once,
    /// Again, and it cannot be a template.
    Unfit,
    Again(Arc<Template>),
}

impl TemplateCache {
    pub(crate) fn take(&self) -> LastBatch {
        std::mem::take(&mut self.0.lock())
    }

    pub(crate) fn put(&self, last: LastBatch) {
        let before = std::mem::replace(&mut *self.0.lock(), last);
        // After the lock is released: `before` may hold objects whose end runs any code.
        drop(before);
    }
}

impl TemplateCache {
    /// Returns what `make` returns for the template of a delivery; `None` if there can be none.
    ///
    /// # Errors
    /// The errors of `make`; `RuntimeError` for a table that no worker writes.
    pub(crate) fn with<T>(
        &self,
        py: Python<'_>,
        delivery: &Received,
        make: impl FnOnce(&Arc<Template>) -> PyResult<T>,
    ) -> PyResult<Option<T>> {
        let mut last = self.take();
        if !last.is_repeated(delivery) {
            last.replace(delivery.table().to_vec());
        }
        let made = last.template(py, delivery).and_then(|found| found.map(make).transpose());
        self.put(last);
        made
    }
}

impl LastBatch {
    /// Remembers a batch that was not like the last one, and returns the last one's table.
    pub(crate) fn replace(&mut self, table: Vec<u8>) -> Vec<u8> {
        let table = if table.len() <= LONGEST_TABLE_KEPT { table } else { Vec::new() };
        self.seen = Seen::Once;
        std::mem::replace(&mut self.table, table)
    }

    /// The template for `delivery`, if it looks like the last batch and there can be one.
    ///
    /// # Errors
    /// `RuntimeError` for what no worker writes.
    pub(crate) fn template(
        &mut self,
        py: Python<'_>,
        delivery: &Received,
    ) -> PyResult<Option<&Arc<Template>>> {
        if matches!(self.seen, Seen::Once) {
            let meta = delivery.meta().map_err(exception)?;
            self.seen =
                Template::of(py, &meta)?.map_or(Seen::Unfit, |template| Seen::Again(Arc::new(template)));
        }
        Ok(if let Seen::Again(template) = &self.seen { Some(template) } else { None })
    }

    /// Returns true if `delivery` looks like the last batch.
    pub(crate) fn is_repeated(&self, delivery: &Received) -> bool {
        delivery.repeats(&self.table)
    }
}

/// Makes a batch from the bytes of a delivery. Only for trees in which no object but strings comes twice, and whose
/// leaves are tensors, each with memory of its own.
pub(crate) struct Template {
    root: Node,
    /// Bytes of all that is copied out as small, for [`Copies`].
    small: usize,
    /// Made with the second batch that asks for it: the first may be the only one.
    prototypes: OnceLock<OnceLock<Prototypes>>,
    /// True if torch's `pin_memory` does the same to each such batch as to its tensors.
    pub(crate) is_pinned_by_leaves: bool,
    /// True if the batch is moved to a device by moving its tensors.
    pub(crate) is_moved_by_leaves: bool,
}

/// For each tensor of a batch, in order, an object of which it is made; `None` for one that is made without.
pub(crate) type Prototypes = Vec<Option<Py<PyAny>>>;

enum Node {
    /// An immutable object, the same for all batches.
    Value(Py<PyAny>),
    Tensor(TensorForm<'static>),
    List(Vec<Node>),
    Tuple(Vec<Node>),
    /// A named tuple, by module and name of its class. The class is looked up each time: the program may have defined
    /// it again, and a reference to it would keep its module alive, and with it the loader.
    NamedTuple(Py<PyTuple>, Vec<Node>),
    Dict(Vec<(Node, Node)>),
}

impl Template {
    fn of(py: Python<'_>, meta: &Meta<'_>) -> PyResult<Option<Self>> {
        let mut reader =
            TemplateReader { meta, skeleton: meta.skeleton(), strings: Vec::new(), depth: 0, small: 0 };
        // If there are as many storages as leaves, and each storage is named once, each leaf has a storage of its own.
        if meta.storage_count() != meta.leaf_count() || !all_differ(meta.leaves().map(|leaf| leaf.storage()))
        {
            return Ok(None);
        }
        let Some(root) = reader.node(py)? else { return Ok(None) };
        let whole = reader.skeleton.remaining() == 0;
        if !whole {
            return Ok(None);
        }
        let has = |method| root.has_method(py, method);
        Ok(Some(Self {
            is_pinned_by_leaves: !has("pin_memory")?,
            is_moved_by_leaves: !has("to")?,
            root,
            small: reader.small,
            prototypes: OnceLock::new(),
        }))
    }

    /// The batch that lies in `delivery`. Large tensors lie there, if `leased`; else they are copies.
    ///
    /// # Errors
    /// The error that torch raises, or that the search for a class raises; `RuntimeError` when the bytes are not all
    /// there.
    pub(crate) fn make<'py>(
        &self,
        py: Python<'py>,
        delivery: &Received,
        leased: bool,
    ) -> PyResult<Bound<'py, PyAny>> {
        let copies = Copies::new(self.small);
        self.make_of(py, &|form: &TensorForm<'_>| {
            let copied = !leased || form.nbytes() <= SMALL;
            form.tensor(py, delivery, copied.then_some(&copies))
        })
    }

    /// Returns what `make` made of each tensor's form; `None` for the first batch that asks.
    ///
    /// # Errors
    /// The errors of `make`.
    pub(crate) fn prototypes(
        &self,
        make: impl Fn(&TensorForm<'_>) -> PyResult<Option<Py<PyAny>>>,
    ) -> PyResult<Option<&Prototypes>> {
        let Some(made) = self.prototypes.get() else {
            self.prototypes.get_or_init(OnceLock::new);
            return Ok(None);
        };
        if made.get().is_none() {
            let prototypes: PyResult<_> = self.forms().into_iter().map(make).collect();
            let _ = made.set(prototypes?);
        }
        Ok(made.get())
    }

    /// The batch whose tensors `tensor` makes, one after the other.
    ///
    /// # Errors
    /// The errors of `tensor`, or of the search for a class.
    pub(crate) fn make_of<'py>(
        &self,
        py: Python<'py>,
        tensor: &impl Fn(&TensorForm<'_>) -> PyResult<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.root.make(py, tensor)
    }

    /// Returns the template's tensors, in the order in which [`make_of`](Self::make_of) asks for them.
    pub(crate) fn forms(&self) -> Vec<&TensorForm<'static>> {
        self.root.forms()
    }
}

fn all_differ(numbers: impl Iterator<Item = u32>) -> bool {
    let mut numbers: Vec<u32> = numbers.collect();
    numbers.sort_unstable();
    numbers.windows(2).all(|pair| pair[0] != pair[1])
}

struct TemplateReader<'a> {
    meta: &'a Meta<'a>,
    skeleton: SkeletonReader<'a>,
    /// The strings so far, by their memo numbers.
    strings: Vec<(u32, Py<PyAny>)>,
    depth: u32,
    small: usize,
}

impl TemplateReader<'_> {
    /// The next value; `None` if it cannot be part of a template.
    fn node(&mut self, py: Python<'_>) -> PyResult<Option<Node>> {
        if self.depth > MOST_DEPTH_READ {
            return Ok(None);
        }
        match self.skeleton.next_token().map_err(exception)? {
            Token::Str(text) => {
                let text = objects::decoded(py, text)?.into_any();
                let known = (self.skeleton.memo_count() - 1, text.clone().unbind());
                objects::push(py, &mut self.strings, known)?;
                Ok(Some(Node::Value(text.unbind())))
            }
            Token::Memo(number) => {
                let at = self.strings.binary_search_by_key(&number, |known| known.0);
                Ok(at.ok().map(|at| Node::Value(self.strings[at].1.clone_ref(py))))
            }
            Token::Leaf(number) => Ok(self.tensor(number)),
            Token::List(len) => Ok(self.nodes(py, len)?.map(Node::List)),
            Token::Ints { width, bytes } => {
                let mut items = Vec::new();
                for item in integers(width, bytes) {
                    objects::push(py, &mut items, Node::Value(PyInt::new(py, item).into_any().unbind()))?;
                }
                Ok(Some(Node::List(items)))
            }
            Token::Tuple(len) => Ok(self.nodes(py, len)?.map(Node::Tuple)),
            Token::NamedTuple(len) => {
                let (module, name) = (self.inner(py)?, self.inner(py)?);
                let (Some(Node::Value(module)), Some(Node::Value(name))) = (module, name) else {
                    return Ok(None);
                };
                let name = PyTuple::new(py, [module, name])?.unbind();
                Ok(self.nodes(py, len.saturating_sub(2))?.map(|items| Node::NamedTuple(name, items)))
            }
            Token::Dict(len) => {
                let mut items = Vec::new();
                for _ in 0..len {
                    // torch maps the values of a dict, and leaves its names as they are.
                    let Some(name) = self.inner(py)?.filter(|name| name.forms().is_empty()) else {
                        return Ok(None);
                    };
                    let Some(item) = self.inner(py)? else { return Ok(None) };
                    objects::push(py, &mut items, (name, item))?;
                }
                Ok(Some(Node::Dict(items)))
            }
            plain => Ok(objects::plain(py, plain).map(|value| Node::Value(value.unbind()))),
        }
    }

    fn nodes(&mut self, py: Python<'_>, len: u32) -> PyResult<Option<Vec<Node>>> {
        let mut nodes = Vec::new();
        for _ in 0..len {
            let Some(node) = self.inner(py)? else { return Ok(None) };
            objects::push(py, &mut nodes, node)?;
        }
        Ok(Some(nodes))
    }

    fn inner(&mut self, py: Python<'_>) -> PyResult<Option<Node>> {
        self.depth += 1;
        let node = self.node(py);
        self.depth -= 1;
        node
    }

    fn tensor(&mut self, number: u32) -> Option<Node> {
        let leaf = self.meta.leaf(number)?;
        let form = TensorForm::of(&leaf)?;
        let nbytes = leaf.storage_record().nbytes;
        if nbytes == 0 {
            return None;
        }
        if nbytes <= SMALL {
            self.small += cost(nbytes, leaf.ndim());
        }
        Some(Node::Tensor(form.into_owned()))
    }
}

impl Node {
    /// Returns true if the class of a named tuple in the node has a method of this name.
    fn has_method(&self, py: Python<'_>, name: &str) -> PyResult<bool> {
        let any = |items: &[Self]| -> PyResult<bool> {
            items.iter().try_fold(false, |found, item| Ok(found || item.has_method(py, name)?))
        };
        match self {
            Self::Value(_) | Self::Tensor(_) => Ok(false),
            Self::List(items) | Self::Tuple(items) => any(items),
            Self::NamedTuple(class, items) => {
                // A missing class is the batch's error, and not raised here.
                let class = Torch::get(py)?.class_of(class.bind(py)).ok();
                Ok(class.map_or(Ok(true), |class| class.hasattr(name))? || any(items)?)
            }
            Self::Dict(items) => {
                items.iter().try_fold(false, |found, (_, item)| Ok(found || item.has_method(py, name)?))
            }
        }
    }

    /// Returns the form of each tensor, in the order in which they are made.
    fn forms(&self) -> Vec<&TensorForm<'static>> {
        let mut forms = Vec::new();
        self.add_forms(&mut forms);
        forms
    }

    fn add_forms<'a>(&'a self, forms: &mut Vec<&'a TensorForm<'static>>) {
        match self {
            Self::Value(_) => {}
            Self::Tensor(form) => forms.push(form),
            Self::List(items) | Self::Tuple(items) | Self::NamedTuple(_, items) => {
                items.iter().for_each(|item| item.add_forms(forms));
            }
            Self::Dict(items) => items.iter().for_each(|(_, item)| item.add_forms(forms)),
        }
    }

    fn make<'py>(
        &self,
        py: Python<'py>,
        tensor: &impl Fn(&TensorForm<'_>) -> PyResult<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let each = |nodes: &[Node]| {
            let mut made = objects::vector(py, nodes.len())?;
            for node in nodes {
                made.push(node.make(py, tensor)?);
            }
            Ok::<_, PyErr>(made)
        };
        Ok(match self {
            Self::Value(value) => value.bind(py).clone(),
            Self::Tensor(form) => tensor(form)?,
            Self::List(items) => PyList::new(py, each(items)?)?.into_any(),
            Self::Tuple(items) => PyTuple::new(py, each(items)?)?.into_any(),
            Self::NamedTuple(name, items) => {
                Torch::get(py)?.named_tuple(name.bind(py), PyTuple::new(py, each(items)?)?)?
            }
            Self::Dict(items) => {
                let dict = PyDict::new(py);
                for (name, item) in items {
                    dict.set_item(name.make(py, tensor)?, item.make(py, tensor)?)?;
                }
                dict.into_any()
            }
        })
    }
}
