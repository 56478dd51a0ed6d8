//! Indexing with several index tensors at once, as in NumPy's and PyTorch's `x[i, :, j]`.
//!
//! Several indices are first combined into one i64 tensor of linear offsets in memory. The combined tensor is an index into a dim of
//! stride 1, so that for tensors of any strides, reads and writes use the same two kernels as with a single index.

use crate::backend::problem::index::{Combine, IndexTerm, Indexed};
use crate::ops::dispatch::prelude::*;
use crate::ops::index::gather::{check_index, gradient_of_read};
use crate::ops::index::scatter::copy_if_shared;

/// Index tensors that have been checked against the shape of a tensor.
struct AdvancedIndex {
    op: &'static str,
    /// The indexed dims, each with its index tensor.
    given: SmallVec<[(usize, Tensor); 3]>,
    kept: Dims,
    /// The shape to which all index tensors are broadcast.
    index_shape: Shape,
    /// The shape of the result: the index shape replaces the indexed dims if these are adjacent, otherwise the index shape comes first.
    shape: Shape,
    /// The dim of the result at which the index shape begins.
    first: usize,
}

/// Converts indices so that each is for a single dim of `t`. A bool mask is replaced by one index tensor for each of its dims, which
/// together are the indices of the true elements.
fn expand_masks(op: &'static str, t: &Tensor, indices: &[Option<&Tensor>]) -> Result<SavedIndices> {
    let mut single: SmallVec<[Option<Saved>; 3]> = SmallVec::new();
    for index in indices {
        match index {
            Some(mask) if mask.dtype == DType::Bool => {
                same_device(op, &[t, mask])?;
                let rest = t.shape().dims().get(single.len()..).unwrap_or(&[]);
                mismatch!(op if mask.rank() == 0 || !rest.starts_with(mask.shape().dims()),
                    t, mask, "a mask must have the sizes of the dims that it indexes");
                let true_indices = mask.detach().nonzero()?;
                for d in 0..mask.rank() {
                    single.push(Some(Saved::without_hooks(&true_indices.select(1, d as isize)?)));
                }
            }
            index => single.push(index.map(|i| Saved::without_hooks(&i.detach()))),
        }
    }
    Ok(SavedIndices(single))
}

impl AdvancedIndex {
    fn new(op: &'static str, t: &Tensor, indices: &SavedIndices) -> Result<AdvancedIndex> {
        let indices = indices.get(op)?;
        invalid!(op if indices.len() > t.rank(),
            "{} indices are too many for a tensor of shape {}", indices.len(), t.shape());
        let given: SmallVec<[(usize, Tensor); 3]> =
            indices.iter().enumerate().filter_map(|(d, i)| i.map(|i| (d, i.detach()))).collect();
        let Some((first, last)) = given.first().zip(given.last()) else {
            return Err(Error::invalid(op, "at least one index tensor is needed"));
        };
        for (_, index) in &given {
            check_index(op, index)?;
            same_device(op, &[t, index])?;
        }
        let are_adjacent = last.0 - first.0 + 1 == given.len();
        let first = if are_adjacent { first.0 } else { 0 };
        let index_shape = given.iter().try_fold(Shape::default(), |all, (_, i)| all.broadcast(op, i.shape()))?;
        let kept: Dims = (0..t.rank()).filter(|d| given.iter().all(|(g, _)| g != d)).collect();
        let size = |d: &usize| t.shape().dims()[*d];
        let (before, after) = kept.split_at(first);
        let shape = before.iter().map(size).chain(index_shape.dims().iter().copied()).chain(after.iter().map(size));
        let shape = shape.collect::<Shape>().checked(op)?;
        Ok(AdvancedIndex { op, given, kept, index_shape, shape, first })
    }

