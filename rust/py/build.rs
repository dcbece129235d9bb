//! Passes on what PyO3 knows of the interpreter: `cfg(Py_GIL_DISABLED)` for a free-threaded one.

fn main() {
    pyo3_build_config::use_pyo3_cfgs();
}
