//! Reductions: sums, products, extremes and their positions, over any dims.
//!
//! A reduction never copies its input first: `plan` splits the dims into kept and reduced ones with whatever strides they
//! have, and `cpu` and `opencl` choose from that whether neighbouring work goes along a result or across results. Partial
//! sums are blocked, so a sum of ten million f32 is good to about 1e-6, and every reduction gives the same bits each time on
//! one device. f16 and bf16 accumulate in f32, integers in i64 (wrapping).

use smallvec::SmallVec;

use super::autocast::widened;
use super::elementwise::{Params, apply, apply_tracked};
use super::expr::Expr;
use crate::autograd::{self, Saved};
use crate::tensor::{Dims, Layout};
use crate::{Compute, DType, Device, Error, Result, Scalar, Shape, Tensor};

mod cpu;
pub(in crate::ops) mod opencl;
mod plan;
mod statistics;

use plan::Plan;

/// Which dimensions to reduce: `()` for all, an integer, an array or a slice; negative ones count from the end.
/// An empty array reduces nothing.
///
/// ```
/// use claystone::{Device, Tensor};
/// let t = Tensor::ones(&[2, 3, 4], Device::Cpu)?;
/// assert_eq!(t.sum((), false)?.item::<f32>()?, 24.0);
/// assert_eq!(t.sum(-1, false)?.shape().dims(), [2, 3]);
/// assert_eq!(t.sum([0, 2], true)?.shape().dims(), [1, 3, 1]);
/// # Ok::<(), claystone::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReduceDims(Option<Dims<isize>>);

impl From<()> for ReduceDims {
    fn from(_: ()) -> ReduceDims {
        ReduceDims(None)
    }
}

impl From<isize> for ReduceDims {
    fn from(dim: isize) -> ReduceDims {
        ReduceDims::from([dim])
    }
}

impl From<&[isize]> for ReduceDims {
    fn from(dims: &[isize]) -> ReduceDims {
        ReduceDims(Some(Dims::from_slice(dims)))
    }
}

impl<const N: usize> From<[isize; N]> for ReduceDims {
    fn from(dims: [isize; N]) -> ReduceDims {
        ReduceDims::from(&dims[..])
    }
}

impl<const N: usize> From<&[isize; N]> for ReduceDims {
    fn from(dims: &[isize; N]) -> ReduceDims {
        ReduceDims::from(&dims[..])
    }
}

impl ReduceDims {
    /// The dims; None for all.
    pub(crate) fn given(&self) -> Option<&[isize]> {
        self.0.as_deref()
    }

    /// For each dim of `shape`, whether it is reduced.
    pub(crate) fn mask(&self, op: &'static str, shape: &Shape) -> Result<Mask> {
        let Some(dims) = &self.0 else { return Ok(SmallVec::from_elem(true, shape.rank())) };
        let mut mask: Mask = SmallVec::from_elem(false, shape.rank());
        for &dim in dims {
            // PyTorch lets the only element of a scalar be reduced over one dim.
            if shape.rank() == 0 && matches!(dim, -1 | 0) {
                continue;
            }
            let d = shape.dim(op, dim)?;
            if std::mem::replace(&mut mask[d], true) {
                return Err(Error::invalid(op, format!("dimension {dim} is given twice in {dims:?}")));
            }
        }
        Ok(mask)
    }
}

type Mask = SmallVec<[bool; 6]>;

/// What elements are combined into.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Reduction {
    Sum,
    Mean,
    Prod,
    Max,
    Min,
    /// Of elements that are not zero, as are Any and All.
    Count,
    Any,
    All,
    ArgMax,
    ArgMin,
}

impl Reduction {
    fn is_arg(self) -> bool {
        matches!(self, Reduction::ArgMax | Reduction::ArgMin)
    }

    /// Whether elements count as 0 or 1.
    fn nonzero(self) -> bool {
        matches!(self, Reduction::Count | Reduction::Any | Reduction::All)
    }

