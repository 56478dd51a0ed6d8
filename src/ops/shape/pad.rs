//! Padding of the ends of dims.

use crate::ops::dispatch::prelude::*;

/// The elements that [`Tensor::pad`] adds around a tensor.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum PadMode {
    /// This number for all added elements.
    Constant(Scalar),
    /// The elements next to the edge, in reverse. The edge itself is not repeated.
    Reflect,
    /// Copies of the element at the edge.
    Replicate,
    /// The elements at the opposite side of the dim.
    Circular,
}

impl PadMode {
    /// Returns the name that PyTorch gives this mode.
    pub fn name(self) -> &'static str {
        match self {
            PadMode::Constant(_) => "constant",
            PadMode::Reflect => "reflect",
            PadMode::Replicate => "replicate",
            PadMode::Circular => "circular",
        }
    }

    fn constant(self) -> Option<Scalar> {
        if let PadMode::Constant(value) = self { Some(value) } else { None }
    }
}

impl Default for PadMode {
    fn default() -> PadMode {
        PadMode::Constant(Scalar::Int(0))
    }
}

impl Tensor {
    /// Adds elements at the ends of the last dims, or removes elements where a number is negative (PyTorch's `pad`). Differentiable.
    ///
    /// `pads` has two numbers for each dim, the number of elements before and after, and begins with the last dim. As in PyTorch, elements
    /// are removed after reflecting and replicating, but before circular padding. Fails for an odd number of pads, or more than two for
    /// each dim; for a dim that has fewer elements than are removed; for a dim too small to reflect or repeat the required number of
    /// elements; for a constant that the dtype cannot hold.
    ///
    /// ```
    /// use claystone::{Device, PadMode, Tensor};
    /// let a = Tensor::arange(1, 4, 1, Device::Cpu)?;
    /// assert_eq!(a.pad(&[1, 2], PadMode::default())?.to_vec::<f32>()?, [0.0, 1.0, 2.0, 3.0, 0.0, 0.0]);
    /// assert_eq!(a.pad(&[2, 0], PadMode::Reflect)?.to_vec::<f32>()?, [3.0, 2.0, 1.0, 2.0, 3.0]);
    /// # Ok::<(), claystone::Error>(())
    /// ```
    #[track_caller]
    pub fn pad(&self, pads: &[isize], mode: PadMode) -> Result<Tensor> {
        return_replacement!(op = "pad", [self], pads, mode.name(), mode.constant());
        invalid!(op if !pads.len().is_multiple_of(2) || pads.len() / 2 > self.rank(),
            "{} pads were given: there must be two for each of at most {} dimensions", pads.len(), self.rank());
        let grown: Dims<isize> = pads.iter().map(|p| *p.max(&0)).collect();
        let around = |x: Tensor| {
            grown.chunks(2).enumerate().try_fold(x, |x, (i, ends)| {
                x.pad_dim(self.rank() - 1 - i, ends[0].unsigned_abs(), ends[1].unsigned_abs(), mode)
            })
        };
        let out = match mode {
            PadMode::Constant(value) => return self.crop(pads)?.pad_constant(&grown, value),
            PadMode::Circular => around(self.crop(pads)?)?,
            PadMode::Reflect | PadMode::Replicate => around(self.shallow_clone())?.crop(pads)?,
        };
        if out.is_contiguous() && !out.shares_storage(self) { Ok(out) } else { out.recorded_copy(op) }
    }

    /// Removes the elements of negative pads.
    fn crop(&self, pads: &[isize]) -> Result<Tensor> {
        let mut left = self.shallow_clone();
        for (i, ends) in pads.chunks(2).enumerate().filter(|(_, ends)| ends.iter().any(|&p| p < 0)) {
            let d = self.rank() - 1 - i;
            let size = self.shape().dims()[d];
            let [before, after] = [ends[0].min(0).unsigned_abs(), ends[1].min(0).unsigned_abs()];
            let Some(kept) = size.checked_sub(before).and_then(|rest| rest.checked_sub(after)) else {
                fail!("pad", "dimension {d} of size {size} cannot lose {before} and {after} elements");
            };
            left = left.narrow(d as isize, before, kept)?;
        }
        Ok(left)
    }

    /// Adds `value` around the tensor. No pad is negative.
    fn pad_constant(&self, pads: &[isize], value: Scalar) -> Result<Tensor> {
        let op = "pad";
        if pads.iter().all(|&p| p == 0) {
            return self.recorded_copy(op);
        }
        let ends = |d: usize| {
            let at = 2 * (self.rank() - 1 - d);
            pads.get(at..at + 2).map_or((0, 0), |ends| (ends[0].unsigned_abs(), ends[1].unsigned_abs()))
        };
        let grown = |(d, &size): (usize, &usize)| size.saturating_add(ends(d).0).saturating_add(ends(d).1);
        let shape: Shape = self.shape().dims().iter().enumerate().map(grown).collect();
        let out = Tensor::full(shape, value, self).with_op(op)?;
        let mut inside = out.layout.clone();
        for (d, &size) in self.shape().dims().iter().enumerate() {
            inside = inside.narrow(op, d, ends(d).0, size)?;
        }
        out.with_layout(inside).copy_(&self.detach())?;
        let back: Dims<isize> = pads.iter().map(|p| -p).collect();
        Ok(autograd::record_unary_differentiable(op, out, self, move |grad| grad.crop(&back)))
    }

    /// Adds `before` elements before and `after` elements after the tensor along dim `d`, copied from the tensor itself.
    fn pad_dim(&self, d: usize, before: usize, after: usize, mode: PadMode) -> Result<Tensor> {
        let (dim, size) = (d as isize, self.shape().dims()[d]);
        let most = match mode {
            PadMode::Reflect => size.saturating_sub(1),
            PadMode::Circular => size,
            _ if size > 0 => usize::MAX,
            _ => 0,
        };
        invalid!("pad" if before.max(after) > most,
            "dimension {d} of size {size} is too small for {before} and {after} elements of {mode:?} padding");
        if before == 0 && after == 0 {
            return Ok(self.shallow_clone());
        }
        let repeated = |at: usize, count: usize| {
            let mut sizes: Dims<isize> = self.shape().dims().iter().map(|_| -1).collect();
            sizes[d] = isize::try_from(count).unwrap_or(isize::MAX);
            self.narrow(dim, at, 1)?.expand(&sizes[..])
        };
        let (head, tail) = match mode {
            PadMode::Reflect => {
                (self.narrow(dim, 1, before)?.flip(dim)?, self.narrow(dim, size - 1 - after, after)?.flip(dim)?)
            }
            PadMode::Circular => (self.narrow(dim, size - before, before)?, self.narrow(dim, 0, after)?),
            _ => (repeated(0, before)?, repeated(size - 1, after)?),
        };
        Tensor::cat(&[&head, self, &tail], dim).with_op("pad")
    }
}
