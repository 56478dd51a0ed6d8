//! Writing through one index: `scatter` and its kin, whose index has a place for each element, and `index_add` and its kin,
//! whose index is a vector with a place for each slice.

use crate::autograd::Saved;
use crate::backend::problem::index::{Combine, Indexed};
use crate::ops::dispatch::operation::{Dtypes, Gives, Kind, Operation};
use crate::ops::dispatch::registry::replaced;
use crate::ops::index::gather::{along, check_index, fits, with_dim, without};
use crate::ops::{recorded, same_device, same_dtype};
use crate::tensor::Layout;
use crate::{DType, Error, Result, Scalar, Shape, Tensor, autograd, backend};

impl Indexed<'_> {
    /// Writes `x` to `target`, whose elements lie as `layout` says, which has no stride along d.
    pub(crate) fn write(&self, combine: Combine, target: &Tensor, layout: &Layout, d: usize) -> Result<()> {
        if self.x_layout.numel() == 0 {
            return Ok(());
        }
        if target.layout.may_alias_itself() {
            let reason = "several elements of the tensor written to are one (an expanded view): write to a clone()";
            return Err(Error::invalid(self.op, reason));
        }
        if self.size == 0 {
            return Err(self.nowhere()?);
        }
        backend::launch(&[target], |b| b.scatter(self, combine, target, layout, d))
    }
}

/// An index as a view of the shape of what is written through it.
pub(crate) struct Places {
    index: Tensor,
    wraps: bool,
}

impl Places {
    pub(crate) fn of(index: &Tensor) -> Places {
        Places { index: index.detach(), wraps: false }
    }

    fn vector(index: &Tensor, d: usize, shape: &Shape) -> Places {
        Places { index: index.with_layout(along(index, d, shape)), wraps: false }
    }
}

/// `t`, or a copy where it shares storage with the tensor written to: the CPU locks a storage either for reading or for
/// writing.
pub(crate) fn apart(t: &Tensor, target: &Tensor) -> Result<Tensor> {
    if t.shares_storage(target) { t.cast(t.dtype) } else { Ok(t.detach()) }
}

/// Writes `source`, of the places' shape, to `target` along dim d. Halves are added and multiplied in f32 and rounded once.
pub(crate) fn scatter(
    op: &'static str,
    combine: Combine,
    target: &Tensor,
    d: usize,
    places: &Places,
    source: &Tensor,
) -> Result<()> {
    if combine.rounds(target.dtype) {
        let wide = target.cast(DType::F32)?;
        scatter(op, combine, &wide, d, places, &source.cast(DType::F32)?)?;
        target.detach().copy_(&wide)?;
        return Ok(());
    }
    let (index, x) = (apart(&places.index, target)?, apart(source, target)?);
    let (layout, step) = without(target, d, x.shape());
    let (x_layout, index_layout, size) = (x.layout.clone(), index.layout.clone(), target.shape().dims()[d]);
    let indexed = Indexed { op, x: &x, x_layout, index: &index, index_layout, size, step, wraps: places.wraps };
    indexed.write(combine, target, &layout, d)
}

/// `alpha` times the source, in its dtype.
fn times(op: &'static str, source: &Tensor, alpha: Scalar) -> Result<Tensor> {
    alpha.check_whole(op, source.dtype)?;
    match alpha {
        Scalar::Float(x) if !source.dtype.is_float() => source.mul_scalar(x as i64),
        alpha => source.mul_scalar(alpha),
    }
}

/// One value as a view of `shape`.
pub(crate) fn everywhere(op: &'static str, value: Scalar, shape: &Shape, like: &Tensor) -> Result<Tensor> {
    value.check_whole(op, like.dtype)?;
    let one = Tensor::full((), value, (like.dtype, like.device()))?;
    Ok(one.with_layout(one.layout.broadcast_to(shape)))
}

