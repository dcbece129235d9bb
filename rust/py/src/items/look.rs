//! Reads an item, as a slot of the interpreter's.
//!
//! A method of a PyO3 class finds out whether its `self` is of the class, and keeps count of who holds the interpreter.
//! That takes longer than to make a small item. So a class below `SharedItems` has a function in its slot that does
//! neither. Whatever is not a plain item at an index of the list goes on to the PyO3 method.

use std::ffi::CString;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;

use pyo3::Borrowed;
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyInt;

use super::shared_items::SharedItems;

/// The class `SharedSequence`.
///
/// # Errors
/// The error that the interpreter raises where it has no memory.
pub(crate) fn class(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    let base = py.get_type::<SharedItems>();
    // The interpreter copies the name, and what it keeps of the rest.
    let name = CString::new(format!("{}.SharedSequence", base.module()?))?;
    let mut slots = [
        ffi::PyType_Slot { slot: ffi::Py_mp_subscript, pfunc: subscript as ffi::binaryfunc as *mut _ },
        ffi::PyType_Slot { slot: 0, pfunc: ptr::null_mut() },
    ];
    let mut spec = ffi::PyType_Spec {
        name: name.as_ptr(),
        // Zero means the size of the base.
        basicsize: 0,
        itemsize: 0,
        flags: (ffi::Py_TPFLAGS_DEFAULT | ffi::Py_TPFLAGS_BASETYPE) as _,
        slots: slots.as_mut_ptr(),
    };
    // SAFETY: the slot has a function of the type that the interpreter calls, the slots have an end, and the base is
    // a class.
    unsafe { Bound::from_owned_ptr_or_err(py, ffi::PyType_FromSpecWithBases(&raw mut spec, base.as_ptr())) }
}

/// `self[key]`.
unsafe extern "C" fn subscript(this: *mut ffi::PyObject, key: *mut ffi::PyObject) -> *mut ffi::PyObject {
    // SAFETY: the interpreter calls a slot attached, with an instance of the type, which is one of `SharedItems` too,
    // and with a key. Both live until it returns.
    unsafe {
        guarded(|py| {
            let (this, key) = (borrowed(py, this), Borrowed::from_ptr(py, key));
            if key.is_exact_instance_of::<PyInt>() {
                let index = ffi::PyLong_AsSsize_t(key.as_ptr());
                if index == -1 && !ffi::PyErr_Occurred().is_null() {
                    ffi::PyErr_Clear();
                } else if let Some(item) = this.get().plain(py, index) {
                    return item.into_ptr();
                }
            }
            by_method(this.as_ptr(), key.as_ptr())
        })
    }
}

/// # Safety
/// `this` is an instance of the class, and lives for `'a`.
unsafe fn borrowed<'a, 'py>(py: Python<'py>, this: *mut ffi::PyObject) -> Borrowed<'a, 'py, SharedItems> {
    // SAFETY: the caller's promise.
    unsafe { Borrowed::from_ptr(py, this).cast_unchecked() }
}

/// Runs `look`. No panic may reach the interpreter: PyO3 panics where there is no memory for a small object.
///
/// # Safety
/// The thread is attached to the interpreter.
#[inline]
unsafe fn guarded(look: impl FnOnce(Python<'_>) -> *mut ffi::PyObject) -> *mut ffi::PyObject {
    // SAFETY: the caller's promise.
    let py = unsafe { Python::assume_attached() };
    // SAFETY: attached; it sets the error and returns null.
    catch_unwind(AssertUnwindSafe(|| look(py))).unwrap_or_else(|_| unsafe { ffi::PyErr_NoMemory() })
}

/// Looks the item up by the PyO3 method, while PyO3 counts this thread as one that holds the interpreter.
///
/// # Safety
/// The conditions of [`borrowed`], for `this`; `key` is an object.
#[cold]
unsafe fn by_method(this: *mut ffi::PyObject, key: *mut ffi::PyObject) -> *mut ffi::PyObject {
    Python::attach(|py| {
        // SAFETY: the caller's promise.
        let (this, key) = unsafe { (borrowed(py, this), Borrowed::from_ptr(py, key)) };
        match SharedItems::__getitem__(&this, &key) {
            Ok(item) => item.into_ptr(),
            Err(error) => {
                error.restore(py);
                ptr::null_mut()
            }
        }
    })
}