    /// Combines all indices into one index, of the shape to which the indices are broadcast, into a single dim of `t`.
    fn linear_index(&self, t: &Tensor) -> Result<LinearIndex> {
        if let [(d, index)] = &self.given[..] {
            let (size, step) = (t.shape().dims()[*d], t.strides()[*d]);
            return Ok(LinearIndex { index: index.detach(), size, step, offset: t.layout.offset, wraps: true });
        }
        let axes = self.given.iter().map(|(d, _)| (t.shape().dims()[*d], t.strides()[*d]));
        if self.index_shape.numel() > 0
            && let Some(at) = axes.clone().position(|(size, _)| size == 0)
        {
            let index = self.given[at].1.cast(DType::I64)?.to_vec::<i64>()?[0];
            return Err(Error::IndexOutOfRange { op: self.op, index, size: 0 });
        }
        // Returns the maximum distance, in memory, of an indexed element after (`sign` 1) or before (`sign` -1) the first element of the
        // tensor.
        let reach = |sign: isize| -> usize {
            let far = |(size, step): (usize, isize)| size.saturating_sub(1) * (step * sign).max(0) as usize;
            if t.numel() == 0 { 0 } else { axes.clone().map(far).sum() }
        };
        let (back, ahead) = (reach(-1), reach(1));
        let index = backend::compute(&self.index_shape, DType::I64, t.device(), |b, out| {
            self.given.iter().zip(axes).enumerate().try_for_each(|(i, ((_, index), (size, step)))| {
                let index = &index.with_layout(index.layout.broadcast_to(&self.index_shape));
                let base = (i == 0).then_some(back as i64);
                b.linear_index(&IndexTerm { op: self.op, index, size, step, base, out })
            })
        })?;
        Ok(LinearIndex { index, size: back + ahead + 1, step: 1, offset: t.layout.offset - back, wraps: false })
    }

    fn read(&self, x: &Tensor) -> Result<Tensor> {
        let LinearIndex { index, size, step, offset, wraps } = self.linear_index(x)?;
        let (before, after) = self.kept.split_at(self.first);
        let strides = |index: &[isize], kept: &dyn Fn(usize) -> isize| -> Dims<isize> {
            let kept = |dims: &[usize]| dims.iter().map(|&d| kept(d)).collect::<Dims<isize>>();
            kept(before).into_iter().chain(index.iter().copied()).chain(kept(after)).collect()
        };
        let none: Dims<isize> = SmallVec::from_elem(0, self.index_shape.rank());
        let x_layout = Layout { shape: self.shape.clone(), strides: strides(&none, &|d| x.strides()[d]), offset };
        let index_layout = Layout {
            shape: self.shape.clone(),
            strides: strides(index.strides(), &|_| 0),
            offset: index.layout.offset,
        };
        Indexed { op: self.op, x, x_layout, index: &index, index_layout, size, step, wraps }.read()
    }

    /// Writes `values`, which are broadcast, to the indexed elements of `target`.
    fn write(&self, combine: Combine, target: &Tensor, values: &Tensor) -> Result<()> {
        if combine.needs_f32(target.dtype) {
            let wide = target.cast(DType::F32)?;
            self.write(combine, &wide, &values.cast(DType::F32)?)?;
            target.detach().copy_(&wide)?;
            return Ok(());
        }
        let LinearIndex { index, size, step, offset, wraps } = self.linear_index(target)?;
        // The indexed dims are moved to the front as one dim, because values are written in that order.
        let values = values.with_layout(values.layout.broadcast_to(&self.shape));
        let order = (self.first..self.first + self.index_shape.rank())
            .chain(0..self.first)
            .chain(self.first + self.index_shape.rank()..self.shape.rank());
        let order: Dims = order.collect();
        let kept = self.kept.iter().map(|&d| target.shape().dims()[d]);
        let shape: Shape = std::iter::once(self.index_shape.numel()).chain(kept).collect();
        let values = copy_if_shared(&values.with_layout(values.layout.permute(&order)).reshape(&shape)?, target)?;
        let index = copy_if_shared(&index.reshape(self.index_shape.numel())?, target)?;
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

/// An index into a dim of `size` elements, which are `step` apart and start at `offset`. With `wraps`, negative indices count from the
/// end.
struct LinearIndex {
    index: Tensor,
    size: usize,
    step: isize,
    offset: usize,
    wraps: bool,
}

/// Index tensors saved for backward.
struct SavedIndices(SmallVec<[Option<Saved>; 3]>);

impl SavedIndices {
    fn get(&self, op: &'static str) -> Result<SmallVec<[Option<&Tensor>; 3]>> {
        self.0.iter().map(|i| i.as_ref().map(|i| i.get(op)).transpose()).collect()
    }

    /// Packs the indices that an operation on `inputs` keeps for backward.
    fn pack_for(mut self, inputs: &[&Tensor]) -> SavedIndices {
        self.0.iter_mut().flatten().filter(|_| autograd::is_tracked(inputs)).for_each(Saved::pack);
        self
    }
}

/// A write of values, which are broadcast, to the elements that index tensors select.
struct IndexUpdate<'a> {
    op: &'static str,
    indices: &'a [Option<&'a Tensor>],
    values: &'a Tensor,
    /// Whether to add the values to the elements instead of replacing the elements.
    accumulate: bool,
}