pub(crate) static OPERATIONS: &[Operation] = &[
    Operation::new("scatter", "scatter", Kind::Indexing, Dtypes::All, Gives::Same, (3, 1), |a| {
        a.x(0)?.scatter(a.int(0)?, a.x(1)?, a.x(2)?)
    })
    .differentiable(),
    Operation::new("scatter_", "scatter_", Kind::InPlace, Dtypes::All, Gives::Same, (3, 1), |a| {
        Ok(a.x(0)?.scatter_(a.int(0)?, a.x(1)?, a.x(2)?)?.shallow_clone())
    }),
    Operation::new("scatter_add", "scatter_add", Kind::Indexing, Dtypes::Numbers, Gives::Same, (3, 1), |a| {
        a.x(0)?.scatter_add(a.int(0)?, a.x(1)?, a.x(2)?)
    })
    .differentiable(),
    Operation::new("scatter_add_", "scatter_add_", Kind::InPlace, Dtypes::Numbers, Gives::Same, (3, 1), |a| {
        Ok(a.x(0)?.scatter_add_(a.int(0)?, a.x(1)?, a.x(2)?)?.shallow_clone())
    }),
    Operation::new("scatter_value", "scatter", Kind::Indexing, Dtypes::All, Gives::Same, (2, 2), |a| {
        a.x(0)?.scatter_value(a.int(0)?, a.x(1)?, a.scalar(1)?)
    })
    .differentiable(),
    Operation::new("scatter_value_", "scatter_", Kind::InPlace, Dtypes::All, Gives::Same, (2, 2), |a| {
        Ok(a.x(0)?.scatter_value_(a.int(0)?, a.x(1)?, a.scalar(1)?)?.shallow_clone())
    }),
    Operation::new("index_add", "index_add", Kind::Indexing, Dtypes::Numbers, Gives::Same, (3, 1), |a| {
        a.x(0)?.index_add(a.int(0)?, a.x(1)?, a.x(2)?)
    })
    .differentiable(),
    Operation::new("index_add_", "index_add_", Kind::InPlace, Dtypes::Numbers, Gives::Same, (3, 1), |a| {
        Ok(a.x(0)?.index_add_(a.int(0)?, a.x(1)?, a.x(2)?)?.shallow_clone())
    }),
    Operation::new("index_add_alpha", "index_add", Kind::Indexing, Dtypes::Numbers, Gives::Same, (3, 2), |a| {
        a.x(0)?.index_add_alpha(a.int(0)?, a.x(1)?, a.x(2)?, a.scalar(1)?)
    })
    .differentiable(),
    Operation::new("index_add_alpha_", "index_add_", Kind::InPlace, Dtypes::Numbers, Gives::Same, (3, 2), |a| {
        Ok(a.x(0)?.index_add_alpha_(a.int(0)?, a.x(1)?, a.x(2)?, a.scalar(1)?)?.shallow_clone())
    }),
    Operation::new("index_copy", "index_copy", Kind::Indexing, Dtypes::All, Gives::Same, (3, 1), |a| {
        a.x(0)?.index_copy(a.int(0)?, a.x(1)?, a.x(2)?)
    })
    .differentiable(),
    Operation::new("index_copy_", "index_copy_", Kind::InPlace, Dtypes::All, Gives::Same, (3, 1), |a| {
        Ok(a.x(0)?.index_copy_(a.int(0)?, a.x(1)?, a.x(2)?)?.shallow_clone())
    }),
    Operation::new("index_fill", "index_fill", Kind::Indexing, Dtypes::All, Gives::Same, (2, 2), |a| {
        a.x(0)?.index_fill(a.int(0)?, a.x(1)?, a.scalar(1)?)
    })
    .differentiable(),
    Operation::new("index_fill_", "index_fill_", Kind::InPlace, Dtypes::All, Gives::Same, (2, 2), |a| {
        Ok(a.x(0)?.index_fill_(a.int(0)?, a.x(1)?, a.scalar(1)?)?.shallow_clone())
    }),
];

impl Tensor {
    /// A copy of this tensor with `source[i][j]` in place of `[index[i][j]][j]` and so on along `dim` (PyTorch's `scatter`).
    /// Of equal indices the last stays, whose gradient the others get too. Differentiable in both.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let index = Tensor::from_slice(&[2i64, 0], [2, 1], Device::Cpu)?;
    /// let source = Tensor::from_slice(&[5f32, 6.0], [2, 1], Device::Cpu)?;
    /// let t = Tensor::zeros(&[2, 3], Device::Cpu)?.scatter(1, &index, &source)?;
    /// assert_eq!(t.to_vec::<f32>()?, [0.0, 0.0, 5.0, 6.0, 0.0, 0.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Tensor::gather`]; [`Error::ShapeMismatch`] where `index` is larger than `source`; [`Error::DTypeMismatch`].
    pub fn scatter(&self, dim: isize, index: &Tensor, source: &Tensor) -> Result<Tensor> {
        replaced!("scatter", [self, index, source], dim);
        self.scattered("scatter", Combine::Set, dim, index, source)
    }

