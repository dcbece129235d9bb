#![forbid(unsafe_code)]
//! The form of a sample whose batch is made of rows: torch's `default_collate` stacks each of its columns.
//!
//! Samples of one form have their rows at places that follow from the form alone. So whoever makes a sample can write
//! it, without the others.

use crate::batch::wire::MAX_NDIM;
use crate::batch::{Dtype, SkeletonReader, SkeletonWriter, Token, integers};
use crate::error::{Error, Result};
use crate::number::u32_from;

/// Trees that are deeper are not written as rows.
pub const DEEPEST: u32 = 100;

/// Columns begin at multiples of this, as torch's own memory.
const ALIGNMENT: u64 = 64;

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
    fn of(mut numbers: impl Iterator<Item = i64>) -> Option<Self> {
        let kinds = [ColumnKind::Tensor, ColumnKind::Array, ColumnKind::Scalar, ColumnKind::Number];
        let kind = *kinds.get(usize::try_from(numbers.next()?).ok()?)?;
        let dtype = Dtype::from_code(numbers.next()?.try_into().ok()?)?;
        let column = Self { kind, dtype, shape: numbers.collect() };
        column.row_len().filter(|_| column.shape.len() <= MAX_NDIM)?;
        Some(column)
    }

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

    /// Writes the form as a skeleton, in which a column is a list of integers. Equal forms have equal bytes.
    pub fn write(&self, to: &mut SkeletonWriter) {
        match self {
            Self::Column(Column { kind, dtype, shape }) => {
                let numbers = [*kind as i64, dtype.code().into()].into_iter().chain(shape.iter().copied());
                to.ints(&numbers.collect::<Vec<_>>());
            }
            Self::List(items) | Self::Tuple(items) => {
                let len = u32_from(items.len() as u64);
                if matches!(self, Self::List(_)) {
                    to.list(len)
                } else {
                    to.tuple(len)
                };
                items.iter().for_each(|item| item.write(to));
            }
            Self::Dict(items) => {
                to.dict(u32_from(items.len() as u64));
                for (name, item) in items {
                    to.str(name);
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
        let mut reader = SkeletonReader::new(bytes, 0);
        let form = Self::next(&mut reader, 0).filter(|_| reader.remaining() == 0);
        form.ok_or_else(|| Error::Corrupt("the form of a batch's rows".into()))
    }

    fn next(reader: &mut SkeletonReader<'_>, depth: u32) -> Option<Self> {
        if depth > DEEPEST {
            return None;
        }
        match reader.next_token().ok()? {
            Token::Ints { width, bytes } => Column::of(integers(width, bytes)).map(Self::Column),
            Token::List(len) => Self::items(reader, len, depth).map(Self::List),
            Token::Tuple(len) => Self::items(reader, len, depth).map(Self::Tuple),
            Token::Dict(len) => {
                let item = |_| {
                    let Token::Str(name) = reader.next_token().ok()? else { return None };
                    let name = std::str::from_utf8(name).ok()?.to_owned();
                    Some((name, Self::next(reader, depth + 1)?))
                };
                (0..len).map(item).collect::<Option<_>>().map(Self::Dict)
            }
            _ => None,
        }
    }

    fn items(reader: &mut SkeletonReader<'_>, len: u32, depth: u32) -> Option<Vec<Self>> {
        (0..len).map(|_| Self::next(reader, depth + 1)).collect()
    }
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

    fn written() -> Vec<u8> {
        let mut to = SkeletonWriter::new();
        form().write(&mut to);
        to.as_bytes().to_vec()
    }

    #[test]
    fn a_form_is_read_as_it_was_written() {
        let mut bytes = written();
        assert_eq!(SampleForm::read(&bytes), Ok(form()));
        for len in 0..bytes.len() {
            assert!(SampleForm::read(&bytes[..len]).is_err(), "{len}");
        }
        bytes.push(0);
        assert!(SampleForm::read(&bytes).is_err());
    }

    #[test]
    fn no_byte_makes_a_reader_panic() {
        let bytes = written();
        for at in 0..bytes.len() {
            for value in 0..=u8::MAX {
                let mut changed = bytes.clone();
                changed[at] = value;
                let _ = SampleForm::read(&changed).map(|form| form.places(0, u64::MAX));
            }
        }
        let mut deep = SkeletonWriter::new();
        (0..1000).for_each(|_| _ = deep.list(1));
        deep.list(0);
        assert!(SampleForm::read(deep.as_bytes()).is_err());
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
