//! Assignment to a part of a tensor, in place or as a differentiable copy.

use crate::layout::shape::impl_from;
use crate::ops::dispatch::prelude::*;
use crate::tensor::index::{Index, Indices, index_layout};

/// The value that [`Tensor::slice_assign_`] assigns: a tensor or a number.
#[derive(Clone, Copy)]
#[non_exhaustive]
pub enum Assigned<'a> {
    /// A tensor, which is broadcast and converted to the dtype of the target.
    Tensor(&'a Tensor),
    /// One number for all elements.
    Number(Scalar),
}

impl_from! { Assigned<'a>:
    ['a] &'a Tensor, t => Assigned::Tensor(t);
    ['a, T: Into<Scalar>] T, number => Assigned::Number(number.into());
}

/// Reads argument `i`, a list of integers, as indices: one for each dim.
pub(crate) fn read_indices(a: &Args, i: usize) -> Result<Vec<Index>> {
    Ok(a.ints(i)?.into_iter().map(Index::At).collect())
}

operations! {
    slice_assign(input: x, src: x, indices: ints) "Tensor.__setitem__": Indexing, All -> Same, differentiable
        => |a| a.tensor(0)?.slice_assign(&read_indices(a, 0)?[..], a.tensor(1)?);
    slice_assign_(input: x, src: x, indices: ints) "Tensor.__setitem__": InPlace, All -> Same
        => |a| a.tensor(0)?.slice_assign_(&read_indices(a, 0)?[..], a.tensor(1)?).map(Tensor::shallow_clone);
    /// Returns a copy of this tensor in which `src` replaces the part that [`Tensor::slice`] returns for the same arguments (PyTorch's
    /// `slice_scatter`). Differentiable with respect to both tensors. Fails as [`Tensor::slice`] does.
    slice_scatter(input: x, src: x, dim: int = 0, start: int?, end: int?, step: int = 1):
        Indexing, All -> Same, differentiable = manual |op, self, src, dim, start, end, step| {
        let d = self.shape().dim(op, dim)?;
        return_replacement!(op, [self, src], dim, start, end, step);
        self.assigned_copy(op, src, false, move |l| l.slice(op, d, (start, end), step))
    };
    /// Returns a copy of this tensor in which `src` replaces the slice at `index` of dim `dim` (PyTorch's `select_scatter`).
    /// Differentiable with respect to both tensors.
    select_scatter(input: x, src: x, dim: int, index: int):
        Indexing, All -> Same, differentiable = |op, self, src, dim, index| {
        let d = self.shape().dim(op, dim)?;
        self.assigned_copy(op, src, false, move |l| l.select(op, d, index))
    };
    /// Returns a copy of this tensor in which `src` replaces the diagonal that [`Tensor::diagonal`] returns for the same arguments
    /// (PyTorch's `diagonal_scatter`). Differentiable with respect to both tensors.
    diagonal_scatter(input: x, src: x, offset: int = 0, dim1: int = 0, dim2: int = 1):
        Indexing, All -> Same, differentiable = |op, self, src, offset, dim1, dim2| {
        let (a, b) = (self.shape().dim(op, dim1)?, self.shape().dim(op, dim2)?);
        invalid!(op if a == b, "a diagonal needs two dimensions, and {dim1} and {dim2} are the same");
        self.assigned_copy(op, src, false, move |l| Ok(l.diagonal(offset, a, b)))
    };
}

impl Tensor {
    /// Assigns a number, or a tensor that is broadcast and converted, to the elements that [`Tensor::i`] returns for the same indices, in
    /// place, as in Python's `x[...] = value`. Fails as [`Tensor::i`] and [`Tensor::copy_`] do.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let a = Tensor::zeros([2, 3], Device::Cpu)?;
    /// a.slice_assign_((.., 1..), 5.0)?.slice_assign_(1, &Tensor::arange(0, 3, 1, Device::Cpu)?)?;
    /// assert_eq!(a.to_vec::<f32>()?, [0.0, 5.0, 5.0, 0.0, 1.0, 2.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    pub fn slice_assign_<'a>(&self, indices: impl Indices, value: impl Into<Assigned<'a>>) -> Result<&Tensor> {
        let part = self.i(indices)?;
        match value.into() {
            Assigned::Tensor(t) => part.copy_(t).map(|_| ()),
            Assigned::Number(x) => part.fill_(x).map(|_| ()),
        }
        .with_op("slice_assign_")?;
        Ok(self)
    }

    /// Returns a copy of this tensor in which `src`, broadcast, replaces the elements that [`Tensor::i`] returns for the same indices.
    /// Differentiable with respect to both tensors. Fails as [`Tensor::i`] does.
    #[track_caller]
    pub fn slice_assign(&self, indices: impl Indices, src: &Tensor) -> Result<Tensor> {
        let (op, items) = ("slice_assign", indices.indices());
        let at: Option<Vec<isize>> = items.iter().map(|i| if let Index::At(i) = i { Some(*i) } else { None }).collect();
        if let Some(at) = at {
            return_replacement!(op, [self, src], &at[..]); // other kinds of indices cannot be arguments of a call by name
        }
        self.assigned_copy(op, src, true, move |l| index_layout(op, l, &items))
    }

    /// Returns a copy of the tensor in which `src` replaces the elements of the view that `pick` selects.
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
        out.with_layout(pick(&out.layout)?).copy_(&src.detach()).with_op(op)?;
        if !autograd::is_tracked(&[self, src]) || !self.dtype.is_float() {
            return Ok(out);
        }
        let (shape, dtype): (Shape, _) = (src.shape().clone(), src.dtype);
        Ok(autograd::record_differentiable(op, out, &[self, src], move |ctx| {
            let grad = ctx.grad()?;
            let rest =
                ctx.needs_gradient(0).then(|| grad.assigned_copy(op, &Tensor::zeros((), &grad)?, true, pick.clone()));
            let part =
                ctx.needs_gradient(1).then(|| grad.select_view(op, pick.clone())?.to_dtype(dtype)?.sum_to(&shape));
            Ok([rest.transpose()?, part.transpose()?].into_iter().collect())
        }))
    }
}
