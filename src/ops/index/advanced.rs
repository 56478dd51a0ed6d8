//! Reading and writing by several index tensors at once, as NumPy's and PyTorch's `x[i, :, j]`.
//!
//! Several indices are first made one: an i64 tensor of how many elements further on in memory each combination lies. That
//! is an index into a dim of stride 1, so that reading and writing are the same two kernels as with a single index, and
//! strides of the tensor cost nothing.

use smallvec::SmallVec;

use crate::autograd::Saved;
use crate::backend::problem::index::{Combine, Indexed};
use crate::ops::dispatch::arguments::{Args, Argument};
use crate::ops::dispatch::operation::{ANY, Dtypes, Gives, Kind, Operation};
use crate::ops::dispatch::registry::{replaced, replacement};
use crate::ops::index::gather::{check_index, zeros_for};
use crate::ops::index::scatter::apart;
use crate::ops::{recorded, same_device, same_dtype};
use crate::tensor::{Dims, Layout};
use crate::{DType, Error, Result, Shape, Tensor, autograd, backend};

/// What index tensors mean for a tensor of some shape.
struct Picks {
    op: &'static str,
    /// The dims that are indexed, and their indices.
    given: SmallVec<[(usize, Tensor); 3]>,
    /// The dims that are not.
    kept: Dims,
    /// What the indices broadcast to.
    places: Shape,
    /// The shape of what they name: the places where the indexed dims stood if these are neighbours, else in front.
    shape: Shape,
    /// Where in it the places begin.
    first: usize,
}

/// Indices for single dims of `t`: a bool mask stands for the indices of what is true in it, one for each of its dims.
fn unmasked(op: &'static str, t: &Tensor, indices: &[Option<&Tensor>]) -> Result<Kept> {
    let mut single: SmallVec<[Option<Saved>; 3]> = SmallVec::new();
    for index in indices {
        match index {
            Some(mask) if mask.dtype == DType::Bool => {
                same_device(op, &[t, mask])?;
                let rest = t.shape().dims().get(single.len()..).unwrap_or(&[]);
                if mask.rank() == 0 || !rest.starts_with(mask.shape().dims()) {
                    let hint = "a mask has the sizes of the dims that it stands for";
                    let (lhs, rhs) = (t.shape().clone(), mask.shape().clone());
                    return Err(Error::ShapeMismatch { op, lhs, rhs, hint });
                }
                let places = mask.detach().nonzero()?;
                for d in 0..mask.rank() {
                    single.push(Some(Saved::new(&places.select(1, d as isize)?)));
                }
            }
            index => single.push(index.map(|i| Saved::new(&i.detach()))),
        }
    }
    Ok(Kept(single))
}

impl Picks {
    fn new(op: &'static str, t: &Tensor, indices: &Kept) -> Result<Picks> {
        let indices = indices.get(op)?;
        if indices.len() > t.rank() {
            let reason = format!("{} indices are too many for a tensor of shape {}", indices.len(), t.shape());
            return Err(Error::invalid(op, reason));
        }
        let given: SmallVec<[(usize, Tensor); 3]> =
            indices.iter().enumerate().filter_map(|(d, i)| i.map(|i| (d, i.detach()))).collect();
        let Some((first, last)) = given.first().zip(given.last()) else {
            return Err(Error::invalid(op, "there is no index tensor"));
        };
        for (_, index) in &given {
            check_index(op, index)?;
            same_device(op, &[t, index])?;
        }
        let neighbours = last.0 - first.0 + 1 == given.len();
        let first = if neighbours { first.0 } else { 0 };
        let places = given.iter().try_fold(Shape::default(), |all, (_, i)| all.broadcast(op, i.shape()))?;
        let kept: Dims = (0..t.rank()).filter(|d| given.iter().all(|(g, _)| g != d)).collect();
        let size = |d: &usize| t.shape().dims()[*d];
        let (before, after) = kept.split_at(first);
        let shape = before.iter().map(size).chain(places.dims().iter().copied()).chain(after.iter().map(size));
        let shape = shape.collect::<Shape>().checked(op)?;
        Ok(Picks { op, given, kept, places, shape, first })
    }