    /// 0 adds, 1 multiplies, 2 takes the greater, 3 the lesser.
    fn combination(self) -> u8 {
        match self {
            Reduction::Sum | Reduction::Mean | Reduction::Count => 0,
            Reduction::Prod => 1,
            Reduction::Max | Reduction::Any | Reduction::ArgMax => 2,
            Reduction::Min | Reduction::All | Reduction::ArgMin => 3,
        }
    }

    /// What reduces its partial results.
    fn second(self) -> Reduction {
        match self {
            Reduction::Count => Reduction::Sum,
            Reduction::Any => Reduction::Max,
            Reduction::All => Reduction::Min,
            same => same,
        }
    }

    fn accumulator(self, dtype: DType) -> Compute {
        if self.nonzero() { Compute::I64 } else { dtype.compute() }
    }

    /// PyTorch's dtypes: integers sum to i64, extremes keep theirs.
    fn output(self, op: &'static str, dtype: DType) -> Result<DType> {
        match self {
            Reduction::Sum | Reduction::Prod if !dtype.is_float() => Ok(DType::I64),
            Reduction::Mean if !dtype.is_float() => {
                Err(Error::UnsupportedDType { op, dtype, expected: "floats: convert with .to_dtype() or take the sum" })
            }
            Reduction::Sum | Reduction::Prod | Reduction::Mean | Reduction::Max | Reduction::Min => Ok(dtype),
            Reduction::Any | Reduction::All => Ok(DType::Bool),
            Reduction::Count | Reduction::ArgMax | Reduction::ArgMin => Ok(DType::I64),
        }
    }

    /// The result over no elements.
    fn of_nothing(self, op: &'static str, shape: &Shape) -> Result<Scalar> {
        match self {
            Reduction::Sum | Reduction::Count | Reduction::Any => Ok(Scalar::Int(0)),
            Reduction::Prod | Reduction::All => Ok(Scalar::Int(1)),
            Reduction::Mean => Ok(Scalar::Float(f64::NAN)),
            _ => {
                let reason = format!("a dimension reduced is empty in shape {shape}: there is no element to choose");
                Err(Error::invalid(op, reason))
            }
        }
    }
}

/// The shape left of `shape`.
fn reduced_shape(shape: &Shape, mask: &[bool], keepdim: bool) -> Shape {
    let dims = shape.dims().iter().zip(mask);
    match keepdim {
        true => dims.map(|(&d, &r)| if r { 1 } else { d }).collect(),
        false => dims.filter(|(_, r)| !**r).map(|(&d, _)| d).collect(),
    }
}

/// The reduction of `t`, outside the graph: one launch, two where few results have many elements. Written into `out` where
/// that is a contiguous tensor of the right shape and dtype, else into a new one.
fn reduce(
    op: &'static str,
    kind: Reduction,
    t: &Tensor,
    mask: &[bool],
    keepdim: bool,
    dtype: DType,
    out: Option<Tensor>,
) -> Result<Tensor> {
    let shape = reduced_shape(t.shape(), mask, keepdim);
    let n: usize = t.shape().dims().iter().zip(mask).filter(|(_, r)| **r).map(|(&d, _)| d).product();
    let of_nothing = if n == 0 { Some(kind.of_nothing(op, t.shape())?) } else { None };
    let fits = |o: &Tensor| {
        o.shape() == &shape && o.dtype == dtype && o.is_contiguous() && o.device() == t.device() && !o.shares_storage(t)
    };
    let out = match out.filter(fits) {
        Some(out) => out.detach(),
        None => Tensor::empty_like_shape(shape, dtype, t.device())?,
    };
    match of_nothing {
        _ if out.numel() == 0 => return Ok(out),
        Some(value) => drop(out.fill_(value)?),
        None => {
            let plan = Plan::new(&t.layout, mask, kind.is_arg());
            match t.device() {
                Device::Cpu => cpu::run(kind, t, &plan, &out)?,
                Device::OpenCL(_) => opencl::run(kind, t, &plan, &out)?,
            }
            out.storage.bump_version();
        }
    }
    Ok(out)
}

