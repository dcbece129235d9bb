//! The bytes of an item to an object.

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBool, PyString};

use super::named::{Named, corrupt};
use super::{DEPTH, tag};
use crate::objects;

/// A new object each time.
///
/// # Errors
/// The error that unpickling raises; `RuntimeError` for bytes that `write` has not written.
pub(crate) fn read<'py>(py: Python<'py>, bytes: &[u8], named: &Named) -> PyResult<Bound<'py, PyAny>> {
    static LOADS: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    if let [tag::PICKLE, pickled @ ..] = bytes {
        // A copy: what unpickles may keep the bytes longer than the list lives.
        return LOADS
            .import(py, "pickle", "loads")?
            .call1(objects::arguments(py, [objects::bytes(py, pickled)?.into_any()])?);
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
        [tag::SMALL, byte] => objects::int(py, i64::from(*byte as i8))?.into_any(),
        &[tag::INT, a, b, c, d, e, f, g, h] => {
            objects::int(py, i64::from_le_bytes([a, b, c, d, e, f, g, h]))?.into_any()
        }
        &[tag::FLOAT, a, b, c, d, e, f, g, h] => {
            objects::float(py, f64::from_le_bytes([a, b, c, d, e, f, g, h]))?.into_any()
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
            tag::SMALL => objects::int(py, i64::from(i8::from_le_bytes(self.array()?)))?.into_any(),
            tag::INT => objects::int(py, i64::from_le_bytes(self.array()?))?.into_any(),
            tag::FLOAT => objects::float(py, f64::from_le_bytes(self.array()?))?.into_any(),
            tag::NONE => py.None().into_bound(py),
            tag::FALSE | tag::TRUE => PyBool::new(py, tag == tag::TRUE).to_owned().into_any(),
            tag::BYTES => objects::bytes(py, self.bytes()?)?.into_any(),
            tag::NAME => self.named.name(py, self.len()?)?.into_any(),
            tag::TUPLE if depth < DEPTH => objects::tuple(py, self.parts(py, depth)?)?.into_any(),
            tag::LIST if depth < DEPTH => objects::list(py, self.parts(py, depth)?)?.into_any(),
            tag::DICT if depth < DEPTH => {
                let dict = objects::dict(py)?;
                for _ in 0..self.len()? {
                    let key = self.read(py, depth + 1)?;
                    dict.set_item(key, self.read(py, depth + 1)?)?;
                }
                dict.into_any()
            }
            _ => return Err(Box::new(corrupt())),
        })
    }

    /// The parts of a tuple or list, each read when it is asked for: no vector of them in between.
    fn parts<'py>(
        &mut self,
        py: Python<'py>,
        depth: u32,
    ) -> PyResult<impl ExactSizeIterator<Item = Result<Bound<'py, PyAny>, Box<PyErr>>>> {
        let len = self.len()?;
        // Each part takes a byte at least.
        if len > self.rest.len() {
            return Err(corrupt());
        }
        Ok((0..len).map(move |_| self.read(py, depth + 1)))
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