    /// The index, of the places' shape, into one dim of `t`.
    fn place(&self, t: &Tensor) -> Result<Place> {
        if let [(d, index)] = &self.given[..] {
            let (size, step) = (t.shape().dims()[*d], t.strides()[*d]);
            return Ok(Place { index: index.detach(), size, step, offset: t.layout.offset, wraps: true });
        }
        let axes = self.given.iter().map(|(d, _)| (t.shape().dims()[*d], t.strides()[*d]));
        if self.places.numel() > 0
            && let Some(at) = axes.clone().position(|(size, _)| size == 0)
        {
            let index = self.given[at].1.cast(DType::I64)?.to_vec::<i64>()?[0];
            return Err(Error::IndexOutOfRange { op: self.op, index, size: 0 });
        }
        // Elements before and after the first one that indices can name.
        let reach = |sign: isize| -> usize {
            let far = |(size, step): (usize, isize)| size.saturating_sub(1) * (step * sign).max(0) as usize;
            if t.numel() == 0 { 0 } else { axes.clone().map(far).sum() }
        };
        let (back, ahead) = (reach(-1), reach(1));
        let out = Tensor::empty_like_shape(&self.places, DType::I64, t.device())?;
        if out.numel() > 0 {
            for (i, ((_, index), axis)) in self.given.iter().zip(axes).enumerate() {
                let index = index.with_layout(index.layout.broadcast_to(&self.places));
                let base = (i == 0).then_some(back as i64);
                backend::of(t.device()).linear_index(self.op, &index, &out, axis, base)?;
            }
            out.storage.bump_version();
        }
        Ok(Place { index: out, size: back + ahead + 1, step: 1, offset: t.layout.offset - back, wraps: false })
    }

    fn read(&self, x: &Tensor) -> Result<Tensor> {
        let Place { index, size, step, offset, wraps } = self.place(x)?;
        let (before, after) = self.kept.split_at(self.first);
        let strides = |places: &[isize], kept: &dyn Fn(usize) -> isize| -> Dims<isize> {
            let kept = |dims: &[usize]| dims.iter().map(|&d| kept(d)).collect::<Dims<isize>>();
            kept(before).into_iter().chain(places.iter().copied()).chain(kept(after)).collect()
        };
        let none: Dims<isize> = SmallVec::from_elem(0, self.places.rank());
        let x_layout = Layout { shape: self.shape.clone(), strides: strides(&none, &|d| x.strides()[d]), offset };
        let index_layout = Layout {
            shape: self.shape.clone(),
            strides: strides(index.strides(), &|_| 0),
            offset: index.layout.offset,
        };
        Indexed { op: self.op, x, x_layout, index: &index, index_layout, size, step, wraps }.read()
    }

    /// Writes `values`, broadcast, to the places of `target`.
    fn write(&self, combine: Combine, target: &Tensor, values: &Tensor) -> Result<()> {
        if combine.rounds(target.dtype) {
            let wide = target.cast(DType::F32)?;
            self.write(combine, &wide, &values.cast(DType::F32)?)?;
            target.detach().copy_(&wide)?;
            return Ok(());
        }
        let Place { index, size, step, offset, wraps } = self.place(target)?;
        // The places as one dim, in front: that is the order in which they are written.
        let values = values.with_layout(values.layout.broadcast_to(&self.shape));
        let order = (self.first..self.first + self.places.rank())
            .chain(0..self.first)
            .chain(self.first + self.places.rank()..self.shape.rank());
        let order: Dims = order.collect();
        let kept = self.kept.iter().map(|&d| target.shape().dims()[d]);
        let shape: Shape = std::iter::once(self.places.numel()).chain(kept).collect();
        let values = apart(&values.with_layout(values.layout.permute(&order)).reshape(&shape)?, target)?;
        let index = apart(&index.reshape(self.places.numel())?, target)?;
        let first = |step: isize, others: &dyn Fn(usize) -> isize| -> Dims<isize> {
            std::iter::once(step).chain(self.kept.iter().map(|&d| others(d))).collect()
        };
        let index_layout =
            Layout { shape: shape.clone(), strides: first(index.strides()[0], &|_| 0), offset: index.layout.offset };
        let layout = Layout { shape, strides: first(0, &|d| target.strides()[d]), offset };
        let x_layout = values.layout.clone();
        let indexed = Indexed { op: self.op, x: &values, x_layout, index: &index, index_layout, size, step, wraps };
        indexed.write(combine, target, &layout, 0)
    }
}

