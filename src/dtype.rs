//! Element types.

mod promotion;
pub(crate) mod quant;
mod range;

use std::fmt;

use bytemuck::{CheckedBitPattern, NoUninit};
use half::{bf16, f16};

use crate::error::Excerpt;
use crate::{Error, Result};

pub(crate) use promotion::category;
pub use promotion::{can_cast, get_default_dtype, promote_types, set_default_dtype};

/// The type of a tensor's elements.
///
/// `F16` and `BF16` are storage types: arithmetic uses f32 and rounds to nearest even when a result is stored.
/// Integers and `Bool` (one byte, 0 or 1) compute as i64 and wrap when stored.
///
/// ```
/// use claystone::DType;
/// assert_eq!(DType::BF16.size(), 2);
/// assert_eq!("f16".parse::<DType>().unwrap(), DType::F16);
/// ```
///
/// With the feature `serde`, a dtype serialises as its name:
///
/// ```
/// # #[cfg(feature = "serde")] {
/// # use claystone::DType;
/// assert_eq!(serde_json::to_string(&DType::BF16).unwrap(), "\"bf16\"");
/// # }
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DType {
    /// 32-bit IEEE float, the default.
    F32,
    /// 16-bit IEEE float (5 bits of exponent).
    F16,
    /// The upper 16 bits of an f32.
    BF16,
    /// 64-bit IEEE float.
    F64,
    /// 64-bit signed integer, for labels and indices.
    I64,
    /// 32-bit signed integer.
    I32,
    /// 8-bit unsigned integer.
    U8,
    /// 32-bit unsigned integer.
    U32,
    /// One byte, 0 or 1: the result of comparisons.
    Bool,
    /// 8-bit signed integer.
    I8,
    /// 16-bit signed integer.
    I16,
}

/// Defines the facts about each dtype: the name, the Rust type, the OpenCL C type of the bits, and the type in which arithmetic computes.
macro_rules! dtypes {
    ($($dtype:ident $name:literal $type:ty, $cl:literal, $compute:ident;)*) => {
        impl DType {
            /// All dtypes.
            pub const ALL: [DType; 11] = [$(DType::$dtype),*];

            /// Returns the OpenCL C type that holds an element's bits.
            pub(crate) const fn cl_storage(self) -> &'static str {
                match self { $(DType::$dtype => $cl,)* }
            }

            /// Returns the size of an element in bytes.
            pub const fn size(self) -> usize {
                match self { $(DType::$dtype => size_of::<$type>(),)* }
            }

            /// Returns the name in messages, kernels and on the command line: `f32`, `bf16`, `bool`, ...
            pub const fn name(self) -> &'static str {
                match self { $(DType::$dtype => $name,)* }
            }

            /// Returns the type in which arithmetic on this dtype is computed.
            pub(crate) const fn compute(self) -> Compute {
                match self { $(DType::$dtype => Compute::$compute,)* }
            }
        }

        $(
            impl sealed::Sealed for $type {}
            impl Element for $type {
                const DTYPE: DType = DType::$dtype;
            }
        )*
    };
}

dtypes! {
    F32 "f32" f32, "float", F32;
    F16 "f16" f16, "ushort", F32;
    BF16 "bf16" bf16, "ushort", F32;
    F64 "f64" f64, "double", F64;
    I64 "i64" i64, "long", I64;
    I32 "i32" i32, "int", I64;
    U8 "u8" u8, "uchar", I64;
    U32 "u32" u32, "uint", I64;
    Bool "bool" bool, "uchar", I64;
    I8 "i8" i8, "char", I64;
    I16 "i16" i16, "short", I64;
}