impl IndexUpdate<'_> {
    /// Returns a copy of `x` with the update, recorded for autograd.
    fn apply_to_copy(&self, x: &Tensor) -> Result<Tensor> {
        let (out, indices) = (x.cast(x.dtype)?, expand_masks(self.op, x, self.indices)?);
        self.write(&out, &indices)?;
        Ok(self.record(out, x, indices))
    }

    fn apply_in_place(&self, target: &Tensor) -> Result<()> {
        let change = autograd::begin_in_place(self.op, target, &[self.values])?;
        let indices = expand_masks(self.op, target, self.indices)?;
        self.write(target, &indices)?;
        if let Some(change) = change {
            change.finish(|out| self.record(out, target, indices));
        }
        Ok(())
    }

    fn write(&self, target: &Tensor, indices: &SavedIndices) -> Result<()> {
        let &IndexUpdate { op, values, accumulate, .. } = self;
        same_device(op, &[target, values])?;
        same_dtype(op, &[target, values])?;
        let selection = AdvancedIndex::new(op, target, indices)?;
        if selection.shape.broadcast(op, values.shape())? != selection.shape {
            let hint = "the values must broadcast to the shape of the indexed elements";
            let (lhs, rhs) = (selection.shape, values.shape().clone());
            return Err(Error::ShapeMismatch { op, lhs, rhs, hint });
        }
        selection.write(if accumulate { Combine::Add } else { Combine::Set }, target, values)
    }

    /// Records `out`, which is a copy of `x` with the update.
    fn record(&self, out: Tensor, x: &Tensor, indices: SavedIndices) -> Tensor {
        let &IndexUpdate { op, values, accumulate, .. } = self;
        let (shape, indices) = (values.shape().clone(), indices.pack_for(&[x, values]));
        record_gradients(op, out, &[x, values], move |i, grad| match i {
            0 if accumulate => Ok(grad.shallow_clone()),
            0 => grad.index_put(&indices.get(op)?, &Tensor::zeros((), (grad.dtype, grad.device()))?, false),
            _ => grad.index(&indices.get(op)?)?.sum_to(&shape),
        })
    }
}

operations! {
    index(input: x, indices: xs, dims: sizes) "Tensor.__getitem__": Indexing, All -> Same, differentiable
        => |a| a.tensor(0)?.index(&read_indices(a, 1)?);
    index_put(input: x, values: x, indices: xs, dims: sizes, accumulate: bool = false): Indexing, Numbers -> Same, differentiable
        => |a| a.tensor(0)?.index_put(&read_indices(a, 2)?, a.tensor(1)?, a.bool(1)?);
    index_put_(input: x, values: x, indices: xs, dims: sizes, accumulate: bool = false): InPlace, Numbers -> Same
        => |a| a.tensor(0)?.index_put_(&read_indices(a, 2)?, a.tensor(1)?, a.bool(1)?).map(Tensor::shallow_clone);
    /// Returns elements of this tensor, flattened in row-major order, that `index`, of any shape, selects (PyTorch's `take`). Negative
    /// indices count from the end. Differentiable. Fails as [`Tensor::index`] does.
    take(input: x, index: x): Indexing, All -> Same, differentiable = |op, self, index| {
        self.reshape(self.numel())?.index_by(op, &[Some(index)])
    };
    /// Returns a copy of this tensor in which the elements of `source`, in order, replace the elements where `mask` is true (PyTorch's
    /// `masked_scatter`). Tensor and mask are broadcast against each other. Reads the number of true elements from the device.
    /// Differentiable with respect to this tensor and `source`. Fails with [`Error::ShapeMismatch`] for a mask that does not broadcast;
    /// [`Error::Invalid`] if `source` has fewer elements than the mask has true elements; [`Error::UnsupportedDType`] for a mask that is
    /// not bool.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let t = Tensor::zeros(&[2, 2], Device::Cpu)?;
    /// let mask = Tensor::from_slice(&[true, false, true, true], [2, 2], Device::Cpu)?;
    /// let source = Tensor::arange(1, 5, 1, Device::Cpu)?;
    /// assert_eq!(t.masked_scatter(&mask, &source)?.to_vec::<f32>()?, [1.0, 0.0, 2.0, 3.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    masked_scatter / masked_scatter_ (input: x, mask: x, source: x):
        Indexing, All -> Same, differentiable = |op, self, mask, source| {
        let shape = self.shape().broadcast(op, mask.shape())?;
        // A mask indexes the dims of a tensor, so a scalar is viewed as a vector of one element.
        let x = self.expand(&shape)?.atleast_1d()?;
        let out = match x.masked_source(op, mask, source)? {
            None => x.try_clone()?,
            Some((mask, source)) => {
                IndexUpdate { op, indices: &[Some(&mask)], values: &source, accumulate: false }.apply_to_copy(&x)?
            }
        };
        out.reshape(&shape)
    };
    /// Returns a copy of this tensor in which elements of `source` replace the elements at `index`, or with `accumulate` are added to these
    /// elements (PyTorch's `put`). `index` refers to the tensor flattened in row-major order. Negative indices count from the end.
    /// Differentiable with respect to this tensor and `source`. Fails as [`Tensor::index_put`] does, and with [`Error::ShapeMismatch`] if
    /// `index` and `source` have different numbers of elements.
    put / put_ (input: x, index: x, source: x, accumulate: bool = false):
        Indexing, Numbers -> Same, differentiable = |op, self, index, source, accumulate| {
        let (index, source) = flatten_pair(op, index, source)?;
        let update = IndexUpdate { op, indices: &[Some(&index)], values: &source, accumulate };
        update.apply_to_copy(&self.reshape(self.numel())?)?.reshape(self.shape())
    };
}

