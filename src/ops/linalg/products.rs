//! Products of vectors and matrices, named as in PyTorch.
//!
//! `beta * input + alpha * (a b)` takes one launch: a product with an epilogue. All other operations are short compositions of views,
//! products and sums, which also define their gradients.

use std::sync::LazyLock;

use crate::backend::problem::gemm::{EPILOGUES, Gemm};
use crate::ops::dispatch::prelude::*;
use crate::ops::linalg::gemm::product_shape;

/// The epilogues `alpha * (a b)` and `alpha * (a b) + beta * input`.
static SCALED_EPILOGUES: LazyLock<[Expr; 2]> = LazyLock::new(|| {
    let product = Expr::input(0) * Expr::scalar(0);
    [product.clone(), Expr::input(1) * Expr::scalar(1) + product]
});

/// Computes `alpha * (a b)`, plus `beta * input` if given, in one launch, and records it.
///
/// `input` broadcasts to the product's shape, and is not read if beta is 0. Both matrices have at least two dims; the dims before the
/// last two are broadcast against each other.
pub(crate) fn scaled_product(
    op: &'static str,
    input: Option<(&Tensor, Scalar)>,
    a: &Tensor,
    b: &Tensor,
    alpha: Scalar,
) -> Result<Tensor> {
    let inputs: Dims<&Tensor> = [a, b].into_iter().chain(input.map(|(t, _)| t)).collect();
    cast_first!(autocast_inputs(op, &inputs)?, |x| scaled_product(
        op,
        x.get(2).zip(input).map(|(t, (_, beta))| (t, beta)),
        &x[0],
        &x[1],
        alpha
    ));
    scaled_product_into(op, None, input, a, b, alpha)
}

/// Computes the product like [`scaled_product`], but without autocast, and writes it to `out` if possible. `out` shares no memory with
/// the operands.
pub(crate) fn scaled_product_into(
    op: &'static str,
    out: Option<Tensor>,
    input: Option<(&Tensor, Scalar)>,
    a: &Tensor,
    b: &Tensor,
    alpha: Scalar,
) -> Result<Tensor> {
    let dtype = same_dtype(op, &[a, b])?;
    unsupported!(op if dtype == DType::Bool, dtype, "numbers");
    same_device(op, &[a, b])?;
    let shape = product_shape(op, a, b)?;
    let scalars = [alpha, input.map_or(Scalar::Int(0), |(_, beta)| beta)];
    scalars.iter().try_for_each(|s| s.check_factor(op, dtype))?;
    if let Some((t, _)) = input {
        same_dtype(op, &[t, a])?;
        same_device(op, &[t, a])?;
        if shape.broadcast(op, t.shape())? != shape {
            let hint = "the tensor added broadcasts to the shape of the product";
            return Err(Error::ShapeMismatch { op, lhs: shape, rhs: t.shape().clone(), hint });
        }
    }
    let read = input.filter(|(_, beta)| beta.to_f64() != 0.0).map(|(t, _)| t);
    let (epilogue, scalars) = match read {
        Some(_) => (&SCALED_EPILOGUES[1], &scalars[..]),
        None if alpha.to_f64() == 1.0 => (&EPILOGUES.product, &[][..]),
        None => (&SCALED_EPILOGUES[0], &scalars[..1]),
    };
    let epilogue = std::slice::from_ref(epilogue);
    let gemm = Gemm { out, extras: read.as_slice(), scalars, ..Gemm::plain(op, a, b, epilogue, &dtype) };
    let out = gemm.compute_one()?;

    let added = input.map(|(t, beta)| (t.shape().clone(), beta));
    let inputs: Dims<&Tensor> = [a, b].into_iter().chain(input.map(|(t, _)| t)).collect();
    let saved = [a, b].map(|t| Saved::for_inputs(&inputs, t));
    Ok(record_gradients(op, out, &inputs, move |i, grad| {
        let [a, b] = [saved[0].get(op)?, saved[1].get(op)?];
        match (i, &added) {
            (0, _) => scaled_product_into(op, None, None, grad, &b.transpose(-1, -2)?, alpha)?.sum_to(a.shape()),
            (1, _) => scaled_product_into(op, None, None, &a.transpose(-1, -2)?, grad, alpha)?.sum_to(b.shape()),
            (_, Some((shape, beta))) => grad.mul_scalar(*beta)?.sum_to(shape),
            _ => unreachable!("two matrices, and what is added"),
        }
    }))
}

