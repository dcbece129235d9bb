//! The parts of torch, numpy and pickle that are used here, looked up once in a process.

use std::collections::HashMap;

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyList, PyTuple, PyType};
use ringloader_core::batch::Dtype;
use ringloader_core::testing::fault::fault;

use super::abi::ExchangeApi;
use super::abi::NoArgsMethod;
use crate::identity::ByIdentity;
use crate::python;
use crate::strings;

/// The functions and types.
pub(crate) struct Torch {
    pub(crate) tensor: Py<PyType>,
    pub(crate) untyped_storage: Py<PyType>,
    pub(crate) ndarray: Py<PyType>,
    /// numpy's arrays over files.
    memmap: Py<PyType>,
    /// The base class of numpy's scalars.
    pub(crate) numpy_scalar: Py<PyAny>,
    pub(crate) strided: Py<PyAny>,
    default_dtype: Py<PyAny>,
    pub(crate) empty: Py<PyAny>,
    empty_strided: Py<PyAny>,
    stack: Py<PyAny>,
    as_tensor: Py<PyAny>,
    empty_like: Py<PyAny>,
    /// The keywords of a tensor in pinned memory.
    pinned_options: Py<PyDict>,
    /// The method of tensors.
    tensor_data_ptr: NoArgsMethod,
    pub(crate) empty_array: Py<PyAny>,
    pub(crate) from_capsule: Py<PyAny>,
    pub(crate) exchange: Option<ExchangeApi>,
    is_conj: NoArgsMethod,
    is_neg: NoArgsMethod,
    /// `None` in a torch whose tensors have no names any more.
    has_names: Option<NoArgsMethod>,
    untyped_storage_of: NoArgsMethod,
    /// The methods of torch's storages.
    data_ptr: NoArgsMethod,
    nbytes: NoArgsMethod,
    /// The function that returns the number of modes which calls on a tensor go through.
    function_modes: Py<PyAny>,
    /// True if the collector may run wherever an object is made: since Python 3.12 it runs only between instructions.
    pub(crate) collects_anywhere: bool,
    /// `ringloader._common.pickling`: what goes through pickle.
    pub(crate) dumps: Py<PyAny>,
    pub(crate) exact_dumps: Py<PyAny>,
    pub(crate) loads: Py<PyAny>,
    /// Stands for a leaf in a pickle.
    pub(crate) leaf: Py<PyAny>,
    pub(crate) dumps_index: Py<PyAny>,
    pub(crate) loads_index: Py<PyAny>,
    pub(crate) array_tag: Py<PyAny>,
    pub(crate) exact_array_tag: Py<PyAny>,
    pub(crate) array_dtype: Py<PyAny>,
    pub(crate) named_tuple_name: Py<PyAny>,
    find_class: Py<PyAny>,
    /// A worker's word that its iterable dataset has ended.
    pub(crate) iterable_end: Py<PyAny>,
    /// The class that carries an exception out of a worker.
    pub(crate) exception_wrapper: Py<PyAny>,
    dtypes: ByIdentity<Dtype>,
    torch_dtypes: HashMap<u8, Py<PyAny>>,
}