/// Reads the indices of a call by name: the index tensors come last, and argument 0 lists their dims.
fn read_indices<'a>(args: &Args<'a>, first: usize) -> Result<Vec<Option<&'a Tensor>>> {
    let (dims, rank) = (args.sizes(0)?, args.tensor(0)?.rank());
    if let Some(&d) = dims.iter().find(|d| **d >= rank) {
        return Err(Error::DimOutOfRange { op: args.name(), dim: isize::try_from(d).unwrap_or(isize::MAX), rank });
    }
    if args.given_tensors().len() != first + dims.len() {
        let reason = format!(
            "{} tensors of indices were given for {} dims",
            args.given_tensors().len().saturating_sub(first),
            dims.len()
        );
        return Err(Error::invalid(args.name(), reason));
    }
    let mut indices = vec![None; dims.iter().max().map_or(0, |d| d + 1)];
    for (k, &d) in dims.iter().enumerate() {
        indices[d] = Some(args.tensor(first + k)?);
    }
    Ok(indices)
}

/// Calls a registered replacement, if any, with the parameters of a call by name.
fn call_index_replacement(
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
    Ok(call_replacement(op, &all, arguments)?.map(|mut outs| outs.swap_remove(0)))
}

impl Tensor {
    /// Indexes the leading dims with index tensors, or `None` for a whole dim (PyTorch's `x[i, :, j]`, which calls `index`).
    /// Differentiable.
    ///
    /// The index tensors are broadcast against each other. Their dims replace the indexed dims if the indexed dims are adjacent, and
    /// otherwise come first. Negative indices count from the end. A bool mask with n dims indexes n dims, with the indices of its true
    /// elements, whose number is read from the device.
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
    /// [`Error::Invalid`] if there is no index tensor, or more indices than dims; [`Error::ShapeMismatch`] for indices that do not
    /// broadcast; otherwise the errors of [`Tensor::index_select`].
    #[track_caller]
    pub fn index(&self, indices: &[Option<&Tensor>]) -> Result<Tensor> {
        let _caller = Caller::enter();
        if let Some(out) = call_index_replacement("index", &[self], indices, None)? {
            return Ok(out);
        }
        self.index_by("index", indices)
    }

    fn index_by(&self, op: &'static str, indices: &[Option<&Tensor>]) -> Result<Tensor> {
        let (indices, shape) = (expand_masks(op, self, indices)?, self.shape().clone());
        let out = AdvancedIndex::new(op, self, &indices)?.read(self)?;
        let indices = indices.pack_for(&[self]);
        Ok(record_gradients(op, out, &[self], move |_, grad| {
            let indices = indices.get(op)?;
            gradient_of_read(grad, &shape, |zeros, grad, in_place| match in_place {
                true => zeros.index_put_(&indices, grad, true).map(Tensor::detach),
                false => zeros.index_put(&indices, grad, true),
            })
        }))
    }

