#![forbid(unsafe_code)]
//! Element types of tensors.

/// DLPack's type codes (`DLDataTypeCode`, DLPack 1.1).
mod code {
    pub(super) const INT: u8 = 0;
    pub(super) const UINT: u8 = 1;
    pub(super) const FLOAT: u8 = 2;
    pub(super) const BFLOAT: u8 = 4;
    pub(super) const COMPLEX: u8 = 5;
    pub(super) const BOOL: u8 = 6;
    pub(super) const FLOAT8_E4M3FN: u8 = 10;
    pub(super) const FLOAT8_E4M3FNUZ: u8 = 11;
    pub(super) const FLOAT8_E5M2: u8 = 12;
    pub(super) const FLOAT8_E5M2FNUZ: u8 = 13;
    pub(super) const FLOAT8_E8M0FNU: u8 = 14;
}

macro_rules! dtypes {
    ($($(#[$doc:meta])* $variant:ident = $wire:literal, $name:literal, $dlpack:path, $bits:literal;)*) => {
        /// The type of a tensor's elements. The discriminant is its code on the wire and never changes its meaning.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[repr(u8)]
        pub enum Dtype {
            $($(#[$doc])* $variant = $wire,)*
        }

        impl Dtype {
            /// Every element type, in the order of the codes.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The type with this code on the wire.
            pub const fn from_code(code: u8) -> Option<Self> {
                match code {
                    $($wire => Some(Self::$variant),)*
                    _ => None,
                }
            }

            /// DLPack's `(code, bits, lanes)`.
            pub const fn dlpack(self) -> (u8, u8, u16) {
                match self {
                    $(Self::$variant => ($dlpack, $bits, 1),)*
                }
            }

            /// The type that DLPack describes so; `None` for vectors (`lanes != 1`) and types not carried here.
            pub const fn from_dlpack(code: u8, bits: u8, lanes: u16) -> Option<Self> {
                match (code, bits, lanes) {
                    $(($dlpack, $bits, 1) => Some(Self::$variant),)*
                    _ => None,
                }
            }

            /// Torch's name of the type: the attribute of the `torch` module.
            pub const fn torch_name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name,)*
                }
            }
        }
    };
}

dtypes! {
    /// `torch.bool`, one byte.
    Bool = 0, "bool", code::BOOL, 8;
    /// `torch.uint8`.
    U8 = 1, "uint8", code::UINT, 8;
    /// `torch.uint16`.
    U16 = 2, "uint16", code::UINT, 16;
    /// `torch.uint32`.
    U32 = 3, "uint32", code::UINT, 32;
    /// `torch.uint64`.
    U64 = 4, "uint64", code::UINT, 64;
    /// `torch.int8`.
    I8 = 5, "int8", code::INT, 8;
    /// `torch.int16`.
    I16 = 6, "int16", code::INT, 16;
    /// `torch.int32`.
    I32 = 7, "int32", code::INT, 32;
    /// `torch.int64`.
    I64 = 8, "int64", code::INT, 64;
    /// `torch.float16`.
    F16 = 9, "float16", code::FLOAT, 16;
    /// `torch.bfloat16`.
    BF16 = 10, "bfloat16", code::BFLOAT, 16;
    /// `torch.float32`.
    F32 = 11, "float32", code::FLOAT, 32;
    /// `torch.float64`.
    F64 = 12, "float64", code::FLOAT, 64;
    /// `torch.complex32`, two `float16`.
    C32 = 13, "complex32", code::COMPLEX, 32;
    /// `torch.complex64`, two `float32`.
    C64 = 14, "complex64", code::COMPLEX, 64;
    /// `torch.complex128`, two `float64`.
    C128 = 15, "complex128", code::COMPLEX, 128;
    /// `torch.float8_e4m3fn`.
    F8E4M3FN = 16, "float8_e4m3fn", code::FLOAT8_E4M3FN, 8;
    /// `torch.float8_e4m3fnuz`.
    F8E4M3FNUZ = 17, "float8_e4m3fnuz", code::FLOAT8_E4M3FNUZ, 8;
    /// `torch.float8_e5m2`.
    F8E5M2 = 18, "float8_e5m2", code::FLOAT8_E5M2, 8;
    /// `torch.float8_e5m2fnuz`.
    F8E5M2FNUZ = 19, "float8_e5m2fnuz", code::FLOAT8_E5M2FNUZ, 8;
    /// `torch.float8_e8m0fnu`.
    F8E8M0FNU = 20, "float8_e8m0fnu", code::FLOAT8_E8M0FNU, 8;
}

impl Dtype {
    /// The code on the wire.
    #[inline]
    pub const fn code(self) -> u8 {
        self as u8
    }

    /// Returns true if each element is a pair of floating-point numbers.
    #[inline]
    pub const fn is_complex(self) -> bool {
        self.dlpack().0 == code::COMPLEX
    }

    /// Returns true if each element is a floating-point number, or a pair of them.
    #[inline]
    pub const fn is_floating(self) -> bool {
        !matches!(self.dlpack().0, code::INT | code::UINT | code::BOOL)
    }

    /// Bytes of one element: a power of two, at most 16. Also the alignment that a leaf of this type keeps.
    #[inline]
    pub const fn itemsize(self) -> usize {
        (self.dlpack().1 / 8) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_dense_and_go_both_ways() {
        for (index, &dtype) in Dtype::ALL.iter().enumerate() {
            assert_eq!(usize::from(dtype.code()), index);
            assert_eq!(Dtype::from_code(dtype.code()), Some(dtype));
        }
        let carried = (0..=u8::MAX).filter_map(Dtype::from_code).count();
        assert_eq!(carried, Dtype::ALL.len());
    }

    #[test]
    fn dlpack_goes_both_ways_and_names_nothing_else() {
        let mut carried = 0;
        for code in 0..=u8::MAX {
            for bits in 0..=u8::MAX {
                for lanes in 0..3 {
                    if let Some(dtype) = Dtype::from_dlpack(code, bits, lanes) {
                        assert_eq!(dtype.dlpack(), (code, bits, lanes));
                        carried += 1;
                    }
                }
            }
        }
        assert_eq!(carried, Dtype::ALL.len());
    }

    #[test]
    fn sizes_and_codes_are_those_of_the_standard() {
        let expected = [
            (Dtype::Bool, 1, 6),
            (Dtype::U64, 8, 1),
            (Dtype::I16, 2, 0),
            (Dtype::BF16, 2, 4),
            (Dtype::F64, 8, 2),
            (Dtype::C32, 4, 5),
            (Dtype::C128, 16, 5),
            (Dtype::F8E4M3FN, 1, 10),
            (Dtype::F8E8M0FNU, 1, 14),
        ];
        for (dtype, itemsize, code) in expected {
            assert_eq!((dtype.itemsize(), dtype.dlpack().0), (itemsize, code), "{dtype:?}");
        }
        assert!(Dtype::ALL.iter().all(|d| d.itemsize().is_power_of_two() && d.itemsize() <= 16));
    }
}
