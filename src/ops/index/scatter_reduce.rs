//! Writing through an index, where all values that are written to the same element are reduced.

use crate::backend::problem::index::Combine;
use crate::error::in_steps;
use crate::ops::dispatch::prelude::*;
use crate::ops::index::gather::broadcast_index;
use crate::ops::index::scatter::{expand_number, scatter};
use crate::ops::index::scatter_reduction::ScatterReduce;

/// Reduces the elements of `source` into the elements of `target` that the index selects along dim `d`.
fn reduce_into(
    op: &'static str,
    target: &Tensor,
    d: usize,
    index: &Tensor,
    source: &Tensor,
    (reduce, include_self): (ScatterReduce, bool),
) -> Result<()> {
    let (.., combine) = ScatterReduce::ALL[reduce as usize];
    if combine.needs_f32(target.dtype) {
        let (wide, from) = (target.cast(DType::F32)?, source.cast(DType::F32)?);
        reduce_into(op, &wide, d, index, &from, (reduce, include_self))?;
        target.detach().copy_(&wide)?;
        return Ok(());
    }
    // The counts of a mean are computed before the target is written, because their computation can fail.
    let count = match reduce {
        ScatterReduce::Mean => {
            let dtype = if target.dtype.is_float() { target.dtype } else { DType::I64 };
            let count = Tensor::full(target.shape(), include_self, (dtype, target.device()))?;
            scatter(
                op,
                Combine::Add,
                &count,
                d,
                (index, false),
                &expand_number(op, 1.into(), source.shape(), &count)?,
            )?;
            Some(count)
        }
        _ => None,
    };
    in_steps(
        op,
        || target.storage.version(),
        || {
            if !include_self {
                let neutral = expand_number(op, reduce.neutral_element(target.dtype), source.shape(), target)?;
                scatter(op, Combine::Set, target, d, (index, false), &neutral)?;
            }
            scatter(op, combine, target, d, (index, false), source)?;
            let Some(count) = &count else { return Ok(()) };
            let target = target.detach();
            Tensor::map_into(&[&target, count], &[], &[&target], |e, _| {
                let n = e[1].eq(0.0).select(1.0, &e[1]);
                vec![if count.dtype.is_float() { &e[0] / n } else { e[0].floor_divide(n) }]
            })
            .with_op(op)
        },
    )
}

fn read_scatter_reduction(args: &Args, i: usize) -> Result<ScatterReduce> {
    args.text(i)?.parse()
}

operations! {
    /// Returns a copy of this tensor in which each `source[i][j]` is reduced into element `[index[i][j]][j]`; this is the formula for dim
    /// 0 of a matrix (PyTorch's `scatter_reduce`). Without `include_self`, the previous values of these elements are not included.
    /// Differentiable with respect to both tensors. Fails as [`Tensor::scatter`] does.
    ///
    /// ```
    /// use claystone::{Device, Tensor, ops::ScatterReduce};
    /// let index = Tensor::from_slice(&[0i64, 0, 2], 3, Device::Cpu)?;
    /// let source = Tensor::from_slice(&[2f32, 4.0, 5.0], 3, Device::Cpu)?;
    /// let t = Tensor::ones(&[3], Device::Cpu)?.scatter_reduce(0, &index, &source, ScatterReduce::Mean, false)?;
    /// assert_eq!(t.to_vec::<f32>()?, [3.0, 1.0, 5.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    scatter_reduce / scatter_reduce_ (input: x, dim: int, index: x, src: x,
        reduce: text @read_scatter_reduction, include_self: bool = true):
        Indexing, Numbers -> Same, differentiable = |op, self, dim, index, source, reduce, include_self| {
        self.scatter_reduced(op, dim, index, source, (reduce, include_self))
    };
    /// Returns a copy of this tensor in which slice i of `source` is reduced into slice `index[i]` along `dim`; see
    /// [`Tensor::scatter_reduce`]. PyTorch's `index_reduce`, extended by sums. Differentiable with respect to both tensors. Fails as
    /// [`Tensor::index_add`] does.
    index_reduce(input: x, dim: int, index: x, source: x, reduce: text @read_scatter_reduction, include_self: bool = true):
        Indexing, Numbers -> Same, differentiable = |op, self, dim, index, source, reduce, include_self| {
        let d = self.check_slices(op, dim, index, source)?;
        let index = index.with_layout(broadcast_index(index, d, source.shape()));
        self.scatter_reduced(op, dim, &index, source, (reduce, include_self))
    };
}