    /// Returns a copy of this tensor in which `values` replace the indexed elements, or with `accumulate` are added to the indexed
    /// elements (PyTorch's `index_put`). Differentiable with respect to this tensor and `values`.
    ///
    /// The values are broadcast to the shape that [`Tensor::index`] would return. For an index that occurs several times, the last value
    /// is kept, and its gradient goes to all of these values. With `accumulate`, all of these values are added, in an order that gives
    /// the same bits on every run. Fails as [`Tensor::index`] does.
    ///
    /// ```
    /// use claystone::{Device, Tensor};
    /// let t = Tensor::zeros(&[2, 3], Device::Cpu)?;
    /// let (i, j) = (Tensor::from_slice(&[0i64, 0], 2, Device::Cpu)?, Tensor::from_slice(&[-1i64, 2], 2, Device::Cpu)?);
    /// let sum = t.index_put(&[Some(&i), Some(&j)], &Tensor::ones(&[], Device::Cpu)?, true)?;
    /// assert_eq!(sum.to_vec::<f32>()?, [0.0, 0.0, 2.0, 0.0, 0.0, 0.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    #[track_caller]
    pub fn index_put(&self, indices: &[Option<&Tensor>], values: &Tensor, accumulate: bool) -> Result<Tensor> {
        let _caller = Caller::enter();
        if let Some(out) = call_index_replacement("index_put", &[self, values], indices, Some(accumulate))? {
            return Ok(out);
        }
        IndexUpdate { op: "index_put", indices, values, accumulate }.apply_to_copy(self)
    }

    /// The in-place form of [`Tensor::index_put`].
    pub fn index_put_(&self, indices: &[Option<&Tensor>], values: &Tensor, accumulate: bool) -> Result<&Tensor> {
        IndexUpdate { op: "index_put_", indices, values, accumulate }.apply_in_place(self)?;
        Ok(self)
    }

    /// The in-place form of [`Tensor::put`].
    pub fn put_(&self, index: &Tensor, source: &Tensor, accumulate: bool) -> Result<&Tensor> {
        let op = "put_";
        let (index, source) = flatten_pair(op, index, source)?;
        match self.view(self.numel()) {
            Ok(flat) => {
                IndexUpdate { op, indices: &[Some(&index)], values: &source, accumulate }.apply_in_place(&flat)?
            }
            Err(_) => drop(self.copy_(&self.put(&index, &source, accumulate).with_op(op)?)?),
        }
        Ok(self)
    }

    /// The in-place form of [`Tensor::masked_scatter`]; the mask is broadcast to this tensor's shape.
    pub fn masked_scatter_(&self, mask: &Tensor, source: &Tensor) -> Result<&Tensor> {
        let op = "masked_scatter_";
        let x = self.atleast_1d()?;
        if let Some((mask, source)) = x.masked_source(op, mask, source)? {
            IndexUpdate { op, indices: &[Some(&mask)], values: &source, accumulate: false }.apply_in_place(&x)?;
        }
        Ok(self)
    }

    /// Returns the mask expanded to this tensor's shape and the used part of the source, or `None` if the mask is all false.
    fn masked_source(&self, op: &'static str, mask: &Tensor, source: &Tensor) -> Result<Option<(Tensor, Tensor)>> {
        same_device(op, &[self, mask, source])?;
        same_dtype(op, &[self, source])?;
        unsupported!(op if mask.dtype != DType::Bool, mask.dtype, "a bool mask");
        let mask = mask.detach().expand(self.shape()).with_op(op)?;
        let counted = mask.count_nonzero((), false)?;
        let count = match counted.storage.simulated_count("masked_scatter", mask.numel().min(source.numel())) {
            Some(largest) => largest,
            None => counted.item::<i64>()? as usize,
        };
        invalid!(op if source.numel() < count,
            "{count} elements are true in the mask, and the source has {}", source.numel());
        if count == 0 {
            return Ok(None);
        }
        Ok(Some((mask, source.reshape(source.numel())?.narrow(0, 0, count)?)))
    }
}

/// Flattens `index` and `source` to vectors, which must have the same size.
fn flatten_pair(op: &'static str, index: &Tensor, source: &Tensor) -> Result<(Tensor, Tensor)> {
    mismatch!(op if index.numel() != source.numel(),
        index, source, "there is one element of the source for each index");
    Ok((index.reshape(index.numel())?, source.reshape(source.numel())?))
}