/// The sum over `dims`, outside the graph; into `out` where it fits (see [`reduce`]).
pub(crate) fn sum_into(
    op: &'static str,
    t: &Tensor,
    dims: impl Into<ReduceDims>,
    keepdim: bool,
    out: Option<Tensor>,
) -> Result<Tensor> {
    let mask = dims.into().mask(op, t.shape())?;
    reduce(op, Reduction::Sum, t, &mask, keepdim, Reduction::Sum.output(op, t.dtype)?, out)
}

/// The sum of everything, converted to `dtype`: the second half of a loss.
pub(super) fn sum_all(op: &'static str, t: &Tensor, dtype: DType) -> Result<Tensor> {
    reduce(op, Reduction::Sum, t, &Mask::from_elem(true, t.rank()), false, dtype, None)
}

/// `t`, a reduced tensor, as a view of the shape before: its elements repeated along the reduced dims. Recorded.
fn spread(t: &Tensor, shape: &Shape, mask: &[bool], keepdim: bool) -> Tensor {
    let mut strides = t.strides().iter().copied();
    let stride = |(_, &reduced): (&usize, &bool)| {
        let own = if keepdim || !reduced { strides.next() } else { None };
        if reduced { 0 } else { own.unwrap_or(0) }
    };
    let strides = shape.dims().iter().zip(mask).map(stride).collect();
    let view = t.with_layout(Layout { shape: shape.clone(), strides, offset: t.layout.offset });
    let dims: SmallVec<[isize; 6]> = mask.iter().enumerate().filter(|(_, r)| **r).map(|(d, _)| d as isize).collect();
    // No dims at all would mean all of them.
    let same = dims.is_empty();
    let back = move |grad: Tensor| if same { Ok(grad) } else { grad.sum(&dims[..], keepdim) };
    autograd::record_unary_twice("expand", view, t, back)
}

/// `t * factor`, in the dtype of `t`.
pub(super) fn scaled(op: &'static str, t: &Tensor, factor: f64) -> Result<Tensor> {
    let params = Params { scalars: &[Scalar::Float(factor)], seeds: &[] };
    let product = Expr::input(0) * Expr::scalar(0);
    apply_tracked(op, &[t], params, &product, t.dtype, &|i| product.diff(i))
}

impl Tensor {
    fn reduced(
        &self,
        op: &'static str,
        kind: Reduction,
        dims: ReduceDims,
        keepdim: bool,
        backward: impl FnOnce(&Tensor, Mask) -> Backward,
    ) -> Result<Tensor> {
        let mask = dims.mask(op, self.shape())?;
        let out = reduce(op, kind, self, &mask, keepdim, kind.output(op, self.dtype)?, None)?;
        if !autograd::is_tracked(&[self]) || !out.dtype.is_float() {
            return Ok(out);
        }
        let backward = backward(&out, mask);
        let rule = move |ctx: &mut autograd::Context| Ok(SmallVec::from_iter([Some(backward(ctx)?)]));
        Ok(match kind {
            Reduction::Sum | Reduction::Mean => autograd::record_twice(op, out, &[self], rule),
            _ => autograd::record(op, out, &[self], rule),
        })
    }

    /// The sum over `dims` (PyTorch's `sum`). Floats keep their dtype, integers and bool give i64; nothing sums to 0.
    /// `keepdim` leaves the reduced dims in place with size 1. Differentiable.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let t = Tensor::from_slice(&[1f32, 2.0, 3.0, 4.0], [2, 2], Device::Cpu)?;
    /// assert_eq!(t.sum(0, false)?.to_vec::<f32>()?, [4.0, 6.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::DimOutOfRange`]; [`Error::Invalid`] for a dim given twice; [`Error::OutOfMemory`].
    pub fn sum(&self, dims: impl Into<ReduceDims>, keepdim: bool) -> Result<Tensor> {
        if let Some(wide) = widened(&[self])? {
            return wide[0].sum(dims, keepdim);
        }
        let shape = self.shape().clone();
        self.reduced("sum", Reduction::Sum, dims.into(), keepdim, |_, mask| {
            Box::new(move |ctx| Ok(spread(&ctx.grad()?, &shape, &mask, keepdim)))
        })
    }