    /// [`Tensor::scatter`] in place.
    ///
    /// # Errors
    /// As [`Tensor::scatter`]; [`Error::Autograd`] where a tensor is tracked; [`Error::Invalid`] into an expanded view.
    pub fn scatter_(&self, dim: isize, index: &Tensor, source: &Tensor) -> Result<&Tensor> {
        self.scattered_("scatter_", Combine::Set, dim, index, source)
    }

    /// [`Tensor::scatter`] of one number (PyTorch's `scatter` with a number for `src`). Differentiable.
    ///
    /// # Errors
    /// As [`Tensor::gather`]; [`Error::Invalid`] for a fraction into integers.
    pub fn scatter_value(&self, dim: isize, index: &Tensor, value: impl Into<Scalar>) -> Result<Tensor> {
        let (op, value): (_, Scalar) = ("scatter_value", value.into());
        replaced!(op, [self, index], dim, value);
        let d = self.check_places(op, dim, index)?;
        let out = self.cast(self.dtype)?;
        let source = everywhere(op, value, index.shape(), self)?;
        scatter(op, Combine::Set, &out, d, &Places::of(index), &source)?;
        let index = Saved::new(index);
        Ok(recorded(op, out, &[self], move |_, grad| grad.scatter_value(dim, index.get(op)?, 0)))
    }

    /// [`Tensor::scatter_value`] in place.
    ///
    /// # Errors
    /// As [`Tensor::scatter_value`]; [`Error::Autograd`] where this tensor is tracked; [`Error::Invalid`] into an expanded
    /// view.
    pub fn scatter_value_(&self, dim: isize, index: &Tensor, value: impl Into<Scalar>) -> Result<&Tensor> {
        let op = "scatter_value_";
        let d = self.check_places(op, dim, index)?;
        autograd::check_in_place(op, self, &[])?;
        let source = everywhere(op, value.into(), index.shape(), self)?;
        scatter(op, Combine::Set, self, d, &Places::of(index), &source)?;
        Ok(self)
    }

    /// A copy of this tensor with `source[i][j]` added at `[index[i][j]][j]` and so on along `dim` (PyTorch's
    /// `scatter_add`); equal indices add up. The same bits on every run. Differentiable in both.
    ///
    /// # Errors
    /// As [`Tensor::scatter`].
    pub fn scatter_add(&self, dim: isize, index: &Tensor, source: &Tensor) -> Result<Tensor> {
        replaced!("scatter_add", [self, index, source], dim);
        self.scattered("scatter_add", Combine::Add, dim, index, source)
    }

    /// [`Tensor::scatter_add`] in place.
    ///
    /// # Errors
    /// As [`Tensor::scatter_`].
    pub fn scatter_add_(&self, dim: isize, index: &Tensor, source: &Tensor) -> Result<&Tensor> {
        self.scattered_("scatter_add_", Combine::Add, dim, index, source)
    }

    fn scattered(
        &self,
        op: &'static str,
        combine: Combine,
        dim: isize,
        index: &Tensor,
        source: &Tensor,
    ) -> Result<Tensor> {
        let (d, source) = self.check_scatter(op, dim, index, source)?;
        let out = self.cast(self.dtype)?;
        scatter(op, combine, &out, d, &Places::of(index), &source)?;
        let index = Saved::new(index);
        Ok(recorded(op, out, &[self, &source], move |i, grad| match (i, combine) {
            (1, _) => grad.gather(dim, index.get(op)?),
            (_, Combine::Set) => grad.scatter_value(dim, index.get(op)?, 0),
            _ => Ok(grad.shallow_clone()),
        }))
    }