impl DType {
    /// True for the four floating-point types.
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F32 | DType::F16 | DType::BF16 | DType::F64)
    }

    /// True for f16 and bf16.
    pub(crate) const fn is_half(self) -> bool {
        matches!(self, DType::F16 | DType::BF16)
    }

    /// Returns an error for integers and bool, for operations and layers that are defined on floats only. The error is
    /// [`Error::UnsupportedDType`].
    ///
    /// ```
    /// use claystone::DType;
    /// assert!(DType::BF16.check_float("Highway::new").is_ok());
    /// assert!(DType::I64.check_float("Highway::new").unwrap_err().to_string().starts_with("Highway::new: dtype i64"));
    /// ```
    pub fn check_float(self, op: &'static str) -> Result<()> {
        if self.is_float() { Ok(()) } else { Err(Error::UnsupportedDType { op, dtype: self, expected: "floats" }) }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl std::str::FromStr for DType {
    type Err = Error;

    fn from_str(s: &str) -> Result<DType> {
        DType::ALL.into_iter().find(|d| d.name() == s).ok_or_else(|| {
            let names: Vec<_> = DType::ALL.iter().map(|d| d.name()).collect();
            Error::invalid("dtype", format!("'{}' is not one of {}", Excerpt(s), names.join(", ")))
        })
    }
}

crate::error::serde_as_text!(DType);

/// The three types in which arithmetic is computed on every device. Operands of several types are computed in the greatest.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Compute {
    I64,
    F32,
    F64,
}

impl Compute {
    /// Returns the type's name in OpenCL C.
    pub(crate) const fn cl_name(self) -> &'static str {
        match self {
            Compute::I64 => "long",
            Compute::F32 => "float",
            Compute::F64 => "double",
        }
    }

    /// Returns the dtype that stores values of this type exactly.
    pub(crate) const fn dtype(self) -> DType {
        match self {
            Compute::I64 => DType::I64,
            Compute::F32 => DType::F32,
            Compute::F64 => DType::F64,
        }
    }
}

mod sealed {
    pub trait Sealed {}
}

/// A Rust type that can be a tensor's element. Sealed: there is exactly one for each [`DType`].
pub trait Element:
    sealed::Sealed
    + NoUninit
    + CheckedBitPattern<Bits: NoUninit + Send + Sync>
    + PartialEq
    + PartialOrd
    + Send
    + Sync
    + fmt::Debug
    + fmt::Display
    + 'static
{
    /// The dtype of elements of this type.
    const DTYPE: DType;
}

/// Casts bytes to elements. Fails with [`Error::Invalid`] if some bytes are not a valid `T`: a bool must be 0 or 1.
pub(crate) fn elements<'a, T: Element>(op: &'static str, bytes: &'a [u8]) -> Result<&'a [T]> {
    let refused = |_| Error::invalid(op, format!("the storage holds bytes that are no valid {}", T::DTYPE));
    bytemuck::checked::try_cast_slice(bytes).map_err(refused)
}

/// A number given by the caller: `2.0`, `3`, `true`. Each operation converts it to the tensor's dtype.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Scalar {
    /// From any float.
    Float(f64),
    /// From any integer or bool.
    Int(i64),
}

impl Scalar {
    /// Returns the value as f64.
    pub fn to_f64(self) -> f64 {
        match self {
            Scalar::Float(x) => x,
            Scalar::Int(i) => i as f64,
        }
    }

    /// Returns the value as i64: truncated towards zero and saturating, 0 for NaN (Rust's `as`).
    pub fn to_i64(self) -> i64 {
        match self {
            Scalar::Float(x) => x as i64,
            Scalar::Int(i) => i,
        }
    }

    /// Writes this value as one element of `dtype` to `out`, whose length is the dtype's size in bytes. Converts as the kernels do:
    /// halves are rounded from f32, floats saturate to integers, integers wrap, and every number except 0 is true.
    #[inline(always)] // where the dtype is known, the match disappears
    pub(crate) fn encode(self, dtype: DType, out: &mut [u8]) {
        macro_rules! int {
            ($t:ty) => {
                out.copy_from_slice(bytemuck::bytes_of(&match self {
                    Scalar::Float(x) => x as $t,
                    Scalar::Int(i) => i as $t,
                }))
            };
        }
        let x = self.to_f64();
        // Converted directly, so that an integer is rounded only once.
        let single = if let Scalar::Int(i) = self { i as f32 } else { x as f32 };
        match dtype {
            DType::F32 => out.copy_from_slice(bytemuck::bytes_of(&single)),
            DType::F16 => out.copy_from_slice(bytemuck::bytes_of(&f16::from_f32(single))),
            DType::BF16 => out.copy_from_slice(bytemuck::bytes_of(&bf16::from_f32(single))),
            DType::F64 => out.copy_from_slice(bytemuck::bytes_of(&x)),
            DType::I64 => int!(i64),
            DType::I32 => int!(i32),
            DType::I16 => int!(i16),
            DType::I8 => int!(i8),
            DType::U8 => int!(u8),
            DType::U32 => int!(u32),
            DType::Bool => out[0] = u8::from(x != 0.0),
        }
    }