/// Checks that both operands have the number of dims that the operation requires.
fn check_ranks(op: &'static str, a: (&Tensor, usize), b: (&Tensor, usize), hint: &'static str) -> Result<()> {
    mismatch!(op if a.0.rank() != a.1 || b.0.rank() != b.1, a.0, b.0, hint);
    Ok(())
}

const MATRICES: &str = "both are matrices, [m, k] and [k, n]";
const BATCHES: &str = "both are batches of matrices, [b, m, k] and [b, k, n]";
const MATRIX_AND_VECTOR: &str = "a matrix [m, k] and a vector [k]";
const VECTORS: &str = "both are vectors";

/// Checks that both operands are batches of matrices with the same batch size.
fn check_batches(op: &'static str, a: &Tensor, b: &Tensor) -> Result<()> {
    check_ranks(op, (a, 3), (b, 3), BATCHES)?;
    mismatch!(op if a.shape().dims()[0] != b.shape().dims()[0], a, b, BATCHES);
    Ok(())
}

operations! {
    /// Returns the product of two matrices, without broadcasting (PyTorch's `mm`). See [`Tensor::matmul`]. Differentiable. Fails as
    /// [`Tensor::matmul`] does, and with [`Error::ShapeMismatch`] unless both are matrices.
    mm(input: x, mat2: x): LinearAlgebra, Numbers -> Same, differentiable = |op, self, other| {
        check_ranks(op, (self, 2), (other, 2), MATRICES)?;
        self.matmul(other).with_op(op)
    };
    /// Returns the products of two batches of matrices, without broadcasting (PyTorch's `bmm`). See [`Tensor::matmul`]. Differentiable.
    /// Fails as [`Tensor::matmul`] does, and with [`Error::ShapeMismatch`] for shapes other than `[b, m, k]` and `[b, k, n]`.
    bmm(input: x, mat2: x): LinearAlgebra, Numbers -> Same, differentiable = |op, self, other| {
        check_batches(op, self, other)?;
        self.matmul(other).with_op(op)
    };
    /// Returns the product of a matrix and a vector (PyTorch's `mv`). Differentiable. Fails as [`Tensor::matmul`] does, and with
    /// [`Error::ShapeMismatch`] for shapes other than `[m, k]` and `[k]`.
    mv(input: x, vec: x): LinearAlgebra, Numbers -> Same, differentiable = |op, self, vector| {
        check_ranks(op, (self, 2), (vector, 1), MATRIX_AND_VECTOR)?;
        self.matmul(vector).with_op(op)
    };
    /// Returns the dot product of two vectors (PyTorch's `dot`). Differentiable. Fails as [`Tensor::matmul`] does, and with
    /// [`Error::ShapeMismatch`] unless both are vectors of one size.
    dot(input: x, tensor: x): LinearAlgebra, Numbers -> Same, differentiable = |op, self, other| {
        check_ranks(op, (self, 1), (other, 1), VECTORS)?;
        self.matmul(other).with_op(op)
    };
    /// Returns the same result as [`Tensor::dot`], because all dtypes are real (PyTorch's `vdot`). Differentiable.
    vdot(input: x, other: x): LinearAlgebra, Numbers -> Same, differentiable = |op, self, other| {
        self.dot(other).with_op(op)
    };
    /// Returns the outer product of two vectors: `[n]` and `[m]` give `[n, m]` (PyTorch's `outer`). Differentiable. Fails with
    /// [`Error::ShapeMismatch`] unless both are vectors.
    outer(input: x, vec2: x): LinearAlgebra, Numbers -> Same, differentiable = |op, self, other| {
        check_ranks(op, (self, 1), (other, 1), VECTORS)?;
        self.unsqueeze(1)?.mul(other).with_op(op)
    };
    /// Computes `beta * self + alpha * (a b)` of matrices a and b (PyTorch's `addmm`). This tensor is broadcast to the
    /// product's shape, and is not read if beta is 0. One launch. Differentiable.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let (a, b) = (Tensor::ones(&[2, 3], Device::Cpu)?, Tensor::ones(&[3, 2], Device::Cpu)?);
    /// let y = Tensor::ones(&[2], Device::Cpu)?.addmm(&a, &b, 0.5, 2.0)?;
    /// assert_eq!(y.to_vec::<f32>()?, [6.5; 4]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the errors of [`Tensor::mm`], [`Error::ShapeMismatch`] if this tensor does not broadcast to the product's shape, and
    /// [`Error::Invalid`] if the tensors are integers and `alpha` or `beta` is fractional or out of the dtype's range.
    addmm(input: x, mat1: x, mat2: x, beta: scalar = 1, alpha: scalar = 1):
        LinearAlgebra, Numbers -> Same, differentiable = |op, self, a, b, beta, alpha| {
        check_ranks(op, (a, 2), (b, 2), MATRICES)?;
        scaled_product(op, Some((self, beta)), a, b, alpha)
    };
    /// Computes `beta * self + alpha * (a x)` of a matrix a and a vector x (PyTorch's `addmv`); see [`Tensor::addmm`].
    addmv(input: x, mat: x, vec: x, beta: scalar = 1, alpha: scalar = 1):
        LinearAlgebra, Numbers -> Same, differentiable = |op, self, a, x, beta, alpha| {
        check_ranks(op, (a, 2), (x, 1), MATRIX_AND_VECTOR)?;
        let input = self.unsqueeze(-1)?;
        scaled_product(op, Some((&input, beta)), a, &x.unsqueeze(-1)?, alpha)?.squeeze(-1)
    };
    /// Computes `beta * self + alpha * (x ⊗ y)` where `x ⊗ y` is the outer product of two vectors (PyTorch's `addr`); see
    /// [`Tensor::addmm`].
    addr(input: x, vec1: x, vec2: x, beta: scalar = 1, alpha: scalar = 1):
        LinearAlgebra, Numbers -> Same, differentiable = |op, self, x, y, beta, alpha| {
        check_ranks(op, (x, 1), (y, 1), VECTORS)?;
        scaled_product(op, Some((self, beta)), &x.unsqueeze(1)?, &y.unsqueeze(0)?, alpha)
    };
    /// Computes `beta * self + alpha * (a b)` of batches of matrices (PyTorch's `baddbmm`); see [`Tensor::addmm`].
    baddbmm(input: x, batch1: x, batch2: x, beta: scalar = 1, alpha: scalar = 1):
        LinearAlgebra, Numbers -> Same, differentiable = |op, self, a, b, beta, alpha| {
        check_batches(op, a, b)?;
        scaled_product(op, Some((self, beta)), a, b, alpha)
    };
    /// Computes `beta * self + alpha * sum(a b)`, where the products of two batches of matrices are summed over the batch (PyTorch's
    /// `addbmm`); see [`Tensor::addmm`]. The matrix product itself computes the sum.
    addbmm(input: x, batch1: x, batch2: x, beta: scalar = 1, alpha: scalar = 1):
        LinearAlgebra, Numbers -> Same, differentiable = |op, self, a, b, beta, alpha| {
        check_batches(op, a, b)?;
        let ([_, m, k], [batch, _, n]) = (dims(a), dims(b));
        let rows = a.transpose(0, 1)?.reshape([m, batch * k])?;
        mismatch!(op if k != b.shape().dims()[1], a, b, BATCHES);
        scaled_product(op, Some((self, beta)), &rows, &b.reshape([batch * k, n])?, alpha)
    };
    multi_dot(tensors: xs) linalg: LinearAlgebra, Numbers -> Same, differentiable;
    /// Raises a square matrix, or each matrix of a batch, to the power n by repeated squaring (PyTorch's `matrix_power`). The power 0 is
    /// the identity. Differentiable. Fails as [`Tensor::matmul`] does, and with [`Error::Invalid`] unless the matrices are square.
    matrix_power(input: x, n: size) linalg: LinearAlgebra, Numbers -> Same, differentiable = |op, self, n| {
        let rows = match *self.shape().dims() {
            [.., rows, columns] if rows == columns => rows,
            _ => fail!(op, "the matrices must be square, and the shape is {}", self.shape()),
        };
        if n == 0 {
            return Tensor::eye(rows, (self.dtype, self.device()))?.expand(self.shape());
        }
        let (mut power, mut square): (Option<Tensor>, _) = (None, self.shallow_clone());
        for bit in 0..=n.ilog2() {
            if bit > 0 {
                square = square.matmul(&square).with_op(op)?;
            }
            if n >> bit & 1 == 1 {
                power = Some(power.map_or(Ok(square.shallow_clone()), |p| square.matmul(&p).with_op(op))?);
            }
        }
        Ok(power.unwrap_or(square))
    };
    /// Returns the sum of a matrix's diagonal, as i64 for integers (PyTorch's `trace`). Differentiable. Fails with [`Error::Invalid`]
    /// unless this tensor is a matrix.
    trace(input: x): LinearAlgebra, Numbers -> Sum, differentiable = |op, self| {
        invalid!(op if self.rank() != 2, "the input must be a matrix, and has shape {}", self.shape());
        self.diagonal(0, 0, 1)?.sum((), false)
    };
    /// Returns the Kronecker product: each element is replaced by the block `element * other` (PyTorch's `kron`). Dims of size 1 are
    /// prepended to the tensor with fewer dims. Differentiable.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let a = Tensor::from_slice(&[1f32, 2.0], 2, Device::Cpu)?;
    /// let b = Tensor::from_slice(&[1f32, 10.0, 100.0], 3, Device::Cpu)?;
    /// assert_eq!(a.kron(&b)?.to_vec::<f32>()?, [1.0, 10.0, 100.0, 2.0, 20.0, 200.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    kron(input: x, other: x): LinearAlgebra, Numbers -> Same, differentiable = |op, self, other| {
        let rank = self.rank().max(other.rank());
        let sizes = |t: &Tensor| -> Dims {
            std::iter::repeat_n(1, rank - t.rank()).chain(t.shape().dims().iter().copied()).collect()
        };
        let (a, b) = (sizes(self), sizes(other));
        let interleaved = |first: bool, sizes: &Dims| -> Shape {
            sizes.iter().flat_map(|&d| if first { [d, 1] } else { [1, d] }).collect()
        };
        let product = self.reshape(interleaved(true, &a))?.mul(&other.reshape(interleaved(false, &b))?).with_op(op)?;
        product.reshape(a.iter().zip(&b).map(|(x, y)| x * y).collect::<Shape>())
    };
    /// Returns the cross product of vectors with three elements along `dim` (PyTorch's `linalg.cross`). All other dims are broadcast.
    /// Differentiable. Fails with [`Error::ShapeMismatch`] if `dim` does not have size 3 in both tensors, or if other dims do not
    /// broadcast.
    cross(input: x, other: x, dim: int = -1) linalg:
        LinearAlgebra, Numbers -> Same, differentiable = |op, self, other, dim| {
        mismatch!(op if self.rank() != other.rank(), self, other, "both must have the same number of dims");
        let d = self.shape().dim(op, dim)?;
        let is_vector = |t: &Tensor| t.shape().dims()[d] == 3;
        mismatch!(op if !is_vector(self) || !is_vector(other), self, other, "the dim of the product is of size 3");
        let of = |t: &Tensor, i: isize| t.select(dim, i % 3);
        let row = |i: isize| -> Result<Tensor> {
            let parts = [of(self, i + 1)?, of(other, i + 2)?, of(self, i + 2)?, of(other, i + 1)?];
            Tensor::map(&parts.each_ref(), |e| &e[0] * &e[1] - &e[2] * &e[3]).with_op(op)
        };
        Tensor::stack(&[row(0)?, row(1)?, row(2)?], d as isize)
    };
}

