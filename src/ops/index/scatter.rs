//! Writing through one index tensor. In `scatter` and similar methods, each index selects an element; in `index_add` and similar methods,
//! each index of a vector selects a slice.

use crate::backend::problem::index::{Combine, Indexed, Scatter};
use crate::ops::dispatch::prelude::*;
use crate::ops::index::gather::{broadcast_index, with_dim_size, without_stride};

impl Indexed<'_> {
    /// Writes `x` to `target` through the index. `layout` is the layout of `target` with stride 0 along the indexed dim `d`.
    pub(crate) fn write(&self, combine: Combine, target: &Tensor, layout: &Layout, d: usize) -> Result<()> {
        if self.x_layout.numel() == 0 {
            return Ok(());
        }
        let op = self.op;
        invalid!(op if target.layout.may_alias_itself(),
            "elements of the target share memory (an expanded view): write to a clone()");
        if self.size == 0 {
            return Err(self.empty_dim_error()?);
        }
        backend::launch([target], |b| b.scatter(&Scatter { moved: self, combine, target, layout, d }))
    }
}

/// Returns `t`, or a copy if `t` shares storage with `target`, because the CPU cannot lock one storage for both reading and writing.
pub(crate) fn copy_if_shared(t: &Tensor, target: &Tensor) -> Result<Tensor> {
    if t.shares_storage(target) { t.cast(t.dtype) } else { Ok(t.detach()) }
}

/// Writes `source`, which has the shape of the index, to `target` along dim `d`. With `wraps`, negative indices count from the end. Halves
/// are added and multiplied in f32, and rounded once.
pub(crate) fn scatter(
    op: &'static str,
    combine: Combine,
    target: &Tensor,
    d: usize,
    (index, wraps): (&Tensor, bool),
    source: &Tensor,
) -> Result<()> {
    if combine.needs_f32(target.dtype) {
        let wide = target.cast(DType::F32)?;
        scatter(op, combine, &wide, d, (index, wraps), &source.cast(DType::F32)?)?;
        target.detach().copy_(&wide)?;
        return Ok(());
    }
    let (index, x) = (copy_if_shared(index, target)?, copy_if_shared(source, target)?);
    let (layout, step) = without_stride(target, d, x.shape());
    let (x_layout, index_layout, size) = (x.layout.clone(), index.layout.clone(), target.shape().dims()[d]);
    let indexed = Indexed { op, x: &x, x_layout, index: &index, index_layout, size, step, wraps };
    indexed.write(combine, target, &layout, d)
}

/// Multiplies the source by `alpha`, in the source's dtype.
fn scale_source(op: &'static str, source: &Tensor, alpha: Scalar) -> Result<Tensor> {
    alpha.check_factor(op, source.dtype)?;
    match alpha {
        Scalar::Float(x) if !source.dtype.is_float() => source.mul_scalar(x as i64),
        alpha => source.mul_scalar(alpha),
    }
}

/// Returns a tensor of shape `shape` with `value` in every element, as a view with stride 0.
pub(crate) fn expand_number(op: &'static str, value: Scalar, shape: &Shape, like: &Tensor) -> Result<Tensor> {
    let one = Tensor::full((), value, (like.dtype, like.device())).with_op(op)?;
    Ok(one.with_layout(one.layout.broadcast_to(shape)))
}

operations! {
    scatter / scatter_ (input: x, dim: int, index: x, src: x): Indexing, All -> Same, differentiable;
    scatter_add / scatter_add_ (input: x, dim: int, index: x, src: x): Indexing, Numbers -> Same, differentiable;
    scatter_value / scatter_value_ (input: x, dim: int, index: x, value: scalar) "scatter":
        Indexing, All -> Same, differentiable;
    index_add / index_add_ (input: x, dim: int, index: x, source: x): Indexing, Numbers -> Same, differentiable;
    index_add_alpha / index_add_alpha_ (input: x, dim: int, index: x, source: x, alpha: scalar = 1) "index_add":
        Indexing, Numbers -> Same, differentiable;
    index_copy / index_copy_ (input: x, dim: int, index: x, source: x): Indexing, All -> Same, differentiable;
    index_fill / index_fill_ (input: x, dim: int, index: x, value: scalar): Indexing, All -> Same, differentiable;
}

/// The values that an update writes.
#[derive(Clone, Copy)]
enum Source<'a> {
    Tensor(&'a Tensor),
    /// A tensor multiplied by a number.
    Scaled(&'a Tensor, Scalar),
    /// One number for all elements.
    Number(Scalar),
}

impl<'a> Source<'a> {
    fn tensor(self) -> Option<&'a Tensor> {
        if let Source::Tensor(t) | Source::Scaled(t, _) = self { Some(t) } else { None }
    }
}

