//! Matrix products with an epilogue, in one launch: `out = epilogue(a b)`.
//!
//! Every operand is walked by its own strides, so transposed, sliced, expanded and flipped matrices cost no copy. The
//! epilogue is an expression over the product (`Input(0)`) and further tensors broadcast to the result (`Input(1)`,
//! ...): a bias, a mask, an activation, and it may have two results, so that a layer and what its gradient needs are
//! one launch. This file checks and plans: batch dimensions that all operands step through evenly become one, rows
//! that share the right-hand matrix join them. `gemm_cpu` and `gemm_opencl` run the plan.

use std::slice;

use smallvec::SmallVec;

use crate::backend::cpu::gemm as gemm_cpu;
use crate::backend::opencl::gemm as gemm_opencl;
use crate::expr::Expr;
use crate::layout::collapse::Walk;
use crate::ops::{reduce, same_device};
use crate::tensor::{Dims, Layout};
use crate::{Compute, DType, Device, Error, Result, Scalar, Shape, Tensor};

/// One product, not recorded by autograd.
pub(crate) struct Gemm<'a> {
    pub(crate) op: &'static str,
    /// `[.., m, k]` and `[.., k, n]`; the dimensions before are broadcast together.
    pub(crate) a: &'a Tensor,
    pub(crate) b: &'a Tensor,
    /// One expression a result, over the product and then `extras`; computed in the type the product is summed in: f32
    /// for the floats up to f32, f64, or i64.
    pub(crate) epilogue: &'a [Expr],
    /// Broadcast to the results' shape, `[.., m, n]`.
    pub(crate) extras: &'a [&'a Tensor],
    pub(crate) scalars: &'a [Scalar],
    /// Where the first result had best be written, of the results' shape: it is unless it shares an operand's storage.
    pub(crate) out: Option<Tensor>,
    /// Of the results.
    pub(crate) dtypes: &'a [DType],
    /// Where the sums of the rows of `a` go as well, `[m]`, of its dtype; only for matrices without dimensions before.
    pub(crate) sums: Option<&'a Tensor>,
}

impl<'a> Gemm<'a> {
    /// A product of one result.
    pub(crate) fn plain(
        op: &'static str,
        a: &'a Tensor,
        b: &'a Tensor,
        epilogue: &'a [Expr],
        dtype: &'a DType,
    ) -> Gemm<'a> {
        let dtypes = std::slice::from_ref(dtype);
        Gemm { op, a, b, epilogue, extras: &[], scalars: &[], out: None, dtypes, sums: None }
    }

    /// Computes the results. One launch, none where they are empty, another one for the sums where the kernel does not
    /// have them.
    pub(crate) fn run(self) -> Result<SmallVec<[Tensor; 2]>> {
        let shape = self.shape()?;
        let outs = (0..self.dtypes.len()).map(|i| self.made(i, &shape)).collect::<Result<SmallVec<[Tensor; 2]>>>()?;
        self.compute_into(&shape, &outs)?;
        Ok(outs)
    }

    /// [`run`](Self::run) for one result.
    pub(crate) fn run_one(self) -> Result<Tensor> {
        let shape = self.shape()?;
        // Stays where the caller wants it.
        let made = self.made(0, &shape);
        if let Ok(out) = &made {
            self.compute_into(&shape, slice::from_ref(out))?;
        }
        made
    }

    /// That of the results, once the operands go together.
    fn shape(&self) -> Result<Shape> {
        let Gemm { op, a, b, .. } = *self;
        let device = same_device(op, &[a, b])?;
        if let Some(other) = self.extras.iter().find(|t| t.device() != device) {
            return Err(Error::DeviceMismatch { op, lhs: device, rhs: other.device() });
        }
        product_shape(op, a, b)
    }

    /// Where result `i` goes.
    fn made(&self, i: usize, shape: &Shape) -> Result<Tensor> {
        let device = self.a.device();
        let usable = |slot: &&Tensor| {
            slot.shape() == shape
                && slot.dtype == self.dtypes[0]
                && slot.device() == device
                && !slot.layout.may_alias_itself()
                && ![self.a, self.b].iter().chain(self.extras).any(|t| t.shares_storage(slot))
        };
        match self.out.as_ref().filter(|_| i == 0).filter(usable) {
            Some(slot) => Ok(slot.detach()),
            None => Tensor::empty_like_shape(shape, self.dtypes[i], device),
        }
    }

    fn compute_into(&self, shape: &Shape, outs: &[Tensor]) -> Result<()> {
        let Gemm { op, a, .. } = *self;
        let mut summed = false;
        if shape.numel() > 0 {
            match a.device() {
                Device::Cpu => summed = gemm_cpu::run(self, shape, outs)?,
                Device::OpenCL(_) => summed = gemm_opencl::run(self, shape, outs)?,
            }
            outs.iter().for_each(|t| t.storage.bump_version());
        }
        match self.sums {
            Some(sums) if summed => sums.storage.bump_version(),
            Some(sums) => {
                let sum = reduce::sum_into(op, a, &[-1][..], false, Some(sums.detach()))?;
                if !sum.shares_storage(sums) {
                    sums.copy_(&sum)?;
                }
            }
            None => {}
        }
        Ok(())
    }

    /// The type to multiply and add in.
    pub(crate) fn compute(&self) -> Compute {
        self.a.dtype.compute().max(self.b.dtype.compute())
    }
}

