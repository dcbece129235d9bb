//! Methods of torch's classes, called by their C functions.

use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyCFunction, PyString};

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
    // Bound to `object`, it is told of such objects, and not of some module.
    function.filter(|_| receiver == object.as_ptr() && flags == ffi::METH_NOARGS)
}