/// An index into a dim of `size` with `step` between its elements, the first of which is at `offset`.
struct Place {
    index: Tensor,
    size: usize,
    step: isize,
    offset: usize,
    wraps: bool,
}

/// Index tensors to keep for backward, and to be given again.
struct Kept(SmallVec<[Option<Saved>; 3]>);

impl Kept {
    fn get(&self, op: &'static str) -> Result<SmallVec<[Option<&Tensor>; 3]>> {
        self.0.iter().map(|i| i.as_ref().map(|i| i.get(op)).transpose()).collect()
    }
}

pub(crate) static OPERATIONS: &[Operation] = &[
    Operation::new("index", "Tensor.__getitem__", Kind::Indexing, Dtypes::All, Gives::Same, (ANY, 1), |a| {
        a.x(0)?.index(&at_dims(a, 1)?)
    })
    .differentiable(),
    Operation::new("index_put", "index_put", Kind::Indexing, Dtypes::Numbers, Gives::Same, (ANY, 2), |a| {
        a.x(0)?.index_put(&at_dims(a, 2)?, a.x(1)?, a.bool(1)?)
    })
    .differentiable(),
    Operation::new("index_put_", "index_put_", Kind::InPlace, Dtypes::Numbers, Gives::Same, (ANY, 2), |a| {
        Ok(a.x(0)?.index_put_(&at_dims(a, 2)?, a.x(1)?, a.bool(1)?)?.shallow_clone())
    }),
    Operation::new("take", "take", Kind::Indexing, Dtypes::All, Gives::Same, (2, 0), |a| a.x(0)?.take(a.x(1)?))
        .differentiable(),
    Operation::new("masked_scatter", "masked_scatter", Kind::Indexing, Dtypes::All, Gives::Same, (3, 0), |a| {
        a.x(0)?.masked_scatter(a.x(1)?, a.x(2)?)
    })
    .differentiable(),
    Operation::new("masked_scatter_", "masked_scatter_", Kind::InPlace, Dtypes::All, Gives::Same, (3, 0), |a| {
        Ok(a.x(0)?.masked_scatter_(a.x(1)?, a.x(2)?)?.shallow_clone())
    }),
    Operation::new("put", "put", Kind::Indexing, Dtypes::Numbers, Gives::Same, (3, 1), |a| {
        a.x(0)?.put(a.x(1)?, a.x(2)?, a.bool(0)?)
    })
    .differentiable(),
    Operation::new("put_", "put_", Kind::InPlace, Dtypes::Numbers, Gives::Same, (3, 1), |a| {
        Ok(a.x(0)?.put_(a.x(1)?, a.x(2)?, a.bool(0)?)?.shallow_clone())
    }),
];

/// By name, the indices come last, and argument 0 says which dims they are for.
fn at_dims<'a>(args: &Args<'a>, first: usize) -> Result<Vec<Option<&'a Tensor>>> {
    let (dims, rank) = (args.sizes(0)?, args.x(0)?.rank());
    if let Some(&d) = dims.iter().find(|d| **d >= rank) {
        return Err(Error::DimOutOfRange { op: args.name(), dim: isize::try_from(d).unwrap_or(isize::MAX), rank });
    }
    if args.xs().len() != first + dims.len() {
        let reason =
            format!("{} tensors of indices were given for {} dims", args.xs().len().saturating_sub(first), dims.len());
        return Err(Error::invalid(args.name(), reason));
    }
    let mut indices = vec![None; dims.iter().max().map_or(0, |d| d + 1)];
    for (k, &d) in dims.iter().enumerate() {
        indices[d] = Some(args.x(first + k)?);
    }
    Ok(indices)
}