    /// Reads one element of `dtype`, as written by [`Scalar::encode`].
    pub(crate) fn decode(dtype: DType, bytes: &[u8]) -> Scalar {
        fn read<T: bytemuck::AnyBitPattern>(bytes: &[u8]) -> T {
            bytemuck::pod_read_unaligned(bytes)
        }
        match dtype {
            DType::F32 => read::<f32>(bytes).into(),
            DType::F16 => read::<f16>(bytes).into(),
            DType::BF16 => read::<bf16>(bytes).into(),
            DType::F64 => read::<f64>(bytes).into(),
            DType::I64 => read::<i64>(bytes).into(),
            DType::I32 => read::<i32>(bytes).into(),
            DType::I16 => read::<i16>(bytes).into(),
            DType::I8 => read::<i8>(bytes).into(),
            DType::U8 => read::<u8>(bytes).into(),
            DType::U32 => read::<u32>(bytes).into(),
            DType::Bool => (bytes[0] != 0).into(),
        }
    }
}

macro_rules! scalars {
    ($($t:ty => $v:ident($e:expr)),* $(,)?) => { $(
        impl From<$t> for Scalar {
            fn from(x: $t) -> Scalar {
                let f: fn($t) -> _ = $e;
                Scalar::$v(f(x))
            }
        }
    )* };
}

scalars!(f64 => Float(|x| x), f32 => Float(f64::from), f16 => Float(f64::from), bf16 => Float(f64::from),
    i64 => Int(|x| x), i32 => Int(i64::from), i16 => Int(i64::from), i8 => Int(i64::from), isize => Int(|x| x as i64),
    u32 => Int(i64::from), u16 => Int(i64::from), u8 => Int(i64::from), bool => Int(i64::from));

/// A number above `i64::MAX` is converted to the nearest float.
impl From<u64> for Scalar {
    fn from(x: u64) -> Scalar {
        i64::try_from(x).map_or(Scalar::Float(x as f64), Scalar::Int)
    }
}

impl From<usize> for Scalar {
    fn from(x: usize) -> Scalar {
        Scalar::from(x as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scalars_convert_from_every_number_type() {
        assert_eq!(
            [Scalar::from(3i8), 3i16.into(), 3u16.into(), 3u64.into(), 3usize.into(), 3isize.into()],
            [Scalar::Int(3); 6]
        );
        assert_eq!(Scalar::from(u64::MAX), Scalar::Float(u64::MAX as f64));
    }

    #[test]
    fn scalars_are_stored_as_kernels_store_them() {
        let stored = |x: Scalar, dtype: DType| {
            let mut bytes = [0; 8];
            x.encode(dtype, &mut bytes[..dtype.size()]);
            Scalar::decode(dtype, &bytes[..dtype.size()])
        };
        assert_eq!(stored(300.7.into(), DType::U8), Scalar::Int(255));
        assert_eq!(stored(300.into(), DType::U8), Scalar::Int(44));
        assert_eq!(stored((-1.5).into(), DType::I32), Scalar::Int(-1));
        assert_eq!([300.7, -300.7].map(|x| stored(x.into(), DType::I8)), [127, -128].map(Scalar::Int));
        assert_eq!([300, -129].map(|x| stored(x.into(), DType::I8)), [44, 127].map(Scalar::Int));
        assert_eq!([40_000.0, -1.5].map(|x| stored(x.into(), DType::I16)), [32_767, -1].map(Scalar::Int));
        assert_eq!([40_000, -32_769].map(|x| stored(x.into(), DType::I16)), [-25_536, 32_767].map(Scalar::Int));
        assert_eq!(stored(f64::NAN.into(), DType::I64), Scalar::Int(0));
        assert_eq!(stored(f64::NAN.into(), DType::Bool), Scalar::Int(1));
        assert_eq!(stored(0.1.into(), DType::F16), Scalar::Float(0.0999755859375));
        assert_eq!(stored(1e6.into(), DType::F16), Scalar::Float(f64::INFINITY));
        for dtype in DType::ALL {
            assert_eq!(stored(1.into(), dtype).to_f64(), 1.0);
            assert_eq!(stored(0.into(), dtype).to_f64(), 0.0);
        }
    }
}
