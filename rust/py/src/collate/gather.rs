//! Rows of arrays and tensors, gathered into what torch's `default_collate` makes of them one by one.

use std::time::{Duration, Instant};

use pyo3::buffer::PyUntypedBuffer;
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyInt};
use ringloader_core::batch::Dtype;
use ringloader_core::number::usize_from;
use ringloader_core::os::read_ahead::{one_of_each_page, read_ahead};
use ringloader_core::testing::fault::fault;

use super::batch_memory::{Allocator, BatchMemory};
use super::exact_items;
use super::fallback::{Part, Unchanged};
use super::rows::{byte_len, copy_rows, dtype_of_format, has_strides_of_torch, is_contiguous};
use crate::gil::{DETACH, in_thread, without_interpreter};
use crate::torch::elements::describe;
use crate::torch::names::Torch;
use crate::transport::port::Port;

/// Gathers the rows of a batch, into the slot of a worker or into memory of torch's own.
#[pyclass(frozen, module = "ringloader._native")]
pub(crate) struct Gather {
    port: Option<Py<Port>>,
    unchanged: Unchanged,
}

#[pymethods]
impl Gather {
    #[new]
    fn new(
        port: Option<Py<Port>>,
        parts: Vec<Part>,
        modes: Vec<Py<PyAny>>,
        fn_map: &Bound<'_, PyDict>,
    ) -> PyResult<Self> {
        Ok(Self { port, unchanged: Unchanged::new(parts, modes, fn_map)? })
    }

    /// The rows of each of `columns` as a tensor, and None for a column that torch must collate. None where torch must
    /// do all: its collation has changed, an index is none of the rows', or `may_be_read_only` is not set and a column
    /// is.
    ///
    /// Runs no code but torch's and numpy's own.
    fn __call__<'py>(
        &self,
        columns: &Bound<'py, PyAny>,
        indices: &Bound<'py, PyAny>,
        may_be_read_only: bool,
    ) -> PyResult<Option<Vec<Option<Bound<'py, PyAny>>>>> {
        let py = columns.py();
        let gather = || self.gather(py, columns, indices, may_be_read_only);
        // Without a port this may be a worker's thread.
        if self.port.is_some() { gather() } else { in_thread(py, gather) }
    }
}

impl Gather {
    fn gather<'py>(
        &self,
        py: Python<'py>,
        columns: &Bound<'py, PyAny>,
        indices: &Bound<'py, PyAny>,
        may_be_read_only: bool,
    ) -> PyResult<Option<Vec<Option<Bound<'py, PyAny>>>>> {
        let (Some(columns), Some(indices)) = (exact_items(columns), integers(indices)) else {
            return Ok(None);
        };
        if !self.unchanged.is_whole(py)? {
            return Ok(None);
        }
        let torch = Torch::get(py)?;
        // All of them first: where torch must do the batch, nothing is allocated.
        for column in &columns {
            if let Some(found) = Column::of(torch, column)?
                && (!found.has_all(&indices) || (found.warns && !may_be_read_only))
            {
                return Ok(None);
            }
        }
        columns.iter().map(|column| self.gathered(torch, column, &indices)).collect::<PyResult<_>>().map(Some)
    }

    /// `None` for what torch must collate.
    fn gathered<'py>(
        &self,
        torch: &Torch,
        object: &Bound<'py, PyAny>,
        indices: &[i64],
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let py = object.py();
        let Some(column) = Column::of(torch, object)? else { return Ok(None) };
        let shape = std::iter::once(indices.len() as i64).chain(column.shape.iter().copied()).collect();
        let allocator = Allocator { py, port: self.port.as_ref().map(Py::get), new_shared: None };
        let Some(memory) = BatchMemory::new(allocator, column.dtype, shape)? else { return Ok(None) };
        // To make torch's memory may have run finalisers, which may have done anything to a tensor.
        let column = if memory.is_torchs() {
            match Column::of(torch, object)? {
                Some(now) if now.dtype == column.dtype && now.shape == column.shape => now,
                _ => return Ok(None),
            }
        } else {
            column
        };
        if !column.has_all(indices) || memory.nbytes() != (column.len * indices.len()) as u64 {
            return Ok(None);
        }
        column.copy(py, indices, &memory);
        memory.into_tensor(py).map(Some)
    }
}

/// Indices of which rows are certain to make what indexing makes of them: exact integers, at least one.
fn integers(object: &Bound<'_, PyAny>) -> Option<Vec<i64>> {
    let items = exact_items(object)?;
    let integer = |item: &Bound<'_, PyAny>| {
        item.is_exact_instance_of::<PyInt>().then(|| item.extract::<i64>().ok()).flatten()
    };
    if items.is_empty() { None } else { items.iter().map(integer).collect() }
}