    /// The mean over `dims` (PyTorch's `mean`); NaN of nothing. Differentiable.
    ///
    /// # Errors
    /// As [`Tensor::sum`]; [`Error::UnsupportedDType`] for integers and bool.
    pub fn mean(&self, dims: impl Into<ReduceDims>, keepdim: bool) -> Result<Tensor> {
        let (shape, dtype, device) = (self.shape().clone(), self.dtype, self.device());
        self.reduced("mean", Reduction::Mean, dims.into(), keepdim, |out, mask| {
            let factor = out.numel() as f64 / shape.numel() as f64;
            Box::new(move |ctx| {
                let grad = match ctx.grad_unless_one() {
                    Some(grad) => scaled("mean", &grad, factor)?,
                    None => Tensor::full(reduced_shape(&shape, &mask, keepdim), factor, (dtype, device))?,
                };
                Ok(spread(&grad, &shape, &mask, keepdim))
            })
        })
    }

    /// The product over `dims` (PyTorch's `prod`); of nothing it is 1. Dtypes as [`Tensor::sum`]. Differentiable, where
    /// elements are zero too.
    ///
    /// # Errors
    /// As [`Tensor::sum`].
    pub fn prod(&self, dims: impl Into<ReduceDims>, keepdim: bool) -> Result<Tensor> {
        let op = "prod";
        if let Some(wide) = widened(&[self])? {
            return wide[0].prod(dims, keepdim);
        }
        let (saved, dtype) = (Saved::new(self), self.dtype);
        self.reduced(op, Reduction::Prod, dims.into(), keepdim, |_, mask| {
            Box::new(move |ctx| {
                let x = saved.unpack(op)?;
                // d/dx = the product of the others: zeros are counted and left out of the product.
                let (x0, one) = (Expr::input(0), Expr::constant(1.0));
                let is_zero = x0.eq(0.0);
                let made =
                    apply(op, &[&x], Params::default(), &[is_zero.select(&one, &x0), is_zero], &[dtype, DType::Bool])?;
                let product = reduce(op, Reduction::Prod, &made[0], &mask, true, dtype, None)?;
                let zeros = reduce(op, Reduction::Sum, &made[1], &mask, true, DType::I64, None)?;
                let grad = spread(&ctx.grad()?, x.shape(), &mask, keepdim);
                let is_zero = x0.eq(0.0);
                let others = Expr::input(1) / is_zero.select(&one, &x0);
                let others = Expr::input(2).eq(is_zero).select(others, 0.0);
                let inputs = [&x, &product, &zeros, &grad];
                Ok(apply(op, &inputs, Params::default(), &[others * Expr::input(3)], &[dtype])?.remove(0))
            })
        })
    }

    /// The greatest element over `dims` (PyTorch's `amax`); NaN if there is one. Keeps the dtype. Differentiable: elements
    /// that tie share the gradient evenly.
    ///
    /// # Errors
    /// As [`Tensor::sum`]; [`Error::Invalid`] where a reduced dim is empty.
    pub fn max(&self, dims: impl Into<ReduceDims>, keepdim: bool) -> Result<Tensor> {
        self.extreme("max", Reduction::Max, dims.into(), keepdim)
    }

    /// The least element over `dims` (PyTorch's `amin`); as [`Tensor::max`] otherwise.
    ///
    /// # Errors
    /// As [`Tensor::max`].
    pub fn min(&self, dims: impl Into<ReduceDims>, keepdim: bool) -> Result<Tensor> {
        self.extreme("min", Reduction::Min, dims.into(), keepdim)
    }

    fn extreme(&self, op: &'static str, kind: Reduction, dims: ReduceDims, keepdim: bool) -> Result<Tensor> {
        let (saved, dtype) = (Saved::new(self), self.dtype);
        self.reduced(op, kind, dims, keepdim, |out, mask| {
            let result = Saved::new(out);
            Box::new(move |ctx| {
                let (x, result) = (saved.unpack(op)?, result.unpack(op)?);
                let result = spread(&result, x.shape(), &mask, keepdim);
                let chosen = [Expr::input(0).eq(Expr::input(1))];
                let chosen = apply(op, &[&x, &result], Params::default(), &chosen, &[DType::Bool])?.remove(0);
                let ties = reduce(op, Reduction::Sum, &chosen, &mask, true, DType::I64, None)?;
                let grad = spread(&ctx.grad()?, x.shape(), &mask, keepdim);
                let share = Expr::input(0) * Expr::input(1) / Expr::input(2);
                Ok(apply(op, &[&grad, &chosen, &ties], Params::default(), &[share], &[dtype])?.remove(0))
            })
        })
    }

