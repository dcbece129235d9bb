//! The bytes of an item to an object.

use std::convert::Infallible;

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBool, PyBytes, PyDict, PyFloat, PyList, PyString, PyTuple};

use super::named::{Named, corrupt};
use super::{DEPTH, tag};

/// A new object each time.
///
/// # Errors
/// What unpickling raises; `RuntimeError` for bytes that `write` has not written.
pub(crate) fn read<'py>(py: Python<'py>, bytes: &[u8], named: &Named) -> PyResult<Bound<'py, PyAny>> {
    static LOADS: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    if let [tag::PICKLE, pickled @ ..] = bytes {
        // A copy: what unpickles may keep the bytes longer than the list lives.
        return LOADS.import(py, "pickle", "loads")?.call1((PyBytes::new(py, pickled),));
    }
    read_plain(py, bytes, named).map_err(|error| *error)
}

/// As `read`, of an item that is not pickled: runs no Python code. In a box, an error fits into a register.
///
/// # Errors
/// As `read`.
#[inline]
pub(crate) fn read_plain<'py>(
    py: Python<'py>,
    bytes: &[u8],
    named: &Named,
) -> Result<Bound<'py, PyAny>, Box<PyErr>> {
    // The small items first: at these, one more call would be seen.
    Ok(match bytes {
        [tag::SMALL, byte] => number((*byte as i8).into_pyobject(py)),
        &[tag::INT, a, b, c, d, e, f, g, h] => {
            number(i64::from_le_bytes([a, b, c, d, e, f, g, h]).into_pyobject(py))
        }
        &[tag::FLOAT, a, b, c, d, e, f, g, h] => {
            PyFloat::new(py, f64::from_le_bytes([a, b, c, d, e, f, g, h])).into_any()
        }
        _ => return Reader { rest: bytes, named }.read(py, 0),
    })
}

struct Reader<'a> {
    rest: &'a [u8],
    named: &'a Named,
}

impl<'a> Reader<'a> {
    fn read<'py>(&mut self, py: Python<'py>, depth: u32) -> Result<Bound<'py, PyAny>, Box<PyErr>> {
        let [tag] = self.array()?;
        Ok(match tag {
            tag::STR => PyString::from_bytes(py, self.bytes()?)?.into_any(),
            tag::SMALL => number(i8::from_le_bytes(self.array()?).into_pyobject(py)),
            tag::INT => number(i64::from_le_bytes(self.array()?).into_pyobject(py)),
            tag::FLOAT => PyFloat::new(py, f64::from_le_bytes(self.array()?)).into_any(),
            tag::NONE => py.None().into_bound(py),
            tag::FALSE | tag::TRUE => PyBool::new(py, tag == tag::TRUE).to_owned().into_any(),
            tag::BYTES => PyBytes::new(py, self.bytes()?).into_any(),
            tag::NAME => self.named.name(py, self.len()?)?.into_any(),
            tag::TUPLE if depth < DEPTH => PyTuple::new(py, self.parts(py, depth)?)?.into_any(),
            tag::LIST if depth < DEPTH => PyList::new(py, self.parts(py, depth)?)?.into_any(),
            tag::DICT if depth < DEPTH => {
                let dict = PyDict::new(py);
                for _ in 0..self.len()? {
                    let key = self.read(py, depth + 1)?;
                    dict.set_item(key, self.read(py, depth + 1)?)?;
                }
                dict.into_any()
            }
            _ => return Err(Box::new(corrupt())),
        })
    }

    /// The parts of a tuple or list, each read when it is asked for.
    fn parts<'py>(
        &mut self,
        py: Python<'py>,
        depth: u32,
    ) -> PyResult<impl ExactSizeIterator<Item = Part<'py>>> {
        let len = self.len()?;
        // Each part takes a byte at least.
        if len > self.rest.len() {
            return Err(corrupt());
        }
        Ok((0..len).map(move |_| Part(self.read(py, depth + 1))))
    }

    fn array<const N: usize>(&mut self) -> PyResult<[u8; N]> {
        let (array, rest) = self.rest.split_first_chunk().ok_or_else(corrupt)?;
        self.rest = rest;
        Ok(*array)
    }

    fn bytes(&mut self) -> PyResult<&'a [u8]> {
        let len = self.len()?;
        let (bytes, rest) = self.rest.split_at_checked(len).ok_or_else(corrupt)?;
        self.rest = rest;
        Ok(bytes)
    }

    fn len(&mut self) -> PyResult<usize> {
        let mut len = 0;
        for shift in (0..usize::BITS).step_by(7) {
            let [byte] = self.array()?;
            len |= usize::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Ok(len);
            }
        }
        Err(corrupt())
    }
}

/// A part that could be read, or not: containers are made of objects in a row, without a vector of them in between.
struct Part<'py>(Result<Bound<'py, PyAny>, Box<PyErr>>);

impl<'py> IntoPyObject<'py> for Part<'py> {
    type Target = PyAny;
    type Output = Bound<'py, PyAny>;
    type Error = PyErr;

    fn into_pyobject(self, _py: Python<'py>) -> PyResult<Self::Output> {
        self.0.map_err(|error| *error)
    }
}

fn number<'py>(made: Result<Bound<'py, pyo3::types::PyInt>, Infallible>) -> Bound<'py, PyAny> {
    match made {
        Ok(number) => number.into_any(),
    }
}
