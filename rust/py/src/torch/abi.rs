//! The C structures of DLPack, and torch's C functions for them.

use std::ffi::{c_int, c_void};

use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyType};

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