impl Tensor {
    /// The in-place form of [`Tensor::scatter_reduce`]. Fails as [`Tensor::scatter_`] does.
    pub fn scatter_reduce_(
        &self,
        dim: isize,
        index: &Tensor,
        source: &Tensor,
        reduce: ScatterReduce,
        include_self: bool,
    ) -> Result<&Tensor> {
        let op = "scatter_reduce_";
        let (d, from) = self.check_scatter(op, dim, index, source)?;
        if let Some(change) = autograd::begin_in_place(op, self, &[source])? {
            let reduced = change.copy()?.scatter_reduced(op, dim, index, source, (reduce, include_self))?;
            return self.copy_(&reduced);
        }
        reduce_into(op, self, d, index, &from, (reduce, include_self))?;
        Ok(self)
    }

    fn scatter_reduced(
        &self,
        op: &'static str,
        dim: isize,
        index: &Tensor,
        source: &Tensor,
        (reduce, include_self): (ScatterReduce, bool),
    ) -> Result<Tensor> {
        let (d, source) = self.check_scatter(op, dim, index, source)?;
        let out = self.cast(self.dtype)?;
        reduce_into(op, &out, d, index, &source, (reduce, include_self))?;
        let saved = [self, &source, index].map(|t| Saved::for_inputs(&[self, &source], t));
        Ok(record_gradients_with_result(op, out, &[self, &source], move |i, grad, out| {
            let [x, source, index] = [saved[0].get(op)?, saved[1].get(op)?, saved[2].get(op)?];
            let gradient = ReductionGradient { x, source, index, out, dim, include_self }.gradient(i, reduce, grad)?;
            if i == 0 && !include_self { gradient.scatter_value(dim, index, 0) } else { Ok(gradient) }
        }))
    }
}

/// The operands and the result of a reduction, from which its gradients are computed.
struct ReductionGradient<'a> {
    x: &'a Tensor,
    source: &'a Tensor,
    index: &'a Tensor,
    out: &'a Tensor,
    dim: isize,
    include_self: bool,
}

impl ReductionGradient<'_> {
    /// Computes the gradient of input `i`. Input 0 is x, whose indexed elements the caller sets to zero if `include_self` is false; input
    /// 1 is the source.
    fn gradient(&self, i: usize, reduce: ScatterReduce, grad: &Tensor) -> Result<Tensor> {
        let at_source = |t: &Tensor| t.gather(self.dim, self.index);
        match reduce {
            ScatterReduce::Sum if i == 0 => Ok(grad.shallow_clone()),
            ScatterReduce::Sum => at_source(grad),
            ScatterReduce::Mean => {
                let ones = Tensor::ones(self.source.shape(), (grad.dtype, grad.device()))?;
                let count = Tensor::full(grad.shape(), self.include_self, (grad.dtype, grad.device()))?;
                let share = grad.div(&count.scatter_add_(self.dim, self.index, &ones)?.clamp_min(1)?)?;
                if i == 0 { Ok(share) } else { at_source(&share) }
            }
            ScatterReduce::Prod => self.product_gradient(i, grad),
            ScatterReduce::Amax | ScatterReduce::Amin => {
                // The gradient is divided evenly among the elements that equal the maximum or minimum.
                let (mine, theirs) = (self.x.eq(self.out)?, self.source.eq(&at_source(self.out)?)?);
                let (mine, theirs) = (mine.to_dtype(grad.dtype)?, theirs.to_dtype(grad.dtype)?);
                let mine = if self.include_self { mine } else { mine.scatter_value(self.dim, self.index, 0)? };
                let share = grad.div(&mine.scatter_add(self.dim, self.index, &theirs)?)?;
                if i == 0 { mine.mul(&share) } else { theirs.mul(&at_source(&share)?) }
            }
        }
    }

    /// Computes the gradient of a product. The gradient of an element is the product of all others: the result divided by the element,
    /// or, if the element is the only zero, the product of the other elements.
    fn product_gradient(&self, i: usize, grad: &Tensor) -> Result<Tensor> {
        let (dim, index, include) = (self.dim, self.index, self.include_self);
        let product = |x: &Tensor, source: &Tensor| x.scatter_reduce(dim, index, source, ScatterReduce::Prod, include);
        let zero = |t: &Tensor| no_grad(|| t.eq_scalar(0));
        if i == 0 {
            let x = self.x.masked_fill(&zero(self.x)?, 1)?;
            return grad.mul(&product(&x, self.source)?)?.div(&x);
        }
        let is_zero = zero(self.source)?;
        let counts = is_zero.to_dtype(grad.dtype)?;
        let zeros = Tensor::zeros(grad.shape(), (grad.dtype, grad.device()))?;
        let zeros = zeros.scatter_add_(dim, index, &counts)?.gather(dim, index)?;
        let is_only_zero = is_zero.logical_and(&zeros.eq_scalar(1)?)?;
        let without = product(self.x, &self.source.masked_fill(&is_only_zero, 1)?)?;
        let others = self.out.gather(dim, index)?.div(&self.source.masked_fill(&is_zero, 1)?)?;
        grad.gather(dim, index)?.mul(&is_only_zero.where_cond(&without.gather(dim, index)?, &others)?)
    }
}