/// What a registered implementation makes of it, called as by name.
fn replaced_with(
    op: &'static str,
    tensors: &[&Tensor],
    indices: &[Option<&Tensor>],
    accumulate: Option<bool>,
) -> Result<Option<Tensor>> {
    let all: SmallVec<[&Tensor; 6]> = tensors.iter().copied().chain(indices.iter().copied().flatten()).collect();
    let arguments = || {
        let dims: Vec<usize> = (0..indices.len()).filter(|&d| indices[d].is_some()).collect();
        let dims = Argument::from(&dims[..]);
        std::iter::once(dims).chain(accumulate.map(Argument::from)).collect()
    };
    Ok(replacement(op, &all, arguments)?.map(|mut outs| outs.swap_remove(0)))
}

impl Tensor {
    /// The elements that index tensors name, one for each leading dim, `None` for a whole one (PyTorch's `x[i, :, j]`, which
    /// calls `index`). The indices are broadcast together; their dims stand where those indexed stood, or in front if these
    /// are no neighbours. Negative indices count from the end. A bool mask stands for as many dims as it has, and for the
    /// indices of what is true in it, which are read from the device. Differentiable.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let t = Tensor::arange(0, 6, 1, Device::Cpu)?.reshape([2, 3])?;
    /// let rows = Tensor::from_slice(&[0i64, 1, -1], 3, Device::Cpu)?;
    /// let columns = Tensor::from_slice(&[2i64, 0, -1], 3, Device::Cpu)?;
    /// assert_eq!(t.index(&[Some(&rows), Some(&columns)])?.to_vec::<f32>()?, [2.0, 3.0, 5.0]);
    /// assert_eq!(t.index(&[None, Some(&columns)])?.shape().dims(), [2, 3]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Invalid`] for no index or more than dims; [`Error::ShapeMismatch`] where indices do not broadcast; otherwise
    /// as [`Tensor::index_select`].
    pub fn index(&self, indices: &[Option<&Tensor>]) -> Result<Tensor> {
        if let Some(out) = replaced_with("index", &[self], indices, None)? {
            return Ok(out);
        }
        self.indexed("index", indices)
    }

    fn indexed(&self, op: &'static str, indices: &[Option<&Tensor>]) -> Result<Tensor> {
        let (indices, shape) = (unmasked(op, self, indices)?, self.shape().clone());
        let out = Picks::new(op, self, &indices)?.read(self)?;
        Ok(recorded(op, out, &[self], move |_, grad| {
            let (total, indices) = (zeros_for(grad, &shape)?, indices.get(op)?);
            let wide = grad.to_dtype(total.dtype)?;
            let total = match autograd::is_tracked(&[grad]) {
                true => total.index_put(&indices, &wide, true)?,
                false => total.index_put_(&indices, &wide, true)?.detach(),
            };
            total.to_dtype(grad.dtype)
        }))
    }

    /// A copy of this tensor with `values`, broadcast to the shape that [`Tensor::index`] would give, in place of the
    /// elements that the indices name, or added to them with `accumulate` (PyTorch's `index_put`). Of equal places the last
    /// value stays, whose gradient the others get too; added, all count, with the same bits on every run. Differentiable in
    /// both.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let t = Tensor::zeros(&[2, 3], Device::Cpu)?;
    /// let (i, j) = (Tensor::from_slice(&[0i64, 0], 2, Device::Cpu)?, Tensor::from_slice(&[-1i64, 2], 2, Device::Cpu)?);
    /// let sum = t.index_put(&[Some(&i), Some(&j)], &Tensor::ones(&[], Device::Cpu)?, true)?;
    /// assert_eq!(sum.to_vec::<f32>()?, [0.0, 0.0, 2.0, 0.0, 0.0, 0.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`Tensor::index`]; [`Error::ShapeMismatch`] where `values` do not broadcast, [`Error::DTypeMismatch`].
    pub fn index_put(&self, indices: &[Option<&Tensor>], values: &Tensor, accumulate: bool) -> Result<Tensor> {
        if let Some(out) = replaced_with("index_put", &[self, values], indices, Some(accumulate))? {
            return Ok(out);
        }
        self.indexed_put("index_put", indices, values, accumulate)
    }

