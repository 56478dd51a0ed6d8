//! Matrix products with an epilogue, and the plan of the loops that compute them.

use std::sync::LazyLock;

use smallvec::SmallVec;

use crate::expr::Expr;
use crate::layout::Layout;
use crate::layout::collapse::StridedDims;
use crate::layout::shape::{Dims, Shape};
use crate::{DType, Scalar, Tensor};

/// A matrix product with an epilogue. Autograd does not record it.
pub(crate) struct Gemm<'a> {
    pub(crate) op: &'static str,
    /// The left matrix, `[.., m, k]`; the right matrix `b` is `[.., k, n]`. Batch dims are broadcast.
    pub(crate) a: &'a Tensor,
    pub(crate) b: &'a Tensor,
    /// One expression for each result. Input 0 is the product, and inputs 1.. are `extras`. All are evaluated in the type of the
    /// accumulator: f32 for floats up to f32, f64, or i64.
    pub(crate) epilogue: &'a [Expr],
    /// Operands of the epilogue, broadcast to the shape of the results, `[.., m, n]`.
    pub(crate) extras: &'a [&'a Tensor],
    pub(crate) scalars: &'a [Scalar],
    /// Memory for the first result, with the shape of the results. Ignored if it shares storage with an operand; `None` allocates.
    pub(crate) out: Option<Tensor>,
    /// The dtypes of the results, in order.
    pub(crate) dtypes: &'a [DType],
    /// Receives the sum of each row of `a`, in the dtype of `a`: shape `[m]`. Allowed only for products without batch dims.
    pub(crate) sums: Option<&'a Tensor>,
}

/// The strides of a matrix, in elements: between rows, between columns, and along each batch dim of the plan.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct GemmOperand {
    pub(crate) row: isize,
    pub(crate) col: isize,
    pub(crate) batch: Dims<isize>,
}

/// The plan of a product: for each index of `batch`, an m x k matrix times a k x n matrix.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct GemmPlan {
    pub(crate) batch: Dims,
    pub(crate) m: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
    pub(crate) a: GemmOperand,
    pub(crate) b: GemmOperand,
    /// The results, then the extras, all broadcast to the shape of the results.
    pub(crate) others: SmallVec<[GemmOperand; 4]>,
}

impl GemmPlan {
    /// Plans the product of `a` and `b`. `others` holds the layouts of results and extras, broadcast to `shape`. `shape` must not be empty.
    pub(crate) fn new(a: &Layout, b: &Layout, shape: &Shape, others: &[&Layout]) -> GemmPlan {
        let (batch, [m, n]) = split_matrix_dims(shape.dims());
        let k = a.shape.dims()[a.shape.rank() - 1];
        let over_batch = |t: &Layout| {
            let (_, matrix) = split_matrix_dims(t.shape.dims());
            t.broadcast_to(&batch.iter().copied().chain(matrix).collect())
        };
        let (a, b) = (over_batch(a), over_batch(b));
        let (a_batch, [a_row, a_col]) = split_matrix_dims(&a.strides);
        let (b_batch, [b_row, b_col]) = split_matrix_dims(&b.strides);

        if a_batch.iter().all(|&s| s == 0) && b_batch.iter().any(|&s| s != 0) {
            // All batches use the same left matrix. In the transposed product, that matrix is on the right, which the code below handles.
            let flip = |t: &Layout| t.transpose(t.shape.rank() - 2, t.shape.rank() - 1);
            let others: SmallVec<[Layout; 4]> = others.iter().map(|t| flip(t)).collect();
            let others: SmallVec<[&Layout; 4]> = others.iter().collect();
            let shape = batch.iter().copied().chain([n, m]).collect();
            return GemmPlan::new(&flip(&b), &flip(&a), &shape, &others).transposed();
        }

        // If all batches use the same right matrix, batch dims and rows collapse into fewer dims, and the last collapsed dim becomes the rows.
        let shared = b_batch.iter().all(|&s| s == 0);
        let outer = |t: &Layout| -> Dims<isize> {
            let (batch, [row, _]) = split_matrix_dims(&t.strides);
            batch.iter().copied().chain(shared.then_some(row)).collect()
        };
        let mut steps: SmallVec<[Dims<isize>; 6]> =
            [outer(&a), outer(&b)].into_iter().chain(others.iter().map(|t| outer(t))).collect();
        if shared {
            steps[1].iter_mut().for_each(|s| *s = 0);
        }
        let sizes: Shape = batch.iter().copied().chain(shared.then_some(m)).collect();
        let strided = StridedDims::new(&sizes, steps.iter().map(|s| &s[..]));
        let joined = shared && !strided.dims.is_empty();
        let batch_rank = strided.dims.len() - joined as usize;
        let operand = |i: usize, row: isize, col: isize| {
            let strides = &strided.strides[i];
            let row = if joined && i != 1 { strides[batch_rank] } else { row };
            GemmOperand { row, col, batch: strides[..batch_rank].iter().copied().collect() }
        };
        GemmPlan {
            m: if joined { strided.dims[batch_rank] } else { m },
            n,
            k,
            a: operand(0, a_row, a_col),
            b: operand(1, b_row, b_col),
            others: others
                .iter()
                .enumerate()
                .map(|(i, t)| {
                    let (_, [row, col]) = split_matrix_dims(&t.strides);
                    operand(i + 2, row, col)
                })
                .collect(),
            batch: strided.dims[..batch_rank].iter().copied().collect(),
        }
    }

