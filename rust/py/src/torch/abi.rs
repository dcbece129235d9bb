//! torch's C functions: the structures and functions of DLPack, and the functions of methods.

use std::ffi::{c_int, c_void};

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyCFunction, PyCapsule, PyString, PyType};

/// DLPack's number for the CPU.
pub(super) const CPU: i32 = 1;

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct DlTensor {
    pub(super) data: *mut c_void,
    pub(super) device_type: i32,
    pub(super) device_id: i32,
    pub(super) ndim: i32,
    pub(super) code: u8,
    pub(super) bits: u8,
    pub(super) lanes: u16,
    pub(super) shape: *mut i64,
    pub(super) strides: *mut i64,
    pub(super) byte_offset: u64,
}

#[repr(C)]
pub(super) struct Legacy {
    pub(super) tensor: DlTensor,
    pub(super) manager: *mut c_void,
    pub(super) deleter: Option<unsafe extern "C" fn(*mut Legacy)>,
}

#[repr(C)]
pub(super) struct Versioned {
    pub(super) version: [u32; 2],
    pub(super) manager: *mut c_void,
    pub(super) deleter: Option<unsafe extern "C" fn(*mut Versioned)>,
    pub(super) flags: u64,
    pub(super) tensor: DlTensor,
}

/// torch's C functions for exchanging tensors without Python objects in between (recent versions).
#[repr(C)]
struct ExchangeTable {
    version: [u32; 2],
    previous: *const c_void,
    allocate: *const c_void,
    from_object: *const c_void,
    to_object: Option<ToObject>,
    describe: Option<Describe>,
    current_stream: *const c_void,
}

pub(super) type ToObject = unsafe extern "C" fn(*mut Versioned, *mut *mut c_void) -> c_int;
pub(super) type Describe = unsafe extern "C" fn(*mut c_void, *mut DlTensor) -> c_int;

/// The two functions of the table that are used.
#[derive(Clone, Copy)]
pub(crate) struct ExchangeApi {
    pub(super) to_object: ToObject,
    pub(super) describe: Describe,
}

impl ExchangeApi {
    /// The functions of this torch, if it has them in a version known here.
    pub(crate) fn of(tensor: &Bound<'_, PyType>) -> Option<Self> {
        let capsule = tensor.getattr("__dlpack_c_exchange_api__").ok()?.cast_into::<PyCapsule>().ok()?;
        let table = capsule.pointer_checked(Some(c"dlpack_exchange_api")).ok()?.cast::<ExchangeTable>();
        // SAFETY: by the DLPack standard a capsule of this name points to such a table, which lives as
        // long as the process; the fields read here are there in every version with major number 1.
        let table = unsafe { table.as_ref() };
        if table.version[0] != 1 {
            return None;
        }
        Some(Self { to_object: table.to_object?, describe: table.describe? })
    }
}

/// A method of one of torch's classes without arguments, called by its C function where it is one. Of one class only.
pub(crate) struct NoArgsMethod {
    name: Py<PyString>,
    /// Looked up for the first object that is asked: a tensor made for it would go by the default device, or by a mode.
    function: PyOnceLock<Option<ffi::PyCFunction>>,
}

impl NoArgsMethod {
    pub(crate) fn new(py: Python<'_>, name: &str) -> Self {
        Self { name: PyString::new(py, name).unbind(), function: PyOnceLock::new() }
    }

    /// The answer for an exact object of the class.
    ///
    /// # Errors
    /// The error that the method raises.
    pub(crate) fn call<'py>(&self, object: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let py = object.py();
        let name = self.name.bind(py);
        match self.function.get_or_init(py, || c_function(object, name)) {
            // SAFETY: the function belongs to a method of the class, of which `object` is one, and takes no
            // arguments; the interpreter is attached. It returns a new reference, or none with an error set.
            Some(function) => unsafe {
                Bound::from_owned_ptr_or_err(py, function(object.as_ptr(), std::ptr::null_mut()))
            },
            None => object.call_method0(name),
        }
    }

    /// Returns true if a call calls the C function and nothing else.
    pub(crate) fn is_direct(&self, py: Python<'_>) -> bool {
        matches!(self.function.get(py), Some(Some(_)))
    }
}

/// The C function of a method that the class of `object` has, if it takes no arguments.
fn c_function(object: &Bound<'_, PyAny>, name: &Bound<'_, PyString>) -> Option<ffi::PyCFunction> {
    // From the class, since an object may have something else by that name.
    let method = object.get_type().getattr(name).ok()?.call_method1("__get__", (object,)).ok()?;
    let method = method.cast_into_exact::<PyCFunction>().ok()?;
    // SAFETY: it is a built-in function, by its exact type.
    let (receiver, flags, function) = unsafe {
        let method = method.as_ptr();
        (
            ffi::PyCFunction_GetSelf(method),
            ffi::PyCFunction_GetFlags(method),
            ffi::PyCFunction_GetFunction(method),
        )
    };
    // If it is bound to `object`, the function takes such objects, and not a module.
    function.filter(|_| receiver == object.as_ptr() && flags == ffi::METH_NOARGS)
}