    fn scattered_(
        &self,
        op: &'static str,
        combine: Combine,
        dim: isize,
        index: &Tensor,
        source: &Tensor,
    ) -> Result<&Tensor> {
        let (d, from) = self.check_scatter(op, dim, index, source)?;
        autograd::check_in_place(op, self, &[source])?;
        scatter(op, combine, self, d, &Places::of(index), &from)?;
        Ok(self)
    }

    /// A copy of this tensor with slice i of `source` added to slice `index[i]` along `dim` (PyTorch's `index_add`); equal
    /// indices add up. The same bits on every run. Differentiable in both.
    ///
    /// # Errors
    /// As [`Tensor::index_select`]; [`Error::ShapeMismatch`], [`Error::DTypeMismatch`].
    pub fn index_add(&self, dim: isize, index: &Tensor, source: &Tensor) -> Result<Tensor> {
        replaced!("index_add", [self, index, source], dim);
        self.index_written("index_add", Combine::Add, dim, index, source)
    }

    /// [`Tensor::index_add`] in place.
    ///
    /// # Errors
    /// As [`Tensor::index_add`]; [`Error::Autograd`] where a tensor is tracked; [`Error::Invalid`] into an expanded view.
    pub fn index_add_(&self, dim: isize, index: &Tensor, source: &Tensor) -> Result<&Tensor> {
        self.index_written_("index_add_", Combine::Add, dim, index, source)
    }

    /// [`Tensor::index_add`] of `alpha` times the source (PyTorch's `index_add` with `alpha`). Differentiable in both.
    ///
    /// # Errors
    /// As [`Tensor::index_add`]; [`Error::Invalid`] for a fraction of integers.
    pub fn index_add_alpha(
        &self,
        dim: isize,
        index: &Tensor,
        source: &Tensor,
        alpha: impl Into<Scalar>,
    ) -> Result<Tensor> {
        let (op, alpha): (_, Scalar) = ("index_add_alpha", alpha.into());
        replaced!(op, [self, index, source], dim, alpha);
        self.index_written(op, Combine::Add, dim, index, &times(op, source, alpha)?)
    }

    /// [`Tensor::index_add_alpha`] in place.
    ///
    /// # Errors
    /// As [`Tensor::index_add_`]; [`Error::Invalid`] for a fraction of integers.
    pub fn index_add_alpha_(
        &self,
        dim: isize,
        index: &Tensor,
        source: &Tensor,
        alpha: impl Into<Scalar>,
    ) -> Result<&Tensor> {
        let (op, alpha): (_, Scalar) = ("index_add_alpha_", alpha.into());
        autograd::check_in_place(op, self, &[source])?;
        self.index_written_(op, Combine::Add, dim, index, &times(op, source, alpha)?)
    }

    /// A copy of this tensor with slice i of `source` in place of slice `index[i]` along `dim` (PyTorch's `index_copy`). Of
    /// equal indices the last stays, whose gradient the others get too. Differentiable in both.
    ///
    /// # Errors
    /// As [`Tensor::index_add`].
    pub fn index_copy(&self, dim: isize, index: &Tensor, source: &Tensor) -> Result<Tensor> {
        replaced!("index_copy", [self, index, source], dim);
        self.index_written("index_copy", Combine::Set, dim, index, source)
    }

    /// [`Tensor::index_copy`] in place.
    ///
    /// # Errors
    /// As [`Tensor::index_add_`].
    pub fn index_copy_(&self, dim: isize, index: &Tensor, source: &Tensor) -> Result<&Tensor> {
        self.index_written_("index_copy_", Combine::Set, dim, index, source)
    }

    fn index_written(
        &self,
        op: &'static str,
        combine: Combine,
        dim: isize,
        index: &Tensor,
        source: &Tensor,
    ) -> Result<Tensor> {
        let d = self.check_slices(op, dim, index, source)?;
        let out = self.cast(self.dtype)?;
        scatter(op, combine, &out, d, &Places::vector(index, d, source.shape()), source)?;
        let index = Saved::new(index);
        Ok(recorded(op, out, &[self, source], move |i, grad| match (i, combine) {
            (1, _) => grad.index_select(dim, index.get(op)?),
            (_, Combine::Set) => grad.index_fill(dim, index.get(op)?, 0),
            _ => Ok(grad.shallow_clone()),
        }))
    }

