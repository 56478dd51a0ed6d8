//! Elements read and written through indices.

use crate::layout::Layout;
use crate::{Compute, DType, Tensor};

/// Elements read or written through indices. Layouts have one shape, that of these elements.
pub(crate) struct Indexed<'a> {
    pub(crate) op: &'static str,
    /// What is read from, with stride 0 along the indexed dim, or the source that is written.
    pub(crate) x: &'a Tensor,
    pub(crate) x_layout: Layout,
    pub(crate) index: &'a Tensor,
    pub(crate) index_layout: Layout,
    /// Size of the indexed dim, and the step along it in the tensor that the index points into.
    pub(crate) size: usize,
    pub(crate) step: isize,
    /// Whether negative indices count from the end.
    pub(crate) wraps: bool,
}

/// What becomes of an element and what is written to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Combine {
    /// The last one written stays.
    Set,
    Add,
    Multiply,
    Max,
    Min,
}

impl Combine {
    #[inline(always)]
    pub(crate) fn of<C: crate::backend::cpu::scalar::Number>(self, old: C, new: C) -> C {
        match self {
            Combine::Set => new,
            Combine::Add => old.add(new),
            Combine::Multiply => old.mul(new),
            Combine::Max => old.max(new),
            Combine::Min => old.min(new),
        }
    }

    /// The function of that name in OpenCL C.
    pub(crate) fn cl_name(self, acc: Compute) -> String {
        let (integers, c) = (acc == Compute::I64, acc.cl_name());
        match self {
            Combine::Add if integers => "add_long".into(),
            Combine::Multiply if integers => "mul_long".into(),
            Combine::Add => "PLUS".into(),
            Combine::Multiply => "TIMES".into(),
            Combine::Max => format!("max_{c}"),
            Combine::Min => format!("min_{c}"),
            Combine::Set => unreachable!("elements that are only moved are not computed with"),
        }
    }

    /// Whether each step would round an element of `dtype`, where only the last should.
    pub(crate) fn rounds(self, dtype: DType) -> bool {
        matches!(self, Combine::Add | Combine::Multiply) && matches!(dtype, DType::F16 | DType::BF16)
    }
}
