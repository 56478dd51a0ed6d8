//! Reductions: sums, products, maxima and minima with their indices, over any dims.
//!
//! The input is never copied. The plan splits the dims into kept and reduced dims with their strides, and the backend chooses whether
//! adjacent work-items run along a result or across results. Partial sums are blocked, so that a sum of ten million f32 is accurate to
//! about 1e-6. Every reduction gives the same bits on every run on one device. f16 and bf16 accumulate in f32, integers in i64
//! (wrapping).

mod gradient;
pub(crate) mod reductions;
pub(crate) mod scan;
pub(crate) mod statistics;
pub(crate) mod table;

use crate::backend::problem::reduction::Reduction;
use crate::ops::dispatch::prelude::*;
use table::{ReductionRow, rows};

pub(crate) use crate::layout::dims::{Mask, ReduceDims};

/// Returns the shape of a reduction of `shape` over the dims in `mask`.
pub(crate) fn reduced_shape(shape: &Shape, mask: &[bool], keepdim: bool) -> Shape {
    let dims = shape.dims().iter().zip(mask);
    match keepdim {
        true => dims.map(|(&d, &r)| if r { 1 } else { d }).collect(),
        false => dims.filter(|(_, r)| !**r).map(|(&d, _)| d).collect(),
    }
}

/// Computes the reduction of `t`, outside the graph: one launch, or two if few results have many elements each. Writes to `out` if `out`
/// is a contiguous tensor of the right shape and dtype, otherwise to a new tensor.
fn reduce(
    op: &'static str,
    row: &'static ReductionRow,
    t: &Tensor,
    mask: &[bool],
    keepdim: bool,
    dtype: DType,
    out: Option<Tensor>,
) -> Result<Tensor> {
    let shape = reduced_shape(t.shape(), mask, keepdim);
    let n = reduced_count(t.shape(), mask);
    invalid!(op if n == 0 && !row.allows_no_elements(),
        "a reduced dimension is empty in shape {}: there is no element to choose", t.shape());
    let fits = |o: &Tensor| {
        o.shape() == &shape && o.dtype == dtype && o.is_contiguous() && o.device() == t.device() && !o.shares_storage(t)
    };
    let out = match out.filter(fits) {
        Some(out) => out.detach(),
        None => Tensor::empty_with_shape(shape, dtype, t.device())?,
    };
    match row.value_of_no_elements {
        _ if out.numel() == 0 => return Ok(out),
        Some(value) if n == 0 => drop(out.fill_(value)?),
        _ => {
            let (rule, number) = (row.rule(), n as f64);
            backend::launch([&out], |b| b.reduce(&Reduction { op, rule, x: t, mask, out: &out, number }))?;
        }
    }
    Ok(out)
}

/// Returns the number of elements that are reduced to each result.
fn reduced_count(shape: &Shape, mask: &[bool]) -> usize {
    shape.dims().iter().zip(mask).filter(|(_, r)| **r).map(|(&d, _)| d).product()
}

/// Computes the sum over `dims`, outside the graph, into `out` if possible (see [`reduce`]).
pub(crate) fn sum_into(
    op: &'static str,
    t: &Tensor,
    dims: impl Into<ReduceDims>,
    keepdim: bool,
    out: Option<Tensor>,
) -> Result<Tensor> {
    let mask = dims.into().mask(op, t.shape())?;
    reduce(op, &rows::sum, t, &mask, keepdim, rows::sum.output(t.dtype)?, out)
}

/// Computes the sum of all elements, converted to `dtype`. A loss calls this after computing the loss of each row.
pub(crate) fn sum_all(op: &'static str, t: &Tensor, dtype: DType) -> Result<Tensor> {
    reduce(op, &rows::sum, t, &Mask::from_elem(true, t.rank()), false, dtype, None)
}

/// Expands a reduced tensor to the shape before the reduction, as a recorded view with stride 0 along the reduced dims.
fn expand_reduced(t: &Tensor, shape: &Shape, mask: &[bool], keepdim: bool) -> Tensor {
    let mut strides = t.strides().iter().copied();
    let stride = |(_, &reduced): (&usize, &bool)| {
        let own = if keepdim || !reduced { strides.next() } else { None };
        if reduced { 0 } else { own.unwrap_or(0) }
    };
    let strides = shape.dims().iter().zip(mask).map(stride).collect();
    let view = Layout { shape: shape.clone(), strides, offset: t.layout.offset };
    let dims: SmallVec<[isize; 6]> = mask.iter().enumerate().filter(|(_, r)| **r).map(|(d, _)| d as isize).collect();
    // An empty list of dims would mean all dims.
    let same = dims.is_empty();
    let back = move |grad: Tensor| if same { Ok(grad) } else { grad.sum(&dims[..], keepdim) };
    autograd::record_view("expand", view, t, back)
}

impl Tensor {
    /// Sums over the dims along which `shape` was broadcast to this tensor's shape: the gradient of broadcasting. Returns this tensor,
    /// without a launch, if the shapes are equal.
    pub(crate) fn sum_to(&self, shape: &Shape) -> Result<Tensor> {
        if self.shape() == shape {
            return Ok(self.shallow_clone());
        }
        let missing = self.rank().saturating_sub(shape.rank());
        let same = |i: usize| i >= missing && shape.dims()[i - missing] == self.shape().dims()[i];
        let mask: Mask = (0..self.rank()).map(|i| !same(i)).collect();
        let sum = reduce("sum_to", &rows::sum, self, &mask, true, self.dtype, None)?;
        let sum = sum.with_layout(Layout::contiguous(shape.clone()));
        let wide = self.shape().clone();
        Ok(autograd::record_unary_differentiable("sum_to", sum, self, move |grad| grad.broadcast_to(&wide)))
    }
}