    fn indexed_put(
        &self,
        op: &'static str,
        indices: &[Option<&Tensor>],
        values: &Tensor,
        accumulate: bool,
    ) -> Result<Tensor> {
        let (out, kept) = (self.cast(self.dtype)?, unmasked(op, self, indices)?);
        out.put_values(op, &kept, values, accumulate)?;
        let shape = values.shape().clone();
        Ok(recorded(op, out, &[self, values], move |i, grad| match i {
            0 if accumulate => Ok(grad.shallow_clone()),
            0 => grad.index_put(&kept.get(op)?, &Tensor::zeros((), (grad.dtype, grad.device()))?, false),
            _ => grad.index(&kept.get(op)?)?.sum_to(&shape),
        }))
    }

    /// [`Tensor::index_put`] in place.
    ///
    /// # Errors
    /// As [`Tensor::index_put`]; [`Error::Autograd`] where a tensor is tracked; [`Error::Invalid`] into an expanded view.
    pub fn index_put_(&self, indices: &[Option<&Tensor>], values: &Tensor, accumulate: bool) -> Result<&Tensor> {
        let op = "index_put_";
        autograd::check_in_place(op, self, &[values])?;
        self.put_values(op, &unmasked(op, self, indices)?, values, accumulate)?;
        Ok(self)
    }

    fn put_values(&self, op: &'static str, indices: &Kept, values: &Tensor, accumulate: bool) -> Result<()> {
        same_device(op, &[self, values])?;
        same_dtype(op, &[self, values])?;
        let picks = Picks::new(op, self, indices)?;
        if picks.shape.broadcast(op, values.shape())? != picks.shape {
            let hint = "the values broadcast to the shape of what the indices name";
            let (lhs, rhs) = (picks.shape, values.shape().clone());
            return Err(Error::ShapeMismatch { op, lhs, rhs, hint });
        }
        picks.write(if accumulate { Combine::Add } else { Combine::Set }, self, values)
    }

    /// The elements at `index`, of any shape, in this tensor taken as a vector in row-major order (PyTorch's `take`).
    /// Negative indices count from the end. Differentiable.
    ///
    /// # Errors
    /// As [`Tensor::index`].
    pub fn take(&self, index: &Tensor) -> Result<Tensor> {
        replaced!("take", [self, index]);
        self.reshape(self.numel())?.indexed("take", &[Some(index)])
    }

    /// A copy of this tensor with `source`, an element for each of `index`, at these places of the tensor taken as a vector
    /// in row-major order, or added there with `accumulate` (PyTorch's `put`). Negative indices count from the end.
    /// Differentiable in both.
    ///
    /// # Errors
    /// As [`Tensor::index_put`]; [`Error::ShapeMismatch`] where `index` and `source` have different numbers of elements.
    pub fn put(&self, index: &Tensor, source: &Tensor, accumulate: bool) -> Result<Tensor> {
        let op = "put";
        replaced!(op, [self, index, source], accumulate);
        let (index, source) = lists(op, index, source)?;
        let flat = self.reshape(self.numel())?;
        flat.indexed_put(op, &[Some(&index)], &source, accumulate)?.reshape(self.shape())
    }

    /// [`Tensor::put`] in place.
    ///
    /// # Errors
    /// As [`Tensor::put`] and [`Tensor::index_put_`].
    pub fn put_(&self, index: &Tensor, source: &Tensor, accumulate: bool) -> Result<&Tensor> {
        let op = "put_";
        autograd::check_in_place(op, self, &[source])?;
        let (index, source) = lists(op, index, source)?;
        match self.detach().view(self.numel()) {
            Ok(flat) => flat.put_values(op, &unmasked(op, &flat, &[Some(&index)])?, &source, accumulate)?,
            Err(_) => drop(self.copy_(&self.detach().put(&index, &source, accumulate).map_err(|e| e.of(op))?)?),
        }
        Ok(self)
    }
}