    /// Returns the plan of the transposed product, `bᵀ aᵀ`.
    pub(crate) fn transposed(self) -> GemmPlan {
        let flip = |t: GemmOperand| GemmOperand { row: t.col, col: t.row, ..t };
        GemmPlan {
            m: self.n,
            n: self.m,
            a: flip(self.b),
            b: flip(self.a),
            others: self.others.into_iter().map(flip).collect(),
            ..self
        }
    }

    /// Returns the number of matrices in the batch.
    pub(crate) fn count(&self) -> usize {
        self.batch.iter().product()
    }
}

/// Splits dims into the batch dims and the last two dims, which are the matrix.
fn split_matrix_dims<T: Copy>(dims: &[T]) -> (&[T], [T; 2]) {
    let (batch, matrix) = dims.split_at(dims.len() - 2);
    (batch, [matrix[0], matrix[1]])
}

/// The common epilogues. They are static, because building an expression allocates.
pub(crate) struct Epilogues {
    /// The product without further operations.
    pub(crate) product: Expr,
    /// The product plus a bias.
    pub(crate) biased: Expr,
    /// relu of the product: without a bias, and with a bias.
    pub(crate) relu: [Expr; 2],
    /// The product times the derivative of relu at input 1, for the backward pass of relu.
    pub(crate) relu_grad: Expr,
}

pub(crate) static EPILOGUES: LazyLock<Epilogues> = LazyLock::new(|| {
    let (product, biased) = (Expr::input(0), Expr::input(0) + Expr::input(1));
    let relu_grad = &product * Expr::input(1).relu().diff(1);
    Epilogues { relu: [product.relu(), biased.relu()], product, biased, relu_grad }
});

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(dims: &[usize], strides: &[isize]) -> Layout {
        Layout { shape: dims.into(), strides: strides.iter().copied().collect(), offset: 0 }
    }

    #[test]
    fn a_batch_with_one_right_matrix_becomes_one_product() {
        let (a, b) = (Layout::contiguous([2, 3, 4].into()), layout(&[4, 5], &[1, 4]));
        let out = Layout::contiguous([2, 3, 5].into());
        let plan = GemmPlan::new(&a, &b, &out.shape, &[&out]);
        assert_eq!((plan.m, plan.n, plan.k, plan.count()), (6, 5, 4, 1));
        assert_eq!((plan.a.row, plan.a.col, plan.b.row, plan.b.col), (4, 1, 1, 4));
        assert_eq!(plan.others[0], GemmOperand { row: 5, col: 1, batch: Dims::new() });
    }

    #[test]
    fn a_batch_with_one_left_matrix_is_planned_transposed() {
        let (a, b) = (Layout::contiguous([3, 4].into()), layout(&[2, 4, 5], &[5, 10, 1]));
        let out = layout(&[2, 3, 5], &[5, 10, 1]);
        let plan = GemmPlan::new(&a, &b, &out.shape, &[&out]);
        assert_eq!((plan.m, plan.n, plan.k, plan.count()), (3, 10, 4, 1));
        assert_eq!((plan.b.row, plan.b.col, plan.others[0].row, plan.others[0].col), (10, 1, 10, 1));
    }

    #[test]
    fn different_matrices_stay_a_batch() {
        let (a, b) = (Layout::contiguous([6, 1, 3, 4].into()), Layout::contiguous([2, 4, 5].into()));
        let out = Layout::contiguous([6, 2, 3, 5].into());
        let plan = GemmPlan::new(&a, &b, &out.shape, &[&out]);
        assert_eq!((&plan.batch[..], plan.m, plan.n, plan.k), (&[6, 2][..], 3, 5, 4));
        assert_eq!((&plan.a.batch[..], &plan.b.batch[..]), (&[12, 0][..], &[0, 20][..]));
        assert_eq!(plan.others[0].batch[..], [30, 15]);
    }

    #[test]
    fn a_batch_of_single_rows_becomes_one_matrix() {
        let (a, b) = (Layout::contiguous([7, 1, 4].into()), Layout::contiguous([4, 5].into()));
        let out = Layout::contiguous([7, 1, 5].into());
        let plan = GemmPlan::new(&a, &b, &out.shape, &[&out]);
        assert_eq!((plan.m, plan.count(), plan.a.row, plan.others[0].row), (7, 1, 4, 5));
    }
}