/// A write to a tensor along `dim`: each element of `source` is combined with the element that the index selects.
struct ScatterUpdate<'a> {
    op: &'static str,
    combine: Combine,
    /// Whether the index is a vector that selects slices. Otherwise the index has the shape of the source, and selects elements.
    slices: bool,
    dim: isize,
    index: &'a Tensor,
    source: Source<'a>,
}

impl ScatterUpdate<'_> {
    /// Checks the write against `target` and performs it. Returns the part of the source tensor that was read.
    fn write(&self, target: &Tensor) -> Result<Option<Tensor>> {
        let &ScatterUpdate { op, combine, slices, dim, index, source } = self;
        let (d, source, wraps) = match source {
            Source::Number(value) => {
                let d = target.shape().dim(op, dim)?;
                let shape = if slices {
                    target.check_index_vector(op, index)?;
                    with_dim_size(target.shape(), d, index.numel())
                } else {
                    target.check_element_index(op, dim, index)?;
                    index.shape().clone()
                };
                (d, expand_number(op, value, &shape, target)?, slices)
            }
            Source::Tensor(source) if slices => {
                (target.check_slices(op, dim, index, source)?, source.shallow_clone(), false)
            }
            Source::Tensor(source) => {
                let (d, source) = target.check_scatter(op, dim, index, source)?;
                (d, source, false)
            }
            Source::Scaled(source, alpha) => {
                let source = Source::Tensor(&scale_source(op, source, alpha)?);
                return ScatterUpdate { source, ..*self }.write(target);
            }
        };
        let index = if slices { &index.with_layout(broadcast_index(index, d, source.shape())) } else { index };
        scatter(op, combine, target, d, (index, wraps), &source)?;
        Ok(self.source.tensor().is_some().then_some(source))
    }

    fn apply_in_place<'t>(&self, target: &'t Tensor) -> Result<&'t Tensor> {
        let change = autograd::begin_in_place(self.op, target, self.source.tensor().as_slice())?;
        let source = self.write(target)?;
        if let Some(change) = change {
            change.finish(|out| self.record(out, target, source));
        }
        Ok(target)
    }

    /// Returns a copy of `x` with the update, recorded for autograd, or the result of a registered replacement.
    #[track_caller]
    fn apply_to_copy(&self, x: &Tensor) -> Result<Tensor> {
        let number = match self.source {
            Source::Scaled(_, number) | Source::Number(number) => Some(number),
            Source::Tensor(_) => None,
        };
        let arguments = || std::iter::once(self.dim.into()).chain(number.map(Argument::from)).collect();
        let inputs: SmallVec<[&Tensor; 3]> = [x, self.index].into_iter().chain(self.source.tensor()).collect();
        return_replacement!(self.op, inputs; arguments);
        let out = x.cast(x.dtype)?;
        let source = self.write(&out)?;
        Ok(self.record(out, x, source))
    }

    /// Records `out`, which is a copy of `x` with the update.
    fn record(&self, out: Tensor, x: &Tensor, source: Option<Tensor>) -> Tensor {
        let inputs: SmallVec<[&Tensor; 2]> = [x].into_iter().chain(&source).collect();
        let (&ScatterUpdate { op, combine, slices, dim, .. }, index) = (self, Saved::for_inputs(&inputs, self.index));
        record_gradients(op, out, &inputs, move |i, grad| match (i, combine) {
            (1, _) if slices => grad.index_select(dim, index.get(op)?),
            (1, _) => grad.gather(dim, index.get(op)?),
            (_, Combine::Set) if slices => grad.index_fill(dim, index.get(op)?, 0),
            (_, Combine::Set) => grad.scatter_value(dim, index.get(op)?, 0),
            _ => Ok(grad.shallow_clone()),
        })
    }
}