    /// Whether any element over `dims` is not zero (NaN is not), as bool (PyTorch's `any`); false of nothing.
    ///
    /// # Errors
    /// As [`Tensor::sum`].
    pub fn any(&self, dims: impl Into<ReduceDims>, keepdim: bool) -> Result<Tensor> {
        self.untracked("any", Reduction::Any, dims.into(), keepdim)
    }

    /// Whether every element over `dims` is not zero, as bool (PyTorch's `all`); true of nothing.
    ///
    /// # Errors
    /// As [`Tensor::sum`].
    pub fn all(&self, dims: impl Into<ReduceDims>, keepdim: bool) -> Result<Tensor> {
        self.untracked("all", Reduction::All, dims.into(), keepdim)
    }

    /// How many elements over `dims` are not zero, as i64 (PyTorch's `count_nonzero`).
    ///
    /// # Errors
    /// As [`Tensor::sum`].
    pub fn count_nonzero(&self, dims: impl Into<ReduceDims>, keepdim: bool) -> Result<Tensor> {
        self.untracked("count_nonzero", Reduction::Count, dims.into(), keepdim)
    }

    /// Where the greatest element over `dims` is, as i64: its index along one dim, its row-major position among several
    /// (PyTorch's `argmax`). The first among equals; the first NaN if there is one.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let t = Tensor::from_slice(&[1f32, 5.0, 2.0, 7.0, 0.0, 7.0], [2, 3], Device::Cpu)?;
    /// assert_eq!(t.argmax(1, false)?.to_vec::<i64>()?, [1, 0]);
    /// assert_eq!(t.argmax((), false)?.item::<i64>()?, 3);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Tensor::max`].
    pub fn argmax(&self, dims: impl Into<ReduceDims>, keepdim: bool) -> Result<Tensor> {
        self.untracked("argmax", Reduction::ArgMax, dims.into(), keepdim)
    }

    /// Where the least element over `dims` is; as [`Tensor::argmax`] otherwise.
    ///
    /// # Errors
    /// As [`Tensor::max`].
    pub fn argmin(&self, dims: impl Into<ReduceDims>, keepdim: bool) -> Result<Tensor> {
        self.untracked("argmin", Reduction::ArgMin, dims.into(), keepdim)
    }

    fn untracked(&self, op: &'static str, kind: Reduction, dims: ReduceDims, keepdim: bool) -> Result<Tensor> {
        let mask = dims.mask(op, self.shape())?;
        reduce(op, kind, self, &mask, keepdim, kind.output(op, self.dtype)?, None)
    }

    /// The sum over the dims along which `shape` was broadcast to this tensor's shape: the gradient of broadcasting.
    /// Launches nothing where the shapes are equal.
    pub(crate) fn sum_to(&self, shape: &Shape) -> Result<Tensor> {
        if self.shape() == shape {
            return Ok(self.shallow_clone());
        }
        let missing = self.rank().saturating_sub(shape.rank());
        let same = |i: usize| i >= missing && shape.dims()[i - missing] == self.shape().dims()[i];
        let mask: Mask = (0..self.rank()).map(|i| !same(i)).collect();
        let sum = reduce("sum_to", Reduction::Sum, self, &mask, true, self.dtype, None)?;
        let sum = sum.with_layout(Layout::contiguous(shape.clone()));
        let wide = self.shape().clone();
        Ok(autograd::record_unary_twice("sum_to", sum, self, move |grad| grad.broadcast_to(&wide)))
    }
}

type Backward = Box<dyn Fn(&mut autograd::Context) -> Result<Tensor> + Send + Sync>;