/// An array or a tensor whose rows are its bytes.
struct Column {
    /// INVARIANT: `rows` rows of `len` bytes, the first at `address`, each `stride` bytes after the one before it, as
    /// long as `_owner` lives and nobody resizes a tensor's storage.
    address: usize,
    rows: usize,
    stride: isize,
    /// Not zero.
    len: usize,
    /// The type and shape of a row.
    dtype: Dtype,
    shape: Vec<i64>,
    /// True if torch warns of such a row, the first time, because it may not be written to.
    warns: bool,
    /// True if torch turns elements into Python's numbers and back, which makes signalling NaNs quiet.
    quiets: bool,
    /// True if a read may wait for a file.
    is_mapped: bool,
    _owner: Owner,
}

/// Keeps the bytes of a column where they are. A tensor itself does not: other threads may give it another storage.
enum Owner {
    Buffer(#[expect(dead_code, reason = "it is kept, not read")] PyUntypedBuffer),
    Storage(#[expect(dead_code, reason = "it is kept, not read")] Py<PyAny>),
}

impl Column {
    /// `None` for what torch must collate: anything but numpy's arrays and torch's tensors, and those whose rows it
    /// does not merely copy.
    ///
    /// # Errors
    /// The error that torch raises.
    fn of(torch: &Torch, object: &Bound<'_, PyAny>) -> PyResult<Option<Self>> {
        if torch.is_array(object) {
            Ok(Self::of_array(torch, object))
        } else {
            Self::of_tensor(torch, object)
        }
    }

    fn of_tensor(torch: &Torch, tensor: &Bound<'_, PyAny>) -> PyResult<Option<Self>> {
        let Some(api) = torch.exchange else { return Ok(None) };
        if !tensor.get_type().is(&torch.tensor) || torch.is_more(tensor)? {
            return Ok(None);
        }
        // Before the rest: to make this object may run finalisers. Where there is none, torch has the error.
        let Some(storage) = torch.storage_of(tensor) else { return Ok(None) };
        let mut dims = Vec::new();
        let Some(found) = describe(torch, api, tensor, &mut dims) else { return Ok(None) };
        let (shape, strides) = dims.split_at(found.ndim);
        let (Some((&rows, shape)), Some((&stride, strides))) = (shape.split_first(), strides.split_first())
        else {
            return Ok(None);
        };
        // torch warns when it makes one of these.
        let is_plain = found.dtype != Dtype::C32
            && found.address != 0
            && is_contiguous(shape, strides)
            && !torch.is_lazy(tensor, found.dtype)?;
        let Some(len) = byte_len(shape.iter().copied(), found.dtype).filter(|&len| len > 0 && is_plain)
        else {
            return Ok(None);
        };
        // A storage that was resized may have less than the tensor's shape needs: torch raises for rows that it lacks.
        // A finaliser may have given the tensor another storage than the one that was made an object above.
        let (start, nbytes) = torch.memory_of(&storage)?;
        let end = (rows - 1)
            .max(0)
            .checked_mul(stride)
            .and_then(|last| last.checked_mul(found.dtype.itemsize() as i64))
            .and_then(|last| found.address.checked_sub(start)?.checked_add(usize::try_from(last).ok()?))
            .and_then(|last| last.checked_add(len));
        if end.is_none_or(|end| end as u64 > nbytes) {
            return Ok(None);
        }
        Ok(Some(Self {
            address: found.address,
            rows: usize_from(rows.cast_unsigned()),
            // The stride may be any number if there is one row.
            stride: usize_from(stride.cast_unsigned())
                .cast_signed()
                .wrapping_mul(found.dtype.itemsize() as isize),
            len,
            dtype: found.dtype,
            shape: shape.to_vec(),
            warns: false,
            quiets: false,
            is_mapped: false,
            _owner: Owner::Storage(if fault("gather_unheld") {
                tensor.py().None()
            } else {
                storage.unbind()
            }),
        }))
    }

    fn of_array(torch: &Torch, array: &Bound<'_, PyAny>) -> Option<Self> {
        let buffer = PyUntypedBuffer::get(array).ok()?;
        let dtype = dtype_of_format(buffer.format().to_bytes(), buffer.item_size())?;
        let (&rows, shape) = buffer.shape().split_first()?;
        let (&stride, strides) = buffer.strides().split_first()?;
        // Rows of one dimension less: numpy's scalars, which torch takes by their values.
        let are_scalars = shape.is_empty();
        if are_scalars && !is_copied_as_scalar(dtype) {
            return None;
        }
        let itemsize = dtype.itemsize() as isize;
        let is_plain = shape.iter().rev().zip(strides.iter().rev()).try_fold(itemsize, |expected, dim| {
            let (&size, &stride) = dim;
            (size == 1 || stride == expected).then(|| expected.checked_mul(size as isize)).flatten()
        });
        let shape: Vec<i64> = shape.iter().map(|&size| size as i64).collect();
        let len = byte_len(shape.iter().copied(), dtype).filter(|&len| len > 0 && is_plain.is_some())?;
        if shape.contains(&1) && !has_strides_of_torch(array, dtype, 1) {
            return None;
        }
        Some(Self {
            address: buffer.buf_ptr() as usize,
            rows,
            stride,
            len,
            dtype,
            shape,
            warns: buffer.readonly() && !are_scalars,
            quiets: are_scalars && dtype == Dtype::F32,
            is_mapped: !array.get_type().is(&torch.ndarray),
            _owner: Owner::Buffer(buffer),
        })
    }

    /// The row that an index means; negative ones count from the end.
    fn row(&self, index: i64) -> Option<usize> {
        let row = if index < 0 { index.checked_add_unsigned(self.rows as u64)? } else { index };
        usize::try_from(row).ok().filter(|&row| row < self.rows)
    }

    fn has_all(&self, indices: &[i64]) -> bool {
        indices.iter().all(|&index| self.row(index).is_some())
    }

    /// Reads rows of a file until one turns out not to be in memory. Then has the system fetch all that follow at once,
    /// and not one after the other as each is read.
    fn fetch(&self, mut addresses: impl Iterator<Item = usize>) {
        while let Some(address) = addresses.next() {
            let begin = Instant::now();
            for at in one_of_each_page(address, self.len) {
                // SAFETY: a byte of a row, which lies within `_owner`; read as one that others may write to.
                unsafe { (at as *const u8).read_volatile() };
            }
            if begin.elapsed() > SLOW {
                addresses.by_ref().for_each(|address| read_ahead(address, self.len));
            }
        }
    }

    /// Copies the rows at `indices` to `memory`, which has room for exactly these rows.
    fn copy(&self, py: Python<'_>, indices: &[i64], memory: &BatchMemory<'_>) {
        let (to, nbytes) = (memory.address(), usize_from(memory.nbytes()));
        // A missing row has ended the batch before.
        let rows = || indices.iter().filter_map(|&index| self.row(index));
        let copies = || {
            let from =
                rows().map(|row| self.address.wrapping_add_signed(self.stride.wrapping_mul(row as isize)));
            from.zip((to..).step_by(self.len))
        };
        let follow_each_other = self.stride == self.len as isize
            && indices.windows(2).all(|two| two[0] + 1 == two[1])
            && indices[0] >= 0;
        let copy = || {
            if self.is_mapped {
                self.fetch(copies().map(|(from, _)| from));
            }
            // SAFETY: each row has `len` bytes at its address, and lies within the object; the memory has room for all,
            // and its bytes have no other user. Nothing is assumed of alignment. `_owner` holds an array's buffer or
            // a tensor's storage, whatever other threads do to the object meanwhile. They must not resize the
            // storage, as while torch stacks its rows.
            unsafe {
                if follow_each_other {
                    copy_rows(copies().take(1), nbytes, nbytes);
                } else {
                    copy_rows(copies(), self.len, nbytes);
                }
                if self.quiets {
                    for at in (to..to + nbytes).step_by(4) {
                        let at = at as *mut u32;
                        at.write_unaligned(quiet(at.read_unaligned()));
                    }
                }
            }
        };
        if self.is_mapped || nbytes >= DETACH { without_interpreter(py, copy) } else { copy() }
    }
}

/// A row of a file takes so long only where it is not in memory.
const SLOW: Duration = Duration::from_micros(50);

/// Returns true if a tensor of numpy's scalars has their bytes. It has other bytes where torch converts by way of a
/// number.
fn is_copied_as_scalar(dtype: Dtype) -> bool {
    use Dtype::{Bool, F32, F64, I8, I16, I32, I64, U8};
    matches!(dtype, Bool | I8 | I16 | I32 | I64 | U8 | F32 | F64)
}

/// A float's bits, as they are after a conversion to another float type and back.
fn quiet(bits: u32) -> u32 {
    const INFINITE: u32 = 0x7f80_0000;
    const QUIET: u32 = 0x0040_0000;
    if bits & 0x7fff_ffff > INFINITE { bits | QUIET } else { bits }
}
