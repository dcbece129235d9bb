//! Names of attributes, methods and arguments, as Python's strings.
//!
//! INVARIANT: taking one runs no foreign code and keeps the interpreter lock, also the first time. pyo3's `intern!` makes
//! a string at its first use and lets the lock go for it, so that other threads may run between an address and its use;
//! clippy refuses it.

/// Makes a function for each name, and one that makes all strings, which the module's import calls.
macro_rules! strings {
    ($($name:ident = $text:literal,)*) => {
        use pyo3::prelude::*;
        use pyo3::types::PyString;

        struct Strings {
            $($name: Py<PyString>,)*
        }

        fn all(py: Python<'_>) -> &'static Strings {
            static STRINGS: pyo3::sync::PyOnceLock<Strings> = pyo3::sync::PyOnceLock::new();
            STRINGS.get_or_init(py, || Strings { $($name: PyString::intern(py, $text).unbind(),)* })
        }

        pub(crate) fn make_all(py: Python<'_>) {
            all(py);
        }

        $(
            #[inline]
            pub(crate) fn $name(py: Python<'_>) -> &Bound<'_, PyString> {
                all(py).$name.bind(py)
            }
        )*
    };
}
pub(crate) use strings;

strings! {
    abandon = "abandon",
    array_struct = "__array_struct__",
    batch_size = "batch_size",
    c_order = "C",
    clear = "clear",
    close = "close",
    collate_fn_map = "collate_fn_map",
    cpu = "cpu",
    data_ptr = "data_ptr",
    depth = "depth",
    device = "device",
    dim = "dim",
    dtype = "dtype",
    fetch = "fetch",
    fortran = "F",
    indices = "indices",
    is_contiguous = "is_contiguous",
    is_cpu = "is_cpu",
    is_nested = "is_nested",
    item = "item",
    layout = "layout",
    nbytes = "nbytes",
    numpy = "numpy",
    out = "out",
    pin_memory = "pin_memory",
    requires_grad = "requires_grad",
    reraise = "reraise",
    resolve_conj = "resolve_conj",
    resolve_neg = "resolve_neg",
    result = "result",
    set_ = "set_",
    setflags = "setflags",
    shape = "shape",
    stride = "stride",
    strides = "strides",
    tb_frame = "tb_frame",
    type_ = "type",
    untyped_storage = "untyped_storage",
    view = "view",
}