/// Generates a method that writes a source to a copy of the tensor, and its in-place form.
macro_rules! scatter_methods {
    ($($(#[doc = $doc:literal])+
        $name:ident / $in_place:ident ($($arg:ident: $t:ty),+): $combine:ident, $slices:literal, $source:expr;)*) => {
        impl Tensor { $(
            $(#[doc = $doc])+
            #[track_caller]
            pub fn $name(&self, dim: isize, index: &Tensor, $($arg: $t),+) -> Result<Tensor> {
                let (op, combine, slices, source) = (stringify!($name), Combine::$combine, $slices, $source);
                ScatterUpdate { op, combine, slices, dim, index, source }.apply_to_copy(self)
            }

            #[doc = concat!("The in-place form of [`Tensor::", stringify!($name), "`].")]
            pub fn $in_place(&self, dim: isize, index: &Tensor, $($arg: $t),+) -> Result<&Tensor> {
                let (op, combine, slices, source) = (stringify!($in_place), Combine::$combine, $slices, $source);
                ScatterUpdate { op, combine, slices, dim, index, source }.apply_in_place(self)
            }
        )* }
    };
}

scatter_methods! {
    /// Returns a copy of this tensor in which `source[i][j]` replaces element `[index[i][j]][j]`; this is the formula for dim 0 of a
    /// matrix (PyTorch's `scatter`). For an index that occurs several times, the last value is kept, and its gradient goes to all of
    /// these values. Differentiable with respect to both tensors. Fails as [`Tensor::gather`] does, and with [`Error::ShapeMismatch`] if
    /// `index` is larger than `source`.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let index = Tensor::from_slice(&[2i64, 0], [2, 1], Device::Cpu)?;
    /// let source = Tensor::from_slice(&[5f32, 6.0], [2, 1], Device::Cpu)?;
    /// let t = Tensor::zeros(&[2, 3], Device::Cpu)?.scatter(1, &index, &source)?;
    /// assert_eq!(t.to_vec::<f32>()?, [0.0, 0.0, 5.0, 6.0, 0.0, 0.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    scatter / scatter_ (source: &Tensor): Set, false, Source::Tensor(source);
    /// Returns a copy of this tensor in which `source[i][j]` is added to element `[index[i][j]][j]`; this is the formula for dim 0 of a
    /// matrix (PyTorch's `scatter_add`). All values with equal indices are added. The result has the same bits on every run.
    /// Differentiable with respect to both tensors. Fails as [`Tensor::scatter`] does.
    scatter_add / scatter_add_ (source: &Tensor): Add, false, Source::Tensor(source);
    /// Returns a copy of this tensor in which slice i of `source` is added to slice `index[i]` along `dim` (PyTorch's `index_add`). All
    /// slices with equal indices are added. The result has the same bits on every run. Differentiable with respect to both tensors. Fails
    /// as [`Tensor::index_select`] does.
    index_add / index_add_ (source: &Tensor): Add, true, Source::Tensor(source);
    /// Returns a copy of this tensor in which slice i of `source` replaces slice `index[i]` along `dim` (PyTorch's `index_copy`). For an
    /// index that occurs several times, the last slice is kept, and its gradient goes to all of these slices. Differentiable with respect
    /// to both tensors. Fails as [`Tensor::index_add`] does.
    index_copy / index_copy_ (source: &Tensor): Set, true, Source::Tensor(source);
    /// Writes like [`Tensor::scatter`], with one number as the source (PyTorch's `scatter` with a number for `src`). Differentiable.
    /// Fails as [`Tensor::gather`] does, and with [`Error::Invalid`] for a number that the dtype cannot hold.
    scatter_value / scatter_value_ (value: impl Into<Scalar>): Set, false, Source::Number(value.into());
    /// Adds slices like [`Tensor::index_add`], with the source multiplied by `alpha` (PyTorch's `index_add` with `alpha`). Differentiable
    /// with respect to both tensors. Fails with [`Error::Invalid`] if the tensors are integers and `alpha` is a fraction or out of the
    /// dtype's range.
    index_add_alpha / index_add_alpha_ (source: &Tensor, alpha: impl Into<Scalar>):
        Add, true, Source::Scaled(source, alpha.into());
    /// Returns a copy of this tensor in which all slices along `dim` that a vector of indices selects are filled with one number
    /// (PyTorch's `index_fill`). Negative indices count from the end. Differentiable. Fails as [`Tensor::index_select`] does, and with
    /// [`Error::Invalid`] for a number that the dtype cannot hold.
    index_fill / index_fill_ (value: impl Into<Scalar>): Set, true, Source::Number(value.into());
}

impl Tensor {
    /// Checks the operands. Returns the dim, and the part of the source that has the shape of the index.
    pub(crate) fn check_scatter(
        &self,
        op: &'static str,
        dim: isize,
        index: &Tensor,
        source: &Tensor,
    ) -> Result<(usize, Tensor)> {
        let d = self.check_element_index(op, dim, index)?;
        same_device(op, &[self, source])?;
        same_dtype(op, &[self, source])?;
        let (indices, elements) = (index.shape().dims(), source.shape().dims());
        mismatch!(op if indices.len() != elements.len() || indices.iter().zip(elements).any(|(i, s)| i > s),
            index, source, "the index must not be larger than the source in any dim");
        let mut part = source.shallow_clone();
        for (i, &n) in indices.iter().enumerate().filter(|&(i, &n)| elements[i] != n) {
            part = part.narrow(i as isize, 0, n)?;
        }
        Ok((d, part))
    }

    pub(crate) fn check_slices(&self, op: &'static str, dim: isize, index: &Tensor, source: &Tensor) -> Result<usize> {
        let d = self.shape().dim(op, dim)?;
        self.check_index_vector(op, index)?;
        same_device(op, &[self, source])?;
        same_dtype(op, &[self, source])?;
        mismatch!(op if source.shape() != &with_dim_size(self.shape(), d, index.numel()),
            self, source, "the source has a slice for each index and this tensor's shape otherwise");
        Ok(d)
    }
}
