//! A look at an item, as a slot of the interpreter's.
//!
//! A method of a PyO3 class finds out whether its `self` is of the class, and keeps count of who holds the interpreter.
//! That takes longer than to make a small item. So a class below `SharedItems` has functions in its slots that do
//! neither. Whatever is not a plain item at an index of the list goes on to the PyO3 method.

use std::ffi::c_int;
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
/// What the interpreter raises where it has no memory.
pub(crate) fn class(py: Python<'_>) -> PyResult<Bound<'_, PyAny>> {
    let slot = |slot: c_int, function: *mut _| ffi::PyType_Slot { slot, pfunc: function };
    let mut slots = [
        slot(ffi::Py_mp_subscript, subscript as ffi::binaryfunc as *mut _),
        slot(ffi::Py_sq_item, item as ffi::ssizeargfunc as *mut _),
        // It asks the slot `sq_item`, which is that of a subclass with a `__getitem__` of its own.
        slot(ffi::Py_tp_iter, ffi::PySeqIter_New as ffi::getiterfunc as *mut _),
        slot(0, ptr::null_mut()),
    ];
    let mut spec = ffi::PyType_Spec {
        name: c"ringloader._native.SharedSequence".as_ptr(),
        // That of the base.
        basicsize: 0,
        itemsize: 0,
        flags: (ffi::Py_TPFLAGS_DEFAULT | ffi::Py_TPFLAGS_BASETYPE) as _,
        slots: slots.as_mut_ptr(),
    };
    // SAFETY: the slots have functions of the types that the interpreter calls, and an end; the interpreter copies
    // what it keeps of the description. The base is a class.
    unsafe {
        let base = py.get_type::<SharedItems>();
        Bound::from_owned_ptr_or_err(py, ffi::PyType_FromSpecWithBases(&raw mut spec, base.as_ptr()))
    }
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
            by_method(this.as_ptr(), |py| Ok(Borrowed::from_ptr(py, key.as_ptr()).to_owned()))
        })
    }
}

/// `self[index]`, for what treats it as a sequence. The interpreter has added the length to an index below 0.
unsafe extern "C" fn item(this: *mut ffi::PyObject, index: ffi::Py_ssize_t) -> *mut ffi::PyObject {
    // SAFETY: as in `subscript`.
    unsafe {
        guarded(|py| {
            let found = if index < 0 { None } else { borrowed(py, this).get().plain(py, index) };
            // An index that is still below 0 does not count from the end once more.
            let index = if index < 0 { isize::MIN } else { index };
            found.map_or_else(
                || by_method(this, |py| Ok(index.into_pyobject(py)?.into_any())),
                |item| item.into_ptr(),
            )
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

/// What the PyO3 method makes of it, with PyO3's count of who holds the interpreter.
///
/// # Safety
/// As for [`borrowed`].
#[cold]
unsafe fn by_method(
    this: *mut ffi::PyObject,
    key: impl FnOnce(Python<'_>) -> PyResult<Bound<'_, PyAny>>,
) -> *mut ffi::PyObject {
    Python::attach(|py| {
        // SAFETY: the caller's promise.
        let this = unsafe { borrowed(py, this) };
        match key(py).and_then(|key| SharedItems::__getitem__(&this, &key)) {
            Ok(item) => item.into_ptr(),
            Err(error) => {
                error.restore(py);
                ptr::null_mut()
            }
        }
    })
}
