//! How an elementwise launch indexes its operands.

use crate::Tensor;
use crate::layout::collapse::StridedDims;

/// The index of the element of an operand that element `i` of the result reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OperandKind {
    /// `i`.
    Contiguous,
    /// `i` modulo this length of a contiguous row, which is broadcast.
    RowBroadcast(usize),
    /// 0: one element for all.
    Scalar,
    /// It follows from dims and strides.
    Strided,
}

impl OperandKind {
    /// The kind of `t` broadcast to the shape of `out`. Shapes that do not broadcast are not an error here, but strided.
    pub(crate) fn of(t: &Tensor, out: &Tensor) -> OperandKind {
        let (dims, all) = (t.shape().dims(), out.shape().dims());
        if t.layout.lies_like(&out.layout, 1) && t.device() == out.device() {
            return if out.is_contiguous() { OperandKind::Contiguous } else { OperandKind::Strided }; // almost always
        }
        let ones = dims.iter().take_while(|&&d| d == 1).count();
        if t.device() != out.device() || dims.len() > all.len() || !all.ends_with(&dims[ones..]) || !t.is_contiguous() {
            return OperandKind::Strided;
        }
        match t.numel() {
            n if n == out.numel() => OperandKind::Contiguous,
            1 => OperandKind::Scalar,
            n => OperandKind::RowBroadcast(n),
        }
    }

    /// The kind of operand `k` of an iteration.
    pub(crate) fn of_dims(iteration: &StridedDims, k: usize) -> OperandKind {
        let (dims, strides) = (&iteration.dims, &iteration.strides[k]);
        let outer = strides.iter().take_while(|&&s| s == 0).count();
        let row: usize = dims[outer..].iter().product();
        match () {
            () if iteration.is_contiguous(k) => OperandKind::Contiguous,
            () if outer == dims.len() => OperandKind::Scalar,
            () if iteration.is_contiguous_from(outer, k) => OperandKind::RowBroadcast(row),
            () => OperandKind::Strided,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Shape;

    #[test]
    fn kinds_of_an_iteration() {
        let strides: [&[isize]; 5] = [&[12, 4, 1], &[0, 4, 1], &[0, 0, 0], &[0, 1, 0], &[0, 0, 1]];
        let iteration = StridedDims::new(&Shape::from([2, 3, 4]), strides);
        let kinds = [0, 1, 2, 3, 4].map(|k| OperandKind::of_dims(&iteration, k));
        let (row, short) = (OperandKind::RowBroadcast(12), OperandKind::RowBroadcast(4));
        assert_eq!(kinds, [OperandKind::Contiguous, row, OperandKind::Scalar, OperandKind::Strided, short]);
    }
}
