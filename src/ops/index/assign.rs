//! Assignment to a part of a tensor: in place, and as differentiable copies.

use crate::autograd::{is_tracked, record_twice};
use crate::ops::dispatch::prelude::*;
use crate::tensor::index::{Index, Indices, indexed};
use crate::tensor::{Layout, Shape};
use crate::{Result, Scalar, Tensor};

/// What [`Tensor::slice_assign_`] assigns: a tensor or a number.
#[derive(Clone, Copy)]
#[non_exhaustive]
pub enum Assigned<'a> {
    /// Broadcast and converted.
    Tensor(&'a Tensor),
    /// The same for all.
    Number(Scalar),
}

impl<'a> From<&'a Tensor> for Assigned<'a> {
    fn from(t: &'a Tensor) -> Assigned<'a> {
        Assigned::Tensor(t)
    }
}

impl<T: Into<Scalar>> From<T> for Assigned<'_> {
    fn from(number: T) -> Self {
        Assigned::Number(number.into())
    }
}

impl Tensor {
    /// Assigns to the elements that [`Tensor::i`] with the same indices shows, as Python's `x[...] = value`: a tensor,
    /// broadcast and converted, or a number. In place.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let a = Tensor::zeros([2, 3], Device::Cpu)?;
    /// a.slice_assign_((.., 1..), 5.0)?.slice_assign_(1, &Tensor::arange(0, 3, 1, Device::Cpu)?)?;
    /// assert_eq!(a.to_vec::<f32>()?, [0.0, 5.0, 5.0, 0.0, 1.0, 2.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Tensor::i`] and [`Tensor::copy_`].
    pub fn slice_assign_<'a>(&self, indices: impl Indices, value: impl Into<Assigned<'a>>) -> Result<&Tensor> {
        let part = self.i(indices)?;
        match value.into() {
            Assigned::Tensor(t) => part.copy_(t).map(|_| ()),
            Assigned::Number(x) => part.fill_(x).map(|_| ()),
        }
        .named("slice_assign_")?;
        Ok(self)
    }

    /// A copy of this tensor in which `src`, broadcast, is at the elements that [`Tensor::i`] with the same indices shows.
    /// Differentiable in both.
    ///
    /// # Errors
    /// As [`Tensor::i`]; [`Error::ShapeMismatch`], [`Error::DeviceMismatch`].
    #[track_caller]
    pub fn slice_assign(&self, indices: impl Indices, src: &Tensor) -> Result<Tensor> {
        let (op, items) = ("slice_assign", indices.indices());
        let at: Option<Vec<isize>> = items.iter().map(|i| if let Index::At(i) = i { Some(*i) } else { None }).collect();
        if let Some(at) = at {
            replaced!(op, [self, src], &at[..]); // other indices have no name
        }
        self.assigned_copy(op, src, true, move |l| indexed(op, l, &items))
    }

    /// A copy of this tensor with `src` where [`Tensor::slice`] with the same arguments looks (PyTorch's `slice_scatter`).
    /// Differentiable in both.
    ///
    /// # Errors
    /// As [`Tensor::slice`]; [`Error::ShapeMismatch`], [`Error::DeviceMismatch`].
    #[track_caller]
    pub fn slice_scatter(
        &self,
        src: &Tensor,
        dim: isize,
        start: impl Into<Option<isize>>,
        end: impl Into<Option<isize>>,
        step: isize,
    ) -> Result<Tensor> {
        let op = "slice_scatter";
        let (d, ends) = (self.shape().dim(op, dim)?, (start.into(), end.into()));
        replaced!(op, [self, src], dim, ends.0, ends.1, step);
        self.assigned_copy(op, src, false, move |l| l.slice(op, d, ends, step))
    }

    /// A copy of this tensor with `src` at index `index` of dimension `dim` (PyTorch's `select_scatter`). Differentiable in
    /// both.
    ///
    /// # Errors
    /// As [`Tensor::select`]; [`Error::ShapeMismatch`], [`Error::DeviceMismatch`].
    #[track_caller]
    pub fn select_scatter(&self, src: &Tensor, dim: isize, index: isize) -> Result<Tensor> {
        replaced!(op = "select_scatter", [self, src], dim, index);
        let d = self.shape().dim(op, dim)?;
        self.assigned_copy(op, src, false, move |l| l.select(op, d, index))
    }

    /// A copy of this tensor with `src` on the diagonal that [`Tensor::diagonal`] with the same arguments shows (PyTorch's
    /// `diagonal_scatter`). Differentiable in both.
    ///
    /// # Errors
    /// As [`Tensor::diagonal`]; [`Error::ShapeMismatch`], [`Error::DeviceMismatch`].
    #[track_caller]
    pub fn diagonal_scatter(&self, src: &Tensor, offset: isize, dim1: isize, dim2: isize) -> Result<Tensor> {
        replaced!(op = "diagonal_scatter", [self, src], offset, dim1, dim2);
        let (a, b) = (self.shape().dim(op, dim1)?, self.shape().dim(op, dim2)?);
        invalid!(op if a == b, "a diagonal needs two dimensions, and {dim1} and {dim2} are one");
        self.assigned_copy(op, src, false, move |l| Ok(l.diagonal(offset, a, b)))
    }

    /// A copy with `src` where `pick` says.
    pub(crate) fn assigned_copy(
        &self,
        op: &'static str,
        src: &Tensor,
        broadcast: bool,
        pick: impl Fn(&Layout) -> Result<Layout> + Clone + Send + Sync + 'static,
    ) -> Result<Tensor> {
        let part = pick(&self.layout)?.shape;
        same_device(op, &[self, src])?;
        if !broadcast && *src.shape() != part {
            let hint = "the source has the shape of the part that it replaces";
            return Err(Error::ShapeMismatch { op, lhs: part, rhs: src.shape().clone(), hint });
        }
        let out = self.cast(self.dtype)?;
        out.with_layout(pick(&out.layout)?).copy_(&src.detach()).named(op)?;
        if !is_tracked(&[self, src]) || !self.dtype.is_float() {
            return Ok(out);
        }
        let (shape, dtype): (Shape, _) = (src.shape().clone(), src.dtype);
        Ok(record_twice(op, out, &[self, src], move |ctx| {
            let grad = ctx.grad()?;
            let rest = ctx.needs(0).then(|| grad.assigned_copy(op, &Tensor::zeros((), &grad)?, true, pick.clone()));
            let part = ctx.needs(1).then(|| grad.picked(op, pick.clone())?.to_dtype(dtype)?.sum_to(&shape));
            Ok([rest.transpose()?, part.transpose()?].into_iter().collect())
        }))
    }
}