    fn index_written_(
        &self,
        op: &'static str,
        combine: Combine,
        dim: isize,
        index: &Tensor,
        source: &Tensor,
    ) -> Result<&Tensor> {
        let d = self.check_slices(op, dim, index, source)?;
        autograd::check_in_place(op, self, &[source])?;
        scatter(op, combine, self, d, &Places::vector(index, d, source.shape()), source)?;
        Ok(self)
    }

    /// A copy of this tensor with a number in all slices along `dim` that `index` names (PyTorch's `index_fill`). Negative
    /// indices count from the end. Differentiable.
    ///
    /// # Errors
    /// As [`Tensor::index_select`]; [`Error::Invalid`] for a fraction into integers.
    pub fn index_fill(&self, dim: isize, index: &Tensor, value: impl Into<Scalar>) -> Result<Tensor> {
        let (op, value): (_, Scalar) = ("index_fill", value.into());
        replaced!(op, [self, index], dim, value);
        let out = self.cast(self.dtype)?;
        out.index_filled(op, dim, index, value)?;
        let index = Saved::new(index);
        Ok(recorded(op, out, &[self], move |_, grad| grad.index_fill(dim, index.get(op)?, 0)))
    }

    /// [`Tensor::index_fill`] in place.
    ///
    /// # Errors
    /// As [`Tensor::index_fill`]; [`Error::Autograd`] where this tensor is tracked; [`Error::Invalid`] into an expanded view.
    pub fn index_fill_(&self, dim: isize, index: &Tensor, value: impl Into<Scalar>) -> Result<&Tensor> {
        let op = "index_fill_";
        autograd::check_in_place(op, self, &[])?;
        self.index_filled(op, dim, index, value.into())?;
        Ok(self)
    }

    fn index_filled(&self, op: &'static str, dim: isize, index: &Tensor, value: Scalar) -> Result<()> {
        let d = self.shape().dim(op, dim)?;
        self.check_vector(op, index)?;
        let shape = with_dim(self.shape(), d, index.numel());
        let places = Places { wraps: true, ..Places::vector(index, d, &shape) };
        scatter(op, Combine::Set, self, d, &places, &everywhere(op, value, &shape, self)?)
    }

    pub(crate) fn check_places(&self, op: &'static str, dim: isize, index: &Tensor) -> Result<usize> {
        let d = self.shape().dim(op, dim)?;
        check_index(op, index)?;
        same_device(op, &[self, index])?;
        fits(op, index.shape(), self.shape(), d)?;
        Ok(d)
    }

    /// The dim, and the part of the source that the index has places for.
    pub(crate) fn check_scatter(
        &self,
        op: &'static str,
        dim: isize,
        index: &Tensor,
        source: &Tensor,
    ) -> Result<(usize, Tensor)> {
        let d = self.check_places(op, dim, index)?;
        same_device(op, &[self, source])?;
        same_dtype(op, &[self, source])?;
        let (places, elements) = (index.shape().dims(), source.shape().dims());
        if places.len() != elements.len() || places.iter().zip(elements).any(|(i, s)| i > s) {
            let hint = "the index is nowhere larger than the source";
            return Err(Error::ShapeMismatch { op, lhs: index.shape().clone(), rhs: source.shape().clone(), hint });
        }
        let mut part = source.shallow_clone();
        for (i, &n) in places.iter().enumerate().filter(|&(i, &n)| elements[i] != n) {
            part = part.narrow(i as isize, 0, n)?;
        }
        Ok((d, part))
    }

    pub(crate) fn check_slices(&self, op: &'static str, dim: isize, index: &Tensor, source: &Tensor) -> Result<usize> {
        let d = self.shape().dim(op, dim)?;
        self.check_vector(op, index)?;
        same_device(op, &[self, source])?;
        same_dtype(op, &[self, source])?;
        if source.shape() != &with_dim(self.shape(), d, index.numel()) {
            let hint = "the source has a slice for each index and this tensor's shape otherwise";
            return Err(Error::ShapeMismatch { op, lhs: self.shape().clone(), rhs: source.shape().clone(), hint });
        }
        Ok(d)
    }
}