/// `[batch.., m, n]` of `[.., m, k]` times `[.., k, n]`.
pub(crate) fn product_shape(op: &'static str, a: &Tensor, b: &Tensor) -> Result<Shape> {
    let (x, y) = (a.shape().dims(), b.shape().dims());
    let mismatch = |hint| Error::ShapeMismatch { op, lhs: a.shape().clone(), rhs: b.shape().clone(), hint };
    let ([batch_a @ .., m, k], [batch_b @ .., k_b, n]) = (x, y) else {
        return Err(mismatch("both need at least one dimension"));
    };
    if k != k_b {
        return Err(mismatch("the columns of the left matrix have to be as many as the rows of the right one"));
    }
    let batch = Shape::from(batch_a)
        .broadcast(op, &Shape::from(batch_b))
        .map_err(|_| mismatch("the dimensions before the last two do not broadcast"))?;
    let mut dims = Dims::from_slice(batch.dims());
    dims.extend_from_slice(&[*m, *n]);
    Ok(dims.into())
}

/// A matrix as the kernels see it: strides in elements along rows and columns and along each batch dimension of the
/// plan. Element 0 is the tensor's first.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Operand {
    pub(crate) row: isize,
    pub(crate) col: isize,
    pub(crate) batch: Dims<isize>,
}

/// The product as loops: `batch` of m x k times k x n.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Plan {
    pub(crate) batch: Dims,
    pub(crate) m: usize,
    pub(crate) n: usize,
    pub(crate) k: usize,
    pub(crate) a: Operand,
    pub(crate) b: Operand,
    /// Results, then extras: all of the results' shape.
    pub(crate) others: SmallVec<[Operand; 4]>,
}

impl Plan {
    /// `others` are the layouts of results and extras, broadcast to `shape`, which is not empty.
    pub(crate) fn new(a: &Layout, b: &Layout, shape: &Shape, others: &[&Layout]) -> Plan {
        let (batch, [m, n]) = split(shape.dims());
        let k = a.shape.dims()[a.shape.rank() - 1];
        let over_batch = |t: &Layout| {
            let (_, matrix) = split(t.shape.dims());
            t.broadcast_to(&batch.iter().copied().chain(matrix).collect())
        };
        let (a, b) = (over_batch(a), over_batch(b));
        let (a_batch, [a_row, a_col]) = split(&a.strides);
        let (b_batch, [b_row, b_col]) = split(&b.strides);

        if a_batch.iter().all(|&s| s == 0) && b_batch.iter().any(|&s| s != 0) {
            // The left matrix is shared: the same product transposed shares the right one.
            let flip = |t: &Layout| t.transpose(t.shape.rank() - 2, t.shape.rank() - 1);
            let others: SmallVec<[Layout; 4]> = others.iter().map(|t| flip(t)).collect();
            let others: SmallVec<[&Layout; 4]> = others.iter().collect();
            let shape = batch.iter().copied().chain([n, m]).collect();
            return Plan::new(&flip(&b), &flip(&a), &shape, &others).transposed();
        }

        // Where the right matrix is shared, rows and batch are one walk; its last dimension becomes the rows.
        let shared = b_batch.iter().all(|&s| s == 0);
        let outer = |t: &Layout| -> Dims<isize> {
            let (batch, [row, _]) = split(&t.strides);
            batch.iter().copied().chain(shared.then_some(row)).collect()
        };
        let mut steps: SmallVec<[Dims<isize>; 6]> =
            [outer(&a), outer(&b)].into_iter().chain(others.iter().map(|t| outer(t))).collect();
        if shared {
            steps[1].iter_mut().for_each(|s| *s = 0);
        }
        let sizes: Shape = batch.iter().copied().chain(shared.then_some(m)).collect();
        let walk = Walk::new(&sizes, steps.iter().map(|s| &s[..]));
        let joined = shared && !walk.dims.is_empty();
        let batch_rank = walk.dims.len() - joined as usize;
        let operand = |i: usize, row: isize, col: isize| {
            let strides = &walk.strides[i];
            let row = if joined && i != 1 { strides[batch_rank] } else { row };
            Operand { row, col, batch: strides[..batch_rank].iter().copied().collect() }
        };
        Plan {
            m: if joined { walk.dims[batch_rank] } else { m },
            n,
            k,
            a: operand(0, a_row, a_col),
            b: operand(1, b_row, b_col),
            others: others
                .iter()
                .enumerate()
                .map(|(i, t)| {
                    let (_, [row, col]) = split(&t.strides);
                    operand(i + 2, row, col)
                })
                .collect(),
            batch: walk.dims[..batch_rank].iter().copied().collect(),
        }
    }