/// The arguments of a function that takes a shape and strides.
fn sizes(py: Python<'_>, shape: Vec<i64>, strides: Vec<i64>) -> PyResult<Bound<'_, PyTuple>> {
    (PyTuple::new(py, shape)?, PyTuple::new(py, strides)?).into_pyobject(py)
}

/// Private names of torch's and of named tuples.
pub(crate) mod private {
    crate::strings::strings! {
        cdata = "_cdata",
        make = "_make",
    }
}

static TORCH: PyOnceLock<Torch> = PyOnceLock::new();

impl Torch {
    /// The only instance.
    ///
    /// # Errors
    /// The error that importing torch, numpy or ringloader's own modules raises.
    pub(crate) fn get(py: Python<'_>) -> PyResult<&'static Self> {
        TORCH.get_or_try_init(py, || Self::load(py))
    }

    fn load(py: Python<'_>) -> PyResult<Self> {
        let torch = py.import("torch")?;
        let numpy = py.import("numpy")?;
        let pickling = python::pickling(py)?;
        let internals = python::torch_internals(py)?;
        let tensor = torch.getattr("Tensor")?.cast_into::<PyType>()?;
        let get = |module: &Bound<'_, PyModule>, name: &str| Ok::<_, PyErr>(module.getattr(name)?.unbind());
        let mut dtypes = ByIdentity::default();
        let mut torch_dtypes = HashMap::new();
        for &dtype in Dtype::ALL {
            // A dtype that this torch does not have yet cannot come up.
            if let Ok(object) = torch.getattr(dtype.torch_name()) {
                dtypes.insert(object.as_ptr() as usize, dtype);
                torch_dtypes.insert(dtype.code(), object.unbind());
            }
        }
        Ok(Self {
            exchange: ExchangeApi::of(&tensor),
            is_conj: NoArgsMethod::new(py, "is_conj"),
            is_neg: NoArgsMethod::new(py, "is_neg"),
            has_names: tensor.hasattr("has_names")?.then(|| NoArgsMethod::new(py, "has_names")),
            untyped_storage_of: NoArgsMethod::new(py, "untyped_storage"),
            data_ptr: NoArgsMethod::new(py, "data_ptr"),
            nbytes: NoArgsMethod::new(py, "nbytes"),
            function_modes: get(&internals, "len_torch_function_stack")?,
            collects_anywhere: py.version_info() < (3, 12),
            tensor: tensor.unbind(),
            untyped_storage: torch.getattr("UntypedStorage")?.cast_into::<PyType>()?.unbind(),
            ndarray: numpy.getattr("ndarray")?.cast_into::<PyType>()?.unbind(),
            memmap: numpy.getattr("memmap")?.cast_into::<PyType>()?.unbind(),
            numpy_scalar: get(&numpy, "generic")?,
            strided: get(&torch, "strided")?,
            default_dtype: get(&torch, "get_default_dtype")?,
            empty: get(&torch, "empty")?,
            empty_strided: get(&torch, "empty_strided")?,
            stack: get(&torch, "stack")?,
            as_tensor: get(&torch, "as_tensor")?,
            empty_like: get(&torch, "empty_like")?,
            pinned_options: {
                let options = PyDict::new(py);
                options.set_item("pin_memory", true)?;
                options.unbind()
            },
            tensor_data_ptr: NoArgsMethod::new(py, "data_ptr"),
            empty_array: get(&numpy, "empty")?,
            from_capsule: get(&internals, "from_dlpack")?,
            dumps: get(&pickling, "dumps")?,
            exact_dumps: get(&pickling, "exact_dumps")?,
            loads: get(&pickling, "loads")?,
            leaf: get(&pickling, "leaf")?,
            dumps_index: get(&pickling, "dumps_index")?,
            loads_index: get(&pickling, "loads_index")?,
            array_tag: get(&pickling, "array_tag")?,
            exact_array_tag: get(&pickling, "exact_array_tag")?,
            array_dtype: get(&pickling, "array_dtype")?,
            named_tuple_name: get(&pickling, "named_tuple_name")?,
            find_class: get(&pickling, "find_class")?,
            iterable_end: get(&internals, "IterableDatasetStopIteration")?,
            exception_wrapper: get(&internals, "ExceptionWrapper")?,
            dtypes,
            torch_dtypes,
        })
    }

    /// The element type of a tensor, if it has a fast path.
    pub(crate) fn dtype_of(&self, tensor: &Bound<'_, PyAny>) -> PyResult<Option<Dtype>> {
        let dtype = tensor.getattr(strings::dtype(tensor.py()))?;
        Ok(self.dtypes.get(&(dtype.as_ptr() as usize)).copied())
    }

    /// The element type that torch's object means, if it has a fast path.
    pub(crate) fn dtype_meant(&self, dtype: &Bound<'_, PyAny>) -> Option<Dtype> {
        self.dtypes.get(&(dtype.as_ptr() as usize)).copied()
    }

    /// The element type that torch gives Python's floats.
    ///
    /// # Errors
    /// The error that torch raises.
    pub(crate) fn default_dtype(&self, py: Python<'_>) -> PyResult<Option<Dtype>> {
        Ok(self.dtype_meant(&self.default_dtype.bind(py).call0()?))
    }

    /// Returns true if an object is an array of numpy's own, in memory or over a file.
    pub(crate) fn is_array(&self, object: &Bound<'_, PyAny>) -> bool {
        let kind = object.get_type();
        kind.is(&self.ndarray) || kind.is(&self.memmap)
    }

    /// torch's object for an element type.
    ///
    /// # Errors
    /// `RuntimeError` when this torch does not have it.
    pub(crate) fn torch_dtype<'py>(&self, py: Python<'py>, dtype: Dtype) -> PyResult<Bound<'py, PyAny>> {
        let known = self.torch_dtypes.get(&dtype.code()).map(|object| object.bind(py).clone());
        known.ok_or_else(|| {
            let text = format!("this torch has no torch.{}", dtype.torch_name());
            PyRuntimeError::new_err(text)
        })
    }

    /// Returns true if the values are other than the bytes: a conjugate or negative view. Only complex numbers, and the
    /// parts of them, are ever seen so.
    ///
    /// torch lets other threads run while it answers: no address holds over it.
    pub(crate) fn is_lazy(&self, tensor: &Bound<'_, PyAny>, dtype: Dtype) -> PyResult<bool> {
        Ok((dtype.is_complex() && self.is_conj.call(tensor)?.is_truthy()?)
            || (dtype.is_floating() && self.is_neg.call(tensor)?.is_truthy()?))
    }

    /// As [`is_lazy`](Self::is_lazy), of a tensor of any type.
    pub(crate) fn is_view_of_other_values(&self, tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
        Ok(self.is_conj.call(tensor)?.is_truthy()? || self.is_neg.call(tensor)?.is_truthy()?)
    }

    /// Returns true if [`is_lazy`](Self::is_lazy) asks torch.
    pub(crate) fn may_be_lazy(dtype: Dtype) -> bool {
        dtype.is_complex() || dtype.is_floating()
    }

    /// Returns true if a question about a tensor may run any code: the first time, and while a mode is active.
    ///
    /// # Errors
    /// The error that torch raises.
    pub(crate) fn asks_through_python(&self, py: Python<'_>) -> PyResult<bool> {
        let has_names = self.has_names.as_ref().is_none_or(|method| method.is_direct(py));
        Ok(!has_names || self.function_modes.bind(py).call0()?.is_truthy()?)
    }

    /// Address and length of an exact `UntypedStorage` on the CPU. Runs no foreign code but the first time.
    ///
    /// # Errors
    /// The error that torch raises where there is no memory, or none with an address.
    pub(crate) fn memory_of(&self, storage: &Bound<'_, PyAny>) -> PyResult<(usize, u64)> {
        Ok((self.data_ptr.call(storage)?.extract()?, self.nbytes.call(storage)?.extract()?))
    }

    /// The storage of an exact tensor; `None` where torch has none for it, or one of another class.
    ///
    /// To make the object may run finalisers, which may do anything to the tensor.
    pub(crate) fn storage_of<'py>(&self, tensor: &Bound<'py, PyAny>) -> Option<Bound<'py, PyAny>> {
        let storage = self.untyped_storage_of.call(tensor).ok()?;
        storage.get_type().is(&self.untyped_storage).then_some(storage)
    }

    /// The storages of exact tensors, each of which has so many bytes at an address: they keep these where they are,
    /// whatever other threads do to the tensors. `None` if a tensor has another one by now.
    ///
    /// # Errors
    /// `RuntimeError` if a storage is smaller than its tensor.
    pub(crate) fn storages_of<'py>(
        &self,
        tensors: &[Bound<'py, PyAny>],
        spans: impl Iterator<Item = (usize, u64)>,
    ) -> PyResult<Option<Vec<Bound<'py, PyAny>>>> {
        let storages: Option<Vec<_>> = tensors.iter().map(|tensor| self.storage_of(tensor)).collect();
        let Some(storages) = storages else { return Ok(None) };
        // Once all are made: to make one runs finalisers.
        for (storage, (address, len)) in storages.iter().zip(spans) {
            if len > 0 && self.offset_in(storage, address, len)?.is_none() {
                return Ok(None);
            }
        }
        Ok(Some(storages))
    }

    /// Returns true if [`storage_of`](Self::storage_of) and [`offset_in`](Self::offset_in) go to torch's C functions
    /// alone by now.
    pub(crate) fn is_storage_asked_directly(&self, py: Python<'_>) -> bool {
        [&self.untyped_storage_of, &self.data_ptr, &self.nbytes].iter().all(|method| method.is_direct(py))
    }

    /// Returns the offset of `len` bytes at `address` in an exact `UntypedStorage`; `None` if they begin elsewhere.
    ///
    /// # Errors
    /// `RuntimeError` if they begin in the storage and do not end there; what torch raises.
    pub(crate) fn offset_in(
        &self,
        storage: &Bound<'_, PyAny>,
        address: usize,
        len: u64,
    ) -> PyResult<Option<u64>> {
        let (start, nbytes) = self.memory_of(storage)?;
        let Some(offset) = address.checked_sub(start).map(|offset| offset as u64) else { return Ok(None) };
        if offset > nbytes || start == 0 {
            return Ok(None);
        }
        if len > nbytes - offset && !fault("storage_too_small") {
            return Err(PyRuntimeError::new_err(format!(
                "a tensor of this batch has {len} bytes from byte {offset} of its storage, which has only {nbytes}: \
                 the storage was resized; resize it back, or make a new tensor"
            )));
        }
        Ok(Some(offset))
    }

    /// Returns true if an exact tensor is more than values: it requires grad, or its dimensions have names.
    pub(crate) fn is_more(&self, tensor: &Bound<'_, PyAny>) -> PyResult<bool> {
        let has_names =
            || self.has_names.as_ref().map_or(Ok(false), |method| method.call(tensor)?.is_truthy());
        Ok(tensor.getattr(strings::requires_grad(tensor.py()))?.is_truthy()? || has_names()?)
    }

    /// Returns true for objects that a worker sends in place of a batch: an error, or the end of an iterable dataset.
    ///
    /// # Errors
    /// The error that asking for the class raises.
    pub(crate) fn is_notice(&self, data: &Bound<'_, PyAny>) -> PyResult<bool> {
        let kind = data.get_type();
        Ok(kind.is(&self.iterable_end) || kind.is_subclass(self.exception_wrapper.bind(data.py()))?)
    }

    /// Address and length of a contiguous one-dimensional int64 tensor on the CPU; `None` for any other.
    pub(crate) fn int64_vector(&self, tensor: &Bound<'_, PyAny>) -> PyResult<Option<(usize, usize)>> {
        let py = tensor.py();
        let plain = tensor.is_instance(self.tensor.bind(py))?
            && self.dtype_of(tensor)? == Some(Dtype::I64)
            && tensor.getattr(strings::is_cpu(py))?.is_truthy()?
            && tensor.call_method0(strings::dim(py))?.eq(1)?
            && tensor.call_method0(strings::is_contiguous(py))?.is_truthy()?;
        if !plain {
            return Ok(None);
        }
        let address = tensor.call_method0(strings::data_ptr(py))?.extract()?;
        Ok(Some((address, tensor.len()?)))
    }

    /// Returns a number that no other of torch's storages has while this one is alive.
    ///
    /// # Errors
    /// The error that torch raises.
    pub(crate) fn number_of(storage: &Bound<'_, PyAny>) -> PyResult<usize> {
        storage.getattr(private::cdata(storage.py()))?.extract()
    }

    /// The class of a module and a name.
    ///
    /// # Errors
    /// The error that looking it up raises.
    pub(crate) fn class_of<'py>(&self, name: &Bound<'py, PyTuple>) -> PyResult<Bound<'py, PyAny>> {
        self.find_class.bind(name.py()).call1(name)
    }

    /// Returns the address of a new tensor's bytes, for the caller to write them: in this process's memory.
    ///
    /// # Errors
    /// `RuntimeError` for a tensor that is elsewhere, or has no memory: modes make such, and what replaces torch's
    /// functions.
    pub(crate) fn new_address(&self, tensor: &Bound<'_, PyAny>) -> PyResult<usize> {
        let exact = tensor.get_type().is(self.tensor.bind(tensor.py()));
        if exact && tensor.getattr(strings::is_cpu(tensor.py()))?.is_truthy()? {
            let address = self.tensor_data_ptr.call(tensor)?.extract()?;
            if address != 0 {
                return Ok(address);
            }
        }
        Err(PyRuntimeError::new_err("torch made a tensor without memory in this process"))
    }

    /// A named tuple of the class of a module and a name.
    ///
    /// # Errors
    /// The error that looking up the class raises, or the class.
    pub(crate) fn named_tuple<'py>(
        &self,
        name: &Bound<'py, PyTuple>,
        items: Bound<'py, PyTuple>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let class = self.class_of(name)?;
        class.call_method1(private::make(name.py()), (items,))
    }

    /// A new tensor, whose elements are undefined.
    ///
    /// # Errors
    /// The error that torch raises.
    pub(crate) fn new_on_cpu<'py>(
        &self,
        py: Python<'py>,
        dtype: Dtype,
        shape: Vec<i64>,
        strides: Vec<i64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let options = self.plain_options(py, dtype)?;
        self.empty_strided.bind(py).call(sizes(py, shape, strides)?, Some(&options))
    }

    /// The tensor over an array, as torch's collation makes it.
    ///
    /// # Errors
    /// The error that torch raises.
    pub(crate) fn tensor_of_array<'py>(&self, array: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        self.as_tensor.bind(array.py()).call1((array,))
    }

    /// Stacks `tensors` by torch's function.
    ///
    /// # Errors
    /// The error that torch raises.
    pub(crate) fn stack<'py>(&self, tensors: &[Bound<'py, PyAny>]) -> PyResult<Bound<'py, PyAny>> {
        let py = tensors[0].py();
        self.stack.bind(py).call1((PyList::new(py, tensors)?,))
    }

    /// Stacks `tensors` into `out` by torch's function.
    ///
    /// # Errors
    /// The error that torch raises.
    pub(crate) fn stack_into<'py>(
        &self,
        tensors: &[Bound<'py, PyAny>],
        out: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = out.py();
        let options = PyDict::new(py);
        options.set_item(strings::out(py), out)?;
        self.stack.bind(py).call((PyList::new(py, tensors)?,), Some(&options))
    }

    /// A new tensor in pinned memory of torch's own, whose storage begins where its block does.
    ///
    /// # Errors
    /// The error that torch raises.
    pub(crate) fn new_pinned<'py>(
        &self,
        py: Python<'py>,
        dtype: Dtype,
        shape: Vec<i64>,
        strides: Vec<i64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let options = self.plain_options(py, dtype)?;
        options.set_item(strings::pin_memory(py), true)?;
        self.empty_strided.bind(py).call(sizes(py, shape, strides)?, Some(&options))
    }

    /// As [`new_pinned`](Self::new_pinned), with dtype, shape and strides of a dense tensor on the CPU: the quickest
    /// way.
    ///
    /// # Errors
    /// The error that torch raises.
    pub(crate) fn pinned_like<'py>(&self, prototype: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let py = prototype.py();
        self.empty_like.bind(py).call((prototype,), Some(self.pinned_options.bind(py)))
    }

    fn plain_options<'py>(&self, py: Python<'py>, dtype: Dtype) -> PyResult<Bound<'py, PyDict>> {
        let options = PyDict::new(py);
        options.set_item(strings::dtype(py), self.torch_dtype(py, dtype)?)?;
        // Without this, the default device would decide, which may be another one.
        options.set_item(strings::device(py), strings::cpu(py))?;
        Ok(options)
    }

    /// A tensor of `dtype` over part of a storage.
    pub(crate) fn tensor_in<'py>(
        &self,
        storage: &Bound<'py, PyAny>,
        dtype: Dtype,
        first_element: u64,
        shape: Vec<i64>,
        strides: Vec<i64>,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = storage.py();
        let options = self.plain_options(py, dtype)?;
        let tensor = self.empty.bind(py).call((0,), Some(&options))?;
        let (shape, strides) = (PyTuple::new(py, shape)?, PyTuple::new(py, strides)?);
        tensor.call_method1(strings::set_(py), (storage, first_element, shape, strides))
    }
}
