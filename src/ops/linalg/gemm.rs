//! Matrix products with an epilogue, in one launch: `out = epilogue(a b)`.
//!
//! Operands are read through their strides, so transposed, sliced, expanded and flipped matrices are not copied. The epilogue is an
//! expression of the product (`Input(0)`) and of further tensors broadcast to the result (`Input(1)`, ...), such as a bias, a mask
//! or an activation. It may have two results, so that one launch computes a layer and the data for its gradient. This file checks the
//! operands and allocates the results; the backend plans and launches.

use std::slice;

use crate::Compute;
use crate::backend::problem::gemm::Gemm;
use crate::expr::program::Program;
use crate::ops::dispatch::prelude::*;
use crate::ops::reduce;

impl<'a> Gemm<'a> {
    /// Creates a product with one result and without extra operands for the epilogue.
    pub(crate) fn plain(
        op: &'static str,
        a: &'a Tensor,
        b: &'a Tensor,
        epilogue: &'a [Expr],
        dtype: &'a DType,
    ) -> Gemm<'a> {
        let dtypes = slice::from_ref(dtype);
        Gemm { op, a, b, epilogue, extras: &[], scalars: &[], out: None, dtypes, sums: None }
    }

    /// Computes the results in one launch, or without a launch if they are empty. If the kernel does not compute the row sums, another
    /// launch does.
    pub(crate) fn compute_all(self) -> Result<SmallVec<[Tensor; 2]>> {
        let shape = self.shape()?;
        let outs =
            (0..self.dtypes.len()).map(|i| self.allocate(i, &shape)).collect::<Result<SmallVec<[Tensor; 2]>>>()?;
        self.compute_into(&shape, &outs)?;
        Ok(outs)
    }

    /// Computes the result like [`compute_all`](Self::compute_all), if there is only one result.
    pub(crate) fn compute_one(self) -> Result<Tensor> {
        let shape = self.shape()?;
        // The result is returned without a move.
        let made = self.allocate(0, &shape);
        if let Ok(out) = &made {
            self.compute_into(&shape, slice::from_ref(out))?;
        }
        made
    }

    /// Checks the operands and returns the shape of the results.
    fn shape(&self) -> Result<Shape> {
        let Gemm { op, a, b, .. } = *self;
        let device = same_device(op, &[a, b])?;
        if let Some(other) = self.extras.iter().find(|t| t.device() != device) {
            return Err(Error::DeviceMismatch { op, lhs: device, rhs: other.device() });
        }
        product_shape(op, a, b)
    }

    /// Returns the tensor to which result `i` is written: the caller's `out` if possible, otherwise a new tensor.
    fn allocate(&self, i: usize, shape: &Shape) -> Result<Tensor> {
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
            None => Tensor::empty_with_shape(shape, self.dtypes[i], device),
        }
    }

    fn compute_into(&self, shape: &Shape, outs: &[Tensor]) -> Result<()> {
        let Gemm { op, a, .. } = *self;
        let summed = match shape.numel() {
            0 => false,
            _ => self.with_program(|g| backend::launch(outs.iter().chain(self.sums), |b| b.gemm(g, outs)))?,
        };
        if let Some(sums) = self.sums.filter(|_| !summed) {
            let sum = reduce::sum_into(op, a, &[-1][..], false, Some(sums.detach()))?;
            if !sum.shares_storage(sums) {
                sums.copy_(&sum)?;
            }
        }
        Ok(())
    }

    /// Calls `f` with this product after replacing the constants of the epilogue by arguments, so that a program can be shared.
    fn with_program<R>(&self, f: impl FnOnce(&Gemm) -> R) -> R {
        let program = Program::shared(self.epilogue);
        if program.scalars() == program.caller_scalars() {
            return f(self);
        }
        program.with_arguments(self.epilogue, self.scalars, |scalars| {
            f(&Gemm { epilogue: program.exprs(), scalars, out: None, ..*self })
        })
    }

    /// Returns the type in which elements are multiplied and added.
    pub(crate) fn compute(&self) -> Compute {
        self.a.dtype.compute().max(self.b.dtype.compute())
    }
}

/// Returns the shape of the product of `[.., m, k]` and `[.., k, n]`: `[batch.., m, n]`.
pub(crate) fn product_shape(op: &'static str, a: &Tensor, b: &Tensor) -> Result<Shape> {
    let (x, y) = (a.shape().dims(), b.shape().dims());
    let ([batch_a @ .., m, k], [batch_b @ .., k_b, n]) = (x, y) else {
        return Err(shape_mismatch(op, a, b, "both need at least one dimension"));
    };
    mismatch!(op if k != k_b, a, b, "the number of columns of the left matrix must equal the number of rows of the right matrix");
    let batch = Shape::from(batch_a).broadcast(op, &Shape::from(batch_b));
    let batch = batch.map_err(|_| shape_mismatch(op, a, b, "the dimensions before the last two do not broadcast"))?;
    let mut dims = Dims::from_slice(batch.dims());
    dims.extend_from_slice(&[*m, *n]);
    Ok(dims.into())
}