    /// The same product as the transpose of `b' a'`.
    pub(crate) fn transposed(self) -> Plan {
        let flip = |t: Operand| Operand { row: t.col, col: t.row, ..t };
        Plan {
            m: self.n,
            n: self.m,
            a: flip(self.b),
            b: flip(self.a),
            others: self.others.into_iter().map(flip).collect(),
            ..self
        }
    }

    /// How many matrices.
    pub(crate) fn count(&self) -> usize {
        self.batch.iter().product()
    }
}

/// Batch dimensions and the last two.
fn split<T: Copy>(dims: &[T]) -> (&[T], [T; 2]) {
    let (batch, matrix) = dims.split_at(dims.len() - 2);
    (batch, [matrix[0], matrix[1]])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layout(dims: &[usize], strides: &[isize]) -> Layout {
        Layout { shape: dims.into(), strides: strides.iter().copied().collect(), offset: 0 }
    }

    #[test]
    fn rows_that_share_the_right_matrix_are_one_matrix() {
        let (a, b) = (Layout::contiguous([2, 3, 4].into()), layout(&[4, 5], &[1, 4]));
        let out = Layout::contiguous([2, 3, 5].into());
        let plan = Plan::new(&a, &b, &out.shape, &[&out]);
        assert_eq!((plan.m, plan.n, plan.k, plan.count()), (6, 5, 4, 1));
        assert_eq!((plan.a.row, plan.a.col, plan.b.row, plan.b.col), (4, 1, 1, 4));
        assert_eq!(plan.others[0], Operand { row: 5, col: 1, batch: Dims::new() });
    }

    #[test]
    fn a_shared_left_matrix_is_the_same_transposed() {
        let (a, b) = (Layout::contiguous([3, 4].into()), layout(&[2, 4, 5], &[5, 10, 1]));
        let out = layout(&[2, 3, 5], &[5, 10, 1]);
        let plan = Plan::new(&a, &b, &out.shape, &[&out]);
        assert_eq!((plan.m, plan.n, plan.k, plan.count()), (3, 10, 4, 1));
        assert_eq!((plan.b.row, plan.b.col, plan.others[0].row, plan.others[0].col), (10, 1, 10, 1));
    }

    #[test]
    fn different_matrices_stay_a_batch() {
        let (a, b) = (Layout::contiguous([6, 1, 3, 4].into()), Layout::contiguous([2, 4, 5].into()));
        let out = Layout::contiguous([6, 2, 3, 5].into());
        let plan = Plan::new(&a, &b, &out.shape, &[&out]);
        assert_eq!((&plan.batch[..], plan.m, plan.n, plan.k), (&[6, 2][..], 3, 5, 4));
        assert_eq!((&plan.a.batch[..], &plan.b.batch[..]), (&[12, 0][..], &[0, 20][..]));
        assert_eq!(plan.others[0].batch[..], [30, 15]);
    }

    #[test]
    fn a_batch_of_single_rows_is_a_matrix() {
        let (a, b) = (Layout::contiguous([7, 1, 4].into()), Layout::contiguous([4, 5].into()));
        let out = Layout::contiguous([7, 1, 5].into());
        let plan = Plan::new(&a, &b, &out.shape, &[&out]);
        assert_eq!((plan.m, plan.count(), plan.a.row, plan.others[0].row), (7, 1, 4, 5));
    }
}