impl Tensor {
    /// A copy of this tensor with the elements of `source`, in order, in place of those where `mask` is true, the two
    /// broadcast (PyTorch's `masked_scatter`). How many that are is read from the device. Differentiable in both.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let t = Tensor::zeros(&[2, 2], Device::Cpu)?;
    /// let mask = Tensor::from_slice(&[true, false, true, true], [2, 2], Device::Cpu)?;
    /// let source = Tensor::arange(1, 5, 1, Device::Cpu)?;
    /// assert_eq!(t.masked_scatter(&mask, &source)?.to_vec::<f32>()?, [1.0, 0.0, 2.0, 3.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::ShapeMismatch`] where the mask does not broadcast; [`Error::Invalid`] for fewer elements than places;
    /// [`Error::UnsupportedDType`] for a mask that is not bool; [`Error::DTypeMismatch`], [`Error::DeviceMismatch`].
    pub fn masked_scatter(&self, mask: &Tensor, source: &Tensor) -> Result<Tensor> {
        let op = "masked_scatter";
        replaced!(op, [self, mask, source]);
        let shape = self.shape().broadcast(op, mask.shape())?;
        let x = at_least_1d(&self.expand(&shape)?)?;
        let out = match x.scattered_by(op, mask, source)? {
            None => x.try_clone()?,
            Some((mask, source)) => x.indexed_put(op, &[Some(&mask)], &source, false)?,
        };
        out.reshape(&shape)
    }

    /// [`Tensor::masked_scatter`] in place, the mask broadcast to this tensor.
    ///
    /// # Errors
    /// As [`Tensor::masked_scatter`] and [`Tensor::index_put_`].
    pub fn masked_scatter_(&self, mask: &Tensor, source: &Tensor) -> Result<&Tensor> {
        let op = "masked_scatter_";
        autograd::check_in_place(op, self, &[source])?;
        let x = at_least_1d(self)?;
        if let Some((mask, source)) = x.scattered_by(op, mask, source)? {
            x.put_values(op, &unmasked(op, &x, &[Some(&mask)])?, &source, false)?;
        }
        Ok(self)
    }

    /// The mask in this tensor's shape and what goes to its places; None where there is no place.
    fn scattered_by(&self, op: &'static str, mask: &Tensor, source: &Tensor) -> Result<Option<(Tensor, Tensor)>> {
        same_device(op, &[self, mask, source])?;
        same_dtype(op, &[self, source])?;
        if mask.dtype != DType::Bool {
            return Err(Error::UnsupportedDType { op, dtype: mask.dtype, expected: "a bool mask" });
        }
        let mask = mask.detach().expand(self.shape()).map_err(|e| e.of(op))?;
        let places = mask.count_nonzero((), false)?.item::<i64>()? as usize;
        if source.numel() < places {
            let reason = format!("{places} places are true in the mask, and the source has {}", source.numel());
            return Err(Error::invalid(op, reason));
        }
        if places == 0 {
            return Ok(None);
        }
        Ok(Some((mask, source.reshape(source.numel())?.narrow(0, 0, places)?)))
    }
}

/// A mask has dims to stand for: a scalar is a vector of one.
fn at_least_1d(t: &Tensor) -> Result<Tensor> {
    if t.rank() == 0 { t.unsqueeze(0) } else { Ok(t.shallow_clone()) }
}

/// Both as vectors.
fn lists(op: &'static str, index: &Tensor, source: &Tensor) -> Result<(Tensor, Tensor)> {
    if index.numel() != source.numel() {
        let hint = "there is one element of the source for each index";
        return Err(Error::ShapeMismatch { op, lhs: index.shape().clone(), rhs: source.shape().clone(), hint });
    }
    Ok((index.reshape(index.numel())?, source.reshape(source.numel())?))
}
