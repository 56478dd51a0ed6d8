//! The ways in which an elementwise launch indexes its operands.

use crate::Tensor;
use crate::layout::collapse::StridedDims;

/// The index into an operand when output element `i` is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum OperandKind {
    /// The index is `i`.
    Contiguous,
    /// The index is `i` modulo this length: a contiguous row is broadcast.
    RowBroadcast(usize),
    /// The index is `i / row * step`: one element for each row of the output.
    ColumnBroadcast { row: usize, step: usize },
    /// The index is 0: one element for all outputs.
    Scalar,
    /// The index is computed from dims and strides.
    Strided,
}

impl OperandKind {
    /// Classifies `t`, broadcast to the shape of `out`. A `t` that cannot be broadcast is classified as strided; there is no error.
    pub(crate) fn classify(t: &Tensor, out: &Tensor) -> OperandKind {
        let (dims, all) = (t.shape().dims(), out.shape().dims());
        if t.layout.same_layout(&out.layout, 1) && t.device() == out.device() {
            return if out.is_contiguous() { OperandKind::Contiguous } else { OperandKind::Strided }; // the most frequent case
        }
        if let ([before @ .., row], [rows @ .., 1]) = (all, dims)
            && before == rows
            && t.device() == out.device()
            && let Some(step) = column_step(t).filter(|_| *row > 1)
        {
            return OperandKind::ColumnBroadcast { row: *row, step };
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

    /// Classifies operand `k` of `iteration`, which holds the dims and strides of all operands.
    pub(crate) fn classify_dims(iteration: &StridedDims, k: usize) -> OperandKind {
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

/// Returns the stride between the elements of a column, if it is positive and the same for all.
fn column_step(t: &Tensor) -> Option<usize> {
    let steps = StridedDims::new(t.shape(), [t.strides()]);
    match steps.strides[0][..] {
        [step] => usize::try_from(step).ok().filter(|&step| step > 0),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Shape;

    #[test]
    fn classifies_the_operands_of_an_iteration() {
        let strides: [&[isize]; 5] = [&[12, 4, 1], &[0, 4, 1], &[0, 0, 0], &[0, 1, 0], &[0, 0, 1]];
        let iteration = StridedDims::new(&Shape::from([2, 3, 4]), strides);
        let kinds = [0, 1, 2, 3, 4].map(|k| OperandKind::classify_dims(&iteration, k));
        let (row, short) = (OperandKind::RowBroadcast(12), OperandKind::RowBroadcast(4));
        assert_eq!(kinds, [OperandKind::Contiguous, row, OperandKind::Scalar, OperandKind::Strided, short]);
    }
}
