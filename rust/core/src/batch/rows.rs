#![forbid(unsafe_code)]
//! The form of a sample whose batch is made of rows: torch's `default_collate` stacks each of its columns.
//!
//! Samples of one form have their rows at places that follow from the form alone. So whoever makes a sample can write
//! it, without the others.

use crate::batch::Dtype;
use crate::batch::wire::MAX_NDIM;
use crate::error::{Error, Result};

/// Trees that are deeper are not written as rows.
pub const DEEPEST: u32 = 100;

/// Columns begin at multiples of this, as torch's own memory.
const ALIGNMENT: u64 = 64;

const LIST: u8 = 0;
const TUPLE: u8 = 1;
const DICT: u8 = 2;
const FIRST_COLUMN: u8 = 3;

/// The form of a sample.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SampleForm {
    /// A leaf.
    Column(Column),
    /// A list.
    List(Vec<SampleForm>),
    /// A tuple.
    Tuple(Vec<SampleForm>),
    /// A dict, with names in its order.
    Dict(Vec<(String, SampleForm)>),
}

/// The objects of a column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum ColumnKind {
    /// Tensors.
    Tensor,
    /// Arrays of numpy's.
    Array,
    /// Scalars of numpy's, without a shape.
    Scalar,
    /// Numbers of Python's, without a shape: int64, float64 or bool.
    Number,
}

/// The values in one place of all samples.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Column {
    /// The objects.
    pub kind: ColumnKind,
    /// The type of the elements.
    pub dtype: Dtype,
    /// The shape of each.
    pub shape: Vec<i64>,
}

impl Column {
    /// Bytes of a row; `None` of a shape that is none.
    #[must_use]
    pub fn row_len(&self) -> Option<u64> {
        let sizes = self.shape.iter().map(|&size| u64::try_from(size).ok());
        sizes.chain([Some(self.dtype.itemsize() as u64)]).try_fold(1u64, |len, size| len.checked_mul(size?))
    }
}

/// The place of a column's rows, one after the other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// The start of the first one.
    pub offset: u64,
    /// Bytes of each.
    pub row_len: u64,
}

impl SampleForm {
    /// The columns, in their order.
    #[must_use]
    pub fn columns(&self) -> Vec<&Column> {
        let mut columns = Vec::new();
        self.collect(&mut columns);
        columns
    }

    fn collect<'a>(&'a self, columns: &mut Vec<&'a Column>) {
        match self {
            Self::Column(column) => columns.push(column),
            Self::List(items) | Self::Tuple(items) => items.iter().for_each(|item| item.collect(columns)),
            Self::Dict(items) => items.iter().for_each(|(_, item)| item.collect(columns)),
        }
    }

    /// The places of the columns of `samples` samples, of bytes that begin at `start`, and where they end. `None` where
    /// they have no place.
    #[must_use]
    pub fn places(&self, start: u64, samples: u64) -> Option<(Vec<Place>, u64)> {
        let mut end = start;
        let place = |column: &Column| {
            let row_len = column.row_len()?;
            let offset = end.checked_next_multiple_of(ALIGNMENT)?;
            end = offset.checked_add(row_len.checked_mul(samples)?)?;
            Some(Place { offset, row_len })
        };
        let places = self.columns().into_iter().map(place).collect::<Option<_>>()?;
        Some((places, end))
    }

    /// Appends the form to bytes. Equal forms have equal bytes.
    pub fn write(&self, to: &mut Vec<u8>) {
        match self {
            Self::Column(Column { kind, dtype, shape }) => {
                to.extend([FIRST_COLUMN + *kind as u8, dtype.code(), shape.len() as u8]);
                shape.iter().for_each(|size| to.extend(size.to_le_bytes()));
            }
            Self::List(items) | Self::Tuple(items) => {
                to.push(if matches!(self, Self::List(_)) { LIST } else { TUPLE });
                to.extend((items.len() as u32).to_le_bytes());
                items.iter().for_each(|item| item.write(to));
            }
            Self::Dict(items) => {
                to.push(DICT);
                to.extend((items.len() as u32).to_le_bytes());
                for (name, item) in items {
                    to.extend((name.len() as u32).to_le_bytes());
                    to.extend(name.as_bytes());
                    item.write(to);
                }
            }
        }
    }

    /// Reads all of `bytes`.
    ///
    /// # Errors
    /// [`Error::Corrupt`] for what [`write`](Self::write) does not write.
    pub fn read(bytes: &[u8]) -> Result<Self> {
        let mut rest = bytes;
        let form = Self::next(&mut rest, 0).filter(|_| rest.is_empty());
        form.ok_or_else(|| Error::Corrupt("the form of a batch's rows".into()))
    }

    fn next(rest: &mut &[u8], depth: u32) -> Option<Self> {
        if depth > DEEPEST {
            return None;
        }
        let tag = *rest.split_off_first()?;
        if tag < FIRST_COLUMN {
            // Each item has a byte at least, so the number allocates no more than the bytes do.
            let len = number(rest)?;
            if tag == DICT {
                let item = |_| {
                    let len = number(rest)?;
                    let name = std::str::from_utf8(rest.split_off(..len)?).ok()?.to_owned();
                    Some((name, Self::next(rest, depth + 1)?))
                };
                return (0..len).map(item).collect::<Option<_>>().map(Self::Dict);
            }
            let items = (0..len).map(|_| Self::next(rest, depth + 1)).collect::<Option<_>>()?;
            return Some(if tag == LIST { Self::List(items) } else { Self::Tuple(items) });
        }
        let kinds = [ColumnKind::Tensor, ColumnKind::Array, ColumnKind::Scalar, ColumnKind::Number];
        let kind = *kinds.get(usize::from(tag - FIRST_COLUMN))?;
        let dtype = Dtype::from_code(*rest.split_off_first()?)?;
        let ndim = usize::from(*rest.split_off_first()?);
        if ndim > MAX_NDIM {
            return None;
        }
        let size = |_| rest.split_off(..8)?.first_chunk().map(|bytes| i64::from_le_bytes(*bytes));
        let shape = (0..ndim).map(size).collect::<Option<_>>()?;
        let column = Column { kind, dtype, shape };
        column.row_len()?;
        Some(Self::Column(column))
    }
}