impl Tensor {
    /// Multiplies several matrices in the order that takes the fewest multiplications (PyTorch's `linalg.multi_dot`). The first tensor
    /// may be a vector, which is treated as a row, and the last a vector, which is treated as a column. Differentiable.
    ///
    /// # Errors
    /// [`Error::Invalid`] for an empty list; [`Error::ShapeMismatch`] if adjacent sizes differ or a tensor is not a matrix; the errors of
    /// [`Tensor::matmul`].
    #[track_caller]
    pub fn multi_dot<T: std::borrow::Borrow<Tensor>>(tensors: &[T]) -> Result<Tensor> {
        let op = "multi_dot";
        let tensors: Vec<&Tensor> = tensors.iter().map(|t| t.borrow()).collect();
        let (Some(first), Some(last)) = (tensors.first(), tensors.last()) else {
            return Err(Error::invalid(op, "there is no tensor"));
        };
        return_replacement!(op, tensors);
        let ends = [first, last].map(|t| t.rank() == 1);
        for (i, t) in tensors.iter().enumerate() {
            let vector = t.rank() == 1 && (i == 0 || i + 1 == tensors.len()) && tensors.len() > 1;
            mismatch!(op if t.rank() != 2 && !vector,
                first, t, "all must be matrices, except that the first and the last may be vectors");
        }
        for pair in tensors.windows(2) {
            mismatch!(op if pair[0].shape().dims().last() != pair[1].shape().dims().first(),
                pair[0], pair[1], "the columns of each matrix must equal the rows of the next");
        }
        // Matrix i has shape [sizes[i], sizes[i + 1]].
        let mut sizes: Vec<usize> = tensors.iter().map(|t| t.shape().dims()[0]).collect();
        sizes.push(last.shape().dims().last().copied().unwrap_or(1));
        if ends[0] {
            sizes[0] = 1;
        }
        if ends[1] {
            *sizes.last_mut().expect("as many as tensors and one") = 1;
        }
        let order = cheapest_order(&sizes);
        multiply_chain(&tensors, &order, 0, tensors.len() - 1).with_op(op)
    }
}

