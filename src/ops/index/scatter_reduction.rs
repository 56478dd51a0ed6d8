//! The reductions of [`Tensor::scatter_reduce`](crate::Tensor::scatter_reduce).

use crate::backend::problem::index::Combine;
use crate::error::Excerpt;
use crate::ops::dispatch::arguments::Argument;
use crate::{DType, Error, Result, Scalar};

/// The reduction that [`Tensor::scatter_reduce`](crate::Tensor::scatter_reduce) and [`Tensor::index_reduce`](crate::Tensor::index_reduce) apply to all values that are written to one element.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ScatterReduce {
    /// The sum.
    Sum,
    /// The product.
    Prod,
    /// The mean, rounded down for integers.
    Mean,
    /// The maximum; NaN if any value is NaN.
    Amax,
    /// The minimum; NaN if any value is NaN.
    Amin,
}

impl ScatterReduce {
    /// The variants in order, each with PyTorch's name and the combination that computes it.
    pub(super) const ALL: [(ScatterReduce, &'static str, Combine); 5] = [
        (Self::Sum, "sum", Combine::Add),
        (Self::Prod, "prod", Combine::Multiply),
        (Self::Mean, "mean", Combine::Add),
        (Self::Amax, "amax", Combine::Max),
        (Self::Amin, "amin", Combine::Min),
    ];

    pub(super) fn neutral_element(self, dtype: DType) -> Scalar {
        let (low, high) = match dtype {
            DType::I64 => (i64::MIN, i64::MAX),
            DType::I32 => (i32::MIN.into(), i32::MAX.into()),
            DType::I16 => (i16::MIN.into(), i16::MAX.into()),
            DType::I8 => (i8::MIN.into(), i8::MAX.into()),
            DType::U32 => (0, u32::MAX.into()),
            DType::U8 => (0, u8::MAX.into()),
            _ => (0, 1),
        };
        match self {
            ScatterReduce::Sum | ScatterReduce::Mean => Scalar::Int(0),
            ScatterReduce::Prod => Scalar::Int(1),
            ScatterReduce::Amax if dtype.is_float() => Scalar::Float(f64::NEG_INFINITY),
            ScatterReduce::Amin if dtype.is_float() => Scalar::Float(f64::INFINITY),
            ScatterReduce::Amax => Scalar::Int(low),
            ScatterReduce::Amin => Scalar::Int(high),
        }
    }
}

impl std::str::FromStr for ScatterReduce {
    type Err = Error;

    /// Parses a reduction by PyTorch's name: `sum`, `prod`, `mean`, `amax` or `amin`.
    fn from_str(s: &str) -> Result<ScatterReduce> {
        let found = Self::ALL.iter().find(|(_, name, _)| *name == s).map(|(reduce, ..)| *reduce);
        found.ok_or_else(|| {
            let reason = format!("'{}' is not one of sum, prod, mean, amax, amin", Excerpt(s));
            Error::invalid("scatter_reduce", reason)
        })
    }
}

impl From<ScatterReduce> for Argument {
    fn from(reduce: ScatterReduce) -> Argument {
        ScatterReduce::ALL[reduce as usize].1.into()
    }
}