/// Reads a number that counts bytes, or parts that have bytes.
fn number(rest: &mut &[u8]) -> Option<usize> {
    let number = u32::from_le_bytes(*rest.split_off(..4)?.first_chunk()?) as usize;
    (number <= rest.len()).then_some(number)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn column(kind: ColumnKind, dtype: Dtype, shape: &[i64]) -> SampleForm {
        SampleForm::Column(Column { kind, dtype, shape: shape.to_vec() })
    }

    fn form() -> SampleForm {
        SampleForm::Dict(vec![
            ("image".into(), column(ColumnKind::Array, Dtype::F32, &[3, 2])),
            (
                "".into(),
                SampleForm::Tuple(vec![
                    column(ColumnKind::Number, Dtype::I64, &[]),
                    SampleForm::List(vec![]),
                ]),
            ),
            ("scalar".into(), column(ColumnKind::Scalar, Dtype::Bool, &[])),
            ("läbel".into(), column(ColumnKind::Tensor, Dtype::U8, &[5])),
        ])
    }

    #[test]
    fn a_form_is_read_as_it_was_written() {
        let mut bytes = Vec::new();
        form().write(&mut bytes);
        assert_eq!(SampleForm::read(&bytes), Ok(form()));
        for len in 0..bytes.len() {
            assert!(SampleForm::read(&bytes[..len]).is_err(), "{len}");
        }
        bytes.push(0);
        assert!(SampleForm::read(&bytes).is_err());
    }

    #[test]
    fn no_byte_makes_a_reader_panic() {
        let mut bytes = Vec::new();
        form().write(&mut bytes);
        for at in 0..bytes.len() {
            for value in 0..=u8::MAX {
                let mut changed = bytes.clone();
                changed[at] = value;
                let _ = SampleForm::read(&changed).map(|form| form.places(0, u64::MAX));
            }
        }
        assert!(SampleForm::read(&[LIST, 1, 0, 0, 0].repeat(1000)).is_err());
    }

    #[test]
    fn columns_follow_each_other_at_multiples_of_64() {
        let places = |offset, row_len| Place { offset, row_len };
        let expected = vec![places(64, 24), places(192, 8), places(256, 1), places(320, 5)];
        assert_eq!(form().places(1, 4), Some((expected, 340)));
        assert_eq!(form().places(u64::MAX - 10, 4), None);
        assert_eq!(form().places(0, u64::MAX), None);
        assert_eq!(column(ColumnKind::Tensor, Dtype::F32, &[-1]).places(0, 1), None);
    }
}