/// Returns the sizes of a tensor with three dims.
fn dims(t: &Tensor) -> [usize; 3] {
    let d = t.shape().dims();
    [d[0], d[1], d[2]]
}

/// Finds where to split each chain of matrices for the fewest multiplications: entry `[i][j]` is the last matrix of the left part of the
/// chain `i..=j`.
fn cheapest_order(sizes: &[usize]) -> Vec<Vec<usize>> {
    let n = sizes.len() - 1;
    let (mut cost, mut split) = (vec![vec![0f64; n]; n], vec![vec![0; n]; n]);
    for length in 1..n {
        for i in 0..n - length {
            let j = i + length;
            let of =
                |k: usize| cost[i][k] + cost[k + 1][j] + sizes[i] as f64 * sizes[k + 1] as f64 * sizes[j + 1] as f64;
            let best = (i..j).min_by(|&a, &b| of(a).total_cmp(&of(b))).expect("i is below j");
            (cost[i][j], split[i][j]) = (of(best), best);
        }
    }
    split
}

fn multiply_chain(tensors: &[&Tensor], order: &[Vec<usize>], i: usize, j: usize) -> Result<Tensor> {
    if i == j {
        return Ok(tensors[i].shallow_clone());
    }
    let k = order[i][j];
    multiply_chain(tensors, order, i, k)?.matmul(&multiply_chain(tensors, order, k + 1, j)?)
}
